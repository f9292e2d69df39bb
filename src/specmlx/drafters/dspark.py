"""DSpark: DFlash's trunk where the anchor's row proposes too, and a Markov head that chains the tokens."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma3_text import MLP

from specmlx.drafters.base import Drawn, dense_rows, one_by_one, take_rows
from specmlx.drafters.block import Attention, BlockTrunk, Join, Layer
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.config import GEMMA4, DrafterConfig
from specmlx.drafters.context import Context
from specmlx.drafters.proposal import DraftPolicy, Proposal, among
from specmlx.kernels.draft_head import Candidates, chain, top_k, walk
from specmlx.kernels.linear import products


class MarkovHead(nn.Module):
    """A low-rank bias on a slot's logits by the token before it, W2 of a latent `[..., r]` (arXiv 2607.05147).

    vanilla: the latent is W1[x]. gated: sigmoid(gate [h; W1[x]]) W1[x]. rnn: [g, c, o] = joint [s; W1[x]; h], the next
    slot's state is sigmoid(g) s + (1 - sigmoid(g)) tanh(c), and the latent is tanh(o); a block begins with s = 0.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.kind = config.markov_head_type
        r, D = config.markov_rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, r)
        self.markov_w2 = nn.Linear(r, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(D + r, r)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * r + D, 3 * r)

    def step(self, state: mx.array | None, previous: mx.array, hidden: mx.array) -> tuple[mx.array | None, mx.array]:
        """The state after a slot, and its latent `[..., r]`, from the token before it `[...]` and its row `[..., D]`.

        `state` is None at a block's first slot, and for heads that have none.
        """
        x = self.markov_w1(previous)
        if self.kind == "vanilla":
            return None, x
        hidden = hidden.astype(x.dtype)
        if self.kind == "gated":
            return None, mx.sigmoid(self.gate_proj(mx.concatenate([hidden, x], axis=-1))) * x
        state = mx.zeros_like(x) if state is None else state
        gate, candidate, output = mx.split(self.joint_proj(mx.concatenate([state, x, hidden], axis=-1)), 3, axis=-1)
        gate = mx.sigmoid(gate)
        return gate * state + (1 - gate) * mx.tanh(candidate), mx.tanh(output)

    def block(self, previous: mx.array, hidden: mx.array) -> mx.array:
        """Biases `[..., S, Vd]` of a whole block whose tokens before are known, `[..., S]`; rows `[..., S, D]`."""
        if self.kind != "rnn":
            return self.markov_w2(self.step(None, previous, hidden)[1])
        state, latents = None, []
        for slot in range(previous.shape[-1]):
            state, latent = self.step(state, previous[..., slot], hidden[..., slot, :])
            latents.append(latent)
        return self.markov_w2(mx.stack(latents, axis=-2))


class ConfidenceHead(nn.Module):
    """How likely the target is to accept a slot's token, judged before that token is known."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def __call__(self, hidden: mx.array, markov: mx.array) -> mx.array:
        """Logits `[...]` float32 from slots' rows `[..., hidden]` and w1 of the tokens before them."""
        x = mx.concatenate([hidden, markov.astype(hidden.dtype)], axis=-1) if self.with_markov else hidden
        return self.proj(x).squeeze(-1).astype(mx.float32)


