"""DFlash 2: DFlash's block with convolutions in its layers, and a selector that joins the slots to a path."""

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters.base import Drawn, one_by_one
from specmlx.drafters.block import BlockTrunk, Join, Layer
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.config import DrafterConfig
from specmlx.drafters.context import Context
from specmlx.drafters.proposal import DraftPolicy, Proposal, among
from specmlx.kernels.draft_head import Candidates, path, top_k, walk


class DynamicConv(nn.Module):
    """Grouped causal convolutions around a sublayer, inside each block; both kernels come from the sublayer's input.

    out_i[c] = sum over k of (base[side, k, c] + dynamic_i[side, k, group of c]) * y_{i - k}[c], with y = 0 before the
    block; side 0 is the input's, side 1 the output's.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.block = config.block_size
        self.taps, self.groups = config.conv_kernel_size, config.hidden_size // config.conv_group_size
        # The identity, as training begins with.
        self.base_kernel = mx.zeros((2, self.taps, config.hidden_size)).at[:, 0].add(1)
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)
        self.kernel_projection.weight = mx.zeros_like(self.kernel_projection.weight)

    def __call__(self, u: mx.array, sublayer: Callable[[mx.array], mx.array]) -> mx.array:
        """Rows `[B, R, hidden]` of one block or of many packed ones."""
        B, R, _ = u.shape
        dynamic = self.kernel_projection(u).reshape(B, R, 2, self.taps, self.groups, 1)
        return self._convolve(sublayer(self._convolve(u, dynamic, 0)), dynamic, 1)

    def _convolve(self, y: mx.array, dynamic: mx.array, side: int) -> mx.array:
        B, R, H = y.shape
        blocks = y.reshape(B, R // self.block, self.block, H)
        total = mx.zeros_like(y).reshape(B, R, self.groups, -1)
        for k in range(self.taps):
            moved = mx.pad(blocks[:, :, : self.block - k], [(0, 0), (0, 0), (k, 0), (0, 0)])
            kernel = self.base_kernel[side, k].reshape(self.groups, -1) + dynamic[:, :, side, k]
            total = total + kernel * moved.reshape(B, R, self.groups, -1)
        return total.reshape(B, R, H)


class ConvLayer(Layer):
    """A layer whose attention and MLP each have a convolution around them; context rows pass it by."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.attention_conv = DynamicConv(config)
        self.mlp_conv = DynamicConv(config)

    def __call__(self, x: mx.array, positions: mx.array, join: Join, mask: mx.array) -> mx.array:
        attention = partial(self.self_attn, positions=positions, join=join, mask=mask)
        h = x + self.attention_conv(self.input_layernorm(x), attention)
        return h + self.mlp_conv(self.post_attention_layernorm(h), self.mlp)


class CandidateSelector(nn.Module):
    """A few candidates a slot, and scores S_t(b | a) = U_t(b) + sum_r A[a]_r z_r B[b]_r of each after the token before.

    z = hidden_projection(h_t), A and B are the codebooks, U the logits; all in float32.
    """

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


class DFlash2Trunk(BlockTrunk):
    """The trunk with DFlash 2's convolutions and selector, by the publishers' names."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config, ConvLayer)
        self.candidate_selector = CandidateSelector(config)


class DFlash2(BlockDrafter):
    """DFlash 2 (Inco AI): γ = block - 1; a slot's token is one of its best candidates, given the token before it.

    Greedy sequences take the path that is expected to keep most tokens; others walk. A walk draws a slot from the
    candidates' scores after the token drawn before, which is its q: every other id has the logit -inf.
    """

    trunk = DFlash2Trunk

    def _propose(self, context: Context, anchor: mx.array, slots: int, policy: DraftPolicy) -> Proposal:
        selector, hidden = self.model.candidate_selector, self.slots_hidden(context, anchor, slots)
        unary, ids = selector.candidates(self.logits(hidden))
        ids = ids if self.vocabulary is None else self.vocabulary.ids[ids]
        codebooks = selector.predecessor_codebook, selector.successor_codebook
        if policy.greedy:
            return Proposal(path(Candidates(unary, ids, *codebooks, anchor, selector.hidden_projection(hidden))))
        if draws := policy.draws(len(anchor), slots, self.vocab_size):
            candidates = Candidates(unary, ids, *codebooks, anchor, selector.hidden_projection(hidden))
            tokens, scores = walk(candidates, draws.at(ids), draws.scale)
            return Proposal(tokens, draws.q(among(scores, ids, self.vocab_size)) if draws.sampled else None)

        def draw(slot: int, previous: mx.array) -> Drawn:
            at = slice(slot, slot + 1)
            scores = selector.scores(hidden[:, at], unary[:, at], ids[:, at], previous[..., None])[..., 0, :]
            return policy.draft_among(scores, ids[:, at], slot, self.vocab_size)

        return Proposal(*one_by_one(anchor, slots, draw))
