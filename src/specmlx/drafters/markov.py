"""DSpark's heads on top of the trunk: the bias of the token before, and how likely a slot is to be accepted."""

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters.config import DrafterConfig


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
        """The state behind a slot, and its latent `[..., r]`, from the token before it `[...]` and its row `[..., D]`.

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
