"""DFlash 2's candidate selector: a few candidates a slot, and how well each follows each one of the slot before."""

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters.config import DrafterConfig


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
        ids = mx.argpartition(mx.stop_gradient(-logits), kth=self.top_k - 1, axis=-1)[..., : self.top_k]
        ids = mx.stop_gradient(ids.astype(mx.int32))
        return mx.take_along_axis(logits, ids, axis=-1).astype(mx.float32), ids

    def scores(self, hidden: mx.array, unary: mx.array, ids: mx.array, previous: mx.array) -> mx.array:
        """Scores `[..., P, K]` float32 of candidates `[..., K]` after each of the tokens `previous` `[..., P]`.

        hidden: the slot's normed row `[..., hidden]`; unary: the candidates' logits `[..., K]`.
        """
        z = self.hidden_projection(hidden).astype(mx.float32)[..., None, :]
        before = self.predecessor_codebook[previous].astype(mx.float32) * z
        return unary[..., None, :] + before @ self.successor_codebook[ids].astype(mx.float32).swapaxes(-1, -2)


def best_path(tables: mx.array) -> mx.array:
    """The path `[B, S]` (indices of candidates) of the greatest expected number of accepted tokens.

    tables: scores `[B, S, K, K]` of slot t's candidate (last axis) after slot t - 1's; of slot 0 the first row counts.
    With p_t(b | a) = softmax(S_t(. | a))(b), a path is expected to keep p_1 (1 + p_2 (1 + ...)) tokens: the best rest
    after a is W_t(a) = max over b of p_t(b | a) (1 + W_{t+1}(b)), and one pass from the last slot finds it exactly.
    """
    B, S, K, _ = tables.shape
    p = mx.softmax(tables, axis=-1, precise=True)
    rest, choices = mx.zeros((B, K)), []
    for t in reversed(range(S)):
        kept = p[:, t] * (1 + rest[:, None])
        choices.append(mx.argmax(kept, axis=-1))
        rest = kept.max(axis=-1)
    path = [choices.pop()[:, :1]]
    while choices:
        path.append(mx.take_along_axis(choices.pop(), path[-1], axis=1))
    return mx.concatenate(path, axis=1)
