"""DFlash 2's candidate selector: a few candidates a slot, and how well each follows each one of the slot before."""

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters.config import DrafterConfig
from specmlx.kernels.draft_head import path, top_k, walk


class CandidateSelector(nn.Module):
    """Scores S_t(b | a) = U_t(b) + sum_r A[a]_r z_r B[b]_r, z = hidden_projection(h_t), in float32."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        shape = (config.vocab_size, config.selector_rank)
        self.top_k = config.selector_top_k
        self.predecessor_codebook = mx.random.normal(shape, scale=0.02)
        self.successor_codebook = mx.random.normal(shape, scale=0.02)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def candidates(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """The `top_k` largest logits `[..., K]` float32 of `[..., V]`, and their ids `[..., K]` int32."""
        ids = mx.stop_gradient(top_k(mx.stop_gradient(logits), min(self.top_k, logits.shape[-1]))[1])
        return mx.take_along_axis(logits, ids, axis=-1).astype(mx.float32), ids

    def scores(self, hidden: mx.array, unary: mx.array, ids: mx.array, previous: mx.array) -> mx.array:
        """Scores `[..., P, K]` float32 of candidates `[..., K]` after each of the tokens `previous` `[..., P]`.

        hidden: the slot's normed row `[..., hidden]`; unary: the candidates' logits `[..., K]`.
        """
        z = self.hidden_projection(hidden).astype(mx.float32)[..., None, :]
        before = self.predecessor_codebook[previous].astype(mx.float32) * z
        return unary[..., None, :] + before @ self.successor_codebook[ids].astype(mx.float32).swapaxes(-1, -2)

    def path(self, hidden: mx.array, unary: mx.array, ids: mx.array, anchor: mx.array) -> mx.array:
        """The tokens `[B, S]` of the path through the slots' candidates that is expected to keep most of its tokens."""
        z = self.hidden_projection(hidden)
        return path(unary, ids, self.predecessor_codebook, self.successor_codebook, anchor, z)

    def walk(
        self,
        hidden: mx.array,
        unary: mx.array,
        ids: mx.array,
        anchor: mx.array,
        noise: mx.array | None,
        scale: float,
    ) -> tuple[mx.array, mx.array]:
        """Tokens `[B, S]` drawn slot by slot by argmax(scale * score + noise), and each slot's scores `[B, S, K]`."""
        z = self.hidden_projection(hidden)
        return walk(unary, ids, self.predecessor_codebook, self.successor_codebook, anchor, z, noise, scale)
