"""How many proposed tokens the target keeps, and its own token after them: pure functions on arrays.

Shapes: B lanes, γ proposed tokens (γ >= 0), T = γ + 1 verified rows, V tokens in the vocabulary. Row t of the
target stands behind proposal token t; row γ, behind the whole proposal, is reached when all are accepted.
Nothing is read on the host. What lies in the rows after the first rejected token never matters, NaN included.
"""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Outcome:
    """What one round delivers: `accepted` [B] int32 leading proposal tokens, then `next_anchor` [B] int32."""

    accepted: mx.array
    next_anchor: mx.array


def accept_match(tokens: mx.array, target_tokens: mx.array) -> Outcome:
    """Keep the proposal as far as it equals the target's own tokens (greedy, coupled, foreign sampler).

    Args:
        tokens: proposal, [B, γ] int.
        target_tokens: the target's token of every row, [B, γ + 1] int; row t was drawn after tokens[:, :t].
    """
    accepted = _leading(tokens.astype(mx.int32) == target_tokens[:, :-1].astype(mx.int32))
    return Outcome(accepted, _pick(target_tokens, accepted).astype(mx.int32))


def accept_rejection(
    tokens: mx.array, q: mx.array | None, p: mx.array, u: mx.array, residual_noise: mx.array
) -> Outcome:
    """Rejection sampling: delivered tokens have the target's distribution p (Leviathan et al. 2023, alg. 1).

    Token x of row t is kept while u q(x) < p(x), with probability min(1, p(x) / q(x)). The first one that is
    not is replaced by a draw from max(p - q, 0); after a whole proposal the last row's p is drawn from.

    Args:
        tokens: proposal, [B, γ] int; an id outside the vocabulary is the caller's to refuse.
        q: the distribution each token was sampled from, [B, γ, V] float32; None for tokens that were not
            sampled (a point mass: kept with probability p(x), the residual is p without x).
        p: the target's distribution of every row, [B, γ + 1, V] float32.
        u: uniform in [0, 1), [B, γ] float32.
        residual_noise: Gumbel noise for the one draw of the round, [B, V] float32.
    """
    width, vocab = tokens.shape[1], p.shape[-1]
    # Clipped for the gather only: an index outside reads foreign memory before the caller can refuse it.
    ids = mx.clip(tokens.astype(mx.int32), 0, vocab - 1)
    p_token = mx.take_along_axis(p[:, :-1], ids[..., None], axis=-1)[..., 0]
    if q is None:
        q_token = mx.ones_like(p_token)
    else:
        q_token = mx.take_along_axis(q, ids[..., None], axis=-1)[..., 0]
    accepted = _leading(u * q_token < p_token)

    p_row = _pick(p, accepted)
    if width == 0:
        weights = p_row
    else:
        last = mx.minimum(accepted, width - 1)
        q_row = mx.arange(vocab) == _pick(ids, last)[:, None] if q is None else _pick(q, last)
        residual = mx.maximum(p_row - q_row, 0)
        # p = q up to rounding leaves no residual; a rejection there has probability ~0 and p is the limit.
        usable = (accepted < width) & (residual.sum(axis=-1) > 0)
        weights = mx.where(usable[:, None], residual, p_row)
    next_anchor = mx.argmax(mx.log(weights) + residual_noise, axis=-1)
    return Outcome(accepted, next_anchor.astype(mx.int32))


def _leading(kept: mx.array) -> mx.array:
    """Number of leading true entries, [B, γ] bool -> [B] int32."""
    return mx.cumprod(kept.astype(mx.int32), axis=1).sum(axis=1).astype(mx.int32)


def _pick(rows: mx.array, index: mx.array) -> mx.array:
    """Row index[b] of lane b, [B, T, ...] -> [B, ...]; the other rows are not touched."""
    return rows[mx.arange(rows.shape[0]), index]