class Gemma4Attention(Attention):
    """Attention whose scale is 1; its values are normed, and may be the keys' projection before norm and rope."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.scale = 1.0

    def _keys_values(self, projected: list[mx.array], positions: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = super()._keys_values(projected, positions)
        return keys, mx.fast.rms_norm(values, None, self.k_norm.eps)


class Gemma4MLP(MLP):
    def __call__(self, x: mx.array) -> mx.array:
        gate, up = products(x, self.gate_proj, self.up_proj)
        return self.down_proj(nn.gelu_approx(gate) * up)


class Gemma4Layer(Layer):
    """Gemma 4's layer (DeepSpec's Gemma4DSparkModel): norms before and after each half, and a scale of the whole."""

    attention, mlp_kind = Gemma4Attention, Gemma4MLP

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.pre_feedforward_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(self, x: mx.array, positions: mx.array, join: Join, mask: mx.array) -> mx.array:
        h = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), positions, join, mask))
        r = self.mlp(self.pre_feedforward_layernorm(h))
        return (h + self.post_feedforward_layernorm(r)) * self.layer_scalar


class DSparkTrunk(BlockTrunk):
    """The trunk with DSpark's heads, by DeepSpec's names."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config, Gemma4Layer if config.family == GEMMA4 else Layer)
        self.markov_head = MarkovHead(config)
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(config)


class DSpark(BlockDrafter):
    """DSpark (arXiv 2607.05147): row k of the block proposes the token after its position; γ = block.

    Slot k's logits are head(h_k) plus the Markov head's bias of the token before it.
    """

    trunk = DSparkTrunk
    markov_top_k: int | None = None
    """Of how many of a slot's best tokens the Markov head's bias is computed; the others are not drafted."""

    def keep_rows(self, rows: mx.array) -> None:
        """Keep these rows of the head, and of the Markov head, which is added to it."""
        super().keep_rows(rows)
        self.model.markov_head.markov_w2 = take_rows(self.model.markov_head.markov_w2, rows)

    def _propose(self, context: Context, anchor: mx.array, slots: int, policy: DraftPolicy) -> Proposal:
        hidden = self.slots_hidden(context, anchor, slots)
        head, reduced = self.model.markov_head, None if self.vocabulary is None else self.vocabulary.ids
        # All logits, or the best of each slot's with their rows of the head and their ids.
        logits, rows, state = self.logits(hidden), None, None
        if self.markov_top_k is not None:
            logits, rows = top_k(logits, self.markov_top_k)
        ids = rows if rows is None or reduced is None else reduced[rows]

        def draw(slot: int, previous: mx.array) -> Drawn:
            nonlocal state
            at = slice(slot, slot + 1)
            state, latent = head.step(state, previous, hidden[:, at])
            if rows is None:
                return policy.draft(self.widen(logits[:, at] + head.markov_w2(latent)), slot)
            w2 = dense_rows(head.markov_w2, rows[:, at]).astype(mx.float32)
            scores = logits[:, at] + (w2 @ latent.astype(mx.float32)[..., None])[..., 0]
            return policy.draft_among(scores, ids[:, at], slot, self.vocab_size)

        # All slots by one operator, where W1's and W2's rows are a token's latent and bias.
        dense = type(head.markov_w1) is nn.Embedding and type(head.markov_w2) is nn.Linear
        chained = dense and head.kind == "vanilla" and rows is ids
        draws = policy.draws(len(anchor), slots, self.vocab_size) if chained else None
        if draws is None:
            tokens, q = one_by_one(anchor, slots, draw)
        else:
            tables, q = (head.markov_w1.weight, head.markov_w2.weight, anchor), None
            if rows is None:
                noise, kept = draws.noise if reduced is None else draws.at(reduced), draws.sampled
                tokens, scores = chain(logits, *tables, noise, draws.scale, reduced, keep_logits=kept)
            else:
                tokens, scores = walk(Candidates(logits, ids, *tables), draws.at(ids), draws.scale)
            if draws.sampled:
                q = draws.q(self.widen(scores) if rows is None else among(scores, ids, self.vocab_size))
        confidence = None
        if self.config.enable_confidence_head:
            previous = mx.concatenate([anchor[:, None].astype(mx.int32), tokens[:, :-1]], axis=1)
            confidence = self.model.confidence_head(hidden, head.markov_w1(previous))
            if temperatures := self.config.confidence_temperatures:
                confidence = confidence / mx.array(temperatures[:slots])
            confidence = mx.sigmoid(confidence)
        return Proposal(tokens, q, confidence)
