"""Penalties and logit bias for all rows of a round at once, each row seeing the tokens before it.

Bit for bit what mlx_lm.sample_utils.make_logits_processors' functions give row by row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from specmlx.formats.values import MOST, integer, number

Tokens = mx.array | Sequence[int]


class Processor:
    """A logits processor of specmlx: `rows` does a whole round, the call is mlx-lm's `(tokens, logits)`."""

    needs_history = True

    def __call__(self, tokens: Tokens, logits: mx.array) -> mx.array:
        """One row: tokens [N] before it, logits [B, V] -> [B, V]; logits are not changed in place."""
        return self.rows(tokens, logits[:, None], None)[:, 0]

    def rows(self, history: Tokens, logits: mx.array, drafted: mx.array | None) -> mx.array:
        """All rows of a round, [B, T, V] -> [B, T, V] in the logits' dtype.

        Args:
            history: tokens up to and including the anchor, [N], or [B, N] padded on the left with -1.
            logits: row t stands behind history + drafted[:, :t], [B, T, V].
            drafted: the proposal, [B, T - 1]; None if every row shall see the history alone.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class LogitBias(Processor):
    """Adds a constant to some tokens' logits."""

    needs_history = False
    bias: tuple[tuple[int, float], ...]

    def rows(self, history, logits, drafted):
        vocab, (ids, values) = logits.shape[-1], zip(*self.bias, strict=True)
        if outside := [token for token in ids if not 0 <= token < vocab]:
            raise ValueError(f"logit_bias must name tokens of the vocabulary 0..{vocab - 1}, got {outside[0]}")
        return logits.reshape(-1, vocab).at[:, mx.array(ids)].add(mx.array(values)).reshape(logits.shape)


@dataclass(frozen=True)
class Penalty(Processor):
    """A penalty on the tokens among the last context_size (0: all) before a row.

    kind: "repetition" divides positive and multiplies negative logits of tokens that occur (Keskar et al. 2019),
    "presence" subtracts once from each of them, "frequency" once for each occurrence.
    """

    kind: str
    penalty: float
    context_size: int = 20

    def rows(self, history, logits, drafted):
        if not isinstance(history, mx.array):
            # The end first: a long text is not carried over for a short window. [-0:] is all of it.
            history = mx.array(history[-self.context_size :], dtype=mx.int32)
        tokens = _windows(history, drafted, logits.shape[0], logits.shape[1], self.context_size)
        if tokens.shape[-1] == 0:
            return logits
        valid = tokens >= 0
        # Padding repeats the row's newest token: the same value is written twice. Clipped since an id outside
        # the vocabulary, which the caller refuses later, would write into foreign memory now.
        ids = mx.clip(mx.where(valid, tokens, tokens[..., -1:]), 0, logits.shape[-1] - 1)
        if self.kind == "frequency":
            # One subtraction an occurrence, never count * penalty: in bfloat16 each of them rounds.
            flat, ids = logits.reshape(-1, logits.shape[-1]), ids.reshape(-1, ids.shape[-1])
            amount = mx.where(valid.reshape(ids.shape), mx.array(self.penalty, logits.dtype), 0)
            return flat.at[mx.arange(len(flat))[:, None], ids].subtract(amount).reshape(logits.shape)
        selected = mx.take_along_axis(logits, ids, axis=-1)
        if self.kind == "presence":
            penalised = selected - self.penalty
        else:
            penalised = mx.where(selected < 0, selected * self.penalty, selected / self.penalty)
        return mx.put_along_axis(logits, ids, mx.where(valid[..., -1:], penalised, selected), axis=-1)


def make_logits_processors(
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = 20,
    presence_penalty: float | None = None,
    presence_context_size: int = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int = 20,
) -> list[Processor]:
    """mlx_lm.sample_utils.make_logits_processors, in its order: bias, repetition, presence, frequency.

    A penalty of None or 0 is off; a context size of 0 is the whole text, as in mlx-lm. Raises ValueError for
    a negative repetition penalty, numbers that are not finite, and negative context sizes.
    """
    processors = []
    if logit_bias:
        ids = [integer("a token of logit_bias", token) for token in logit_bias]
        values = [number(f"logit_bias of token {token}", value, -math.inf) for token, value in logit_bias.items()]
        processors.append(LogitBias(tuple(zip(ids, values, strict=True))))
    for kind, penalty, size in (
        ("repetition", repetition_penalty, repetition_context_size),
        ("presence", presence_penalty, presence_context_size),
        ("frequency", frequency_penalty, frequency_context_size),
    ):
        size, least = integer(f"{kind}_context_size", size, 0), 0 if kind == "repetition" else -MOST
        if penalty is not None and number(f"{kind}_penalty", penalty, least, hint="0 is off"):
            processors.append(Penalty(kind, float(penalty), size))
    return processors


def _windows(history, drafted, batch, rows, size):
    """The last `size` tokens before each row, [B, T, C] int32; -1 where there are fewer."""
    known, new = history.shape[-1], [] if drafted is None else [drafted.astype(mx.int32)]
    ids = mx.concatenate([mx.broadcast_to(history.astype(mx.int32), (batch, known)), *new], axis=1)
    size = min(size or ids.shape[1], ids.shape[1])
    padded = mx.concatenate([mx.full((batch, size), -1, dtype=mx.int32), ids], axis=1)
    ends = known + (mx.arange(rows) if new else mx.zeros(rows, dtype=mx.int32))
    return padded[:, ends[:, None] + mx.arange(size)]
