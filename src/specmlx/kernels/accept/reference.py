"""How many proposed tokens the target keeps, and its own token after them, as the rules read.

Shapes: B lanes, γ proposed tokens (γ >= 0), T = γ + 1 verified rows, V tokens in the vocabulary.
"""

import mlx.core as mx


def match(tokens: mx.array, target_tokens: mx.array) -> tuple[mx.array, mx.array]:
    """Leading tokens `[B, γ]` that equal the target's `[B, γ + 1]`, and the target's token after them: `[B]` int32."""
    accepted = _leading(tokens.astype(mx.int32) == target_tokens[:, :-1].astype(mx.int32))
    return accepted, _pick(target_tokens, accepted).astype(mx.int32)


def match_best(tokens: mx.array, scores: mx.array, noise: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """Leading tokens `[B, γ]` that equal the rows' best ones, and the best one of the row after them: `[B]` int32.

    A row's best token is the argmax of scores `[B, γ + 1, V]`, plus noise of that shape in float32.
    """
    return match(tokens, mx.argmax(scores if noise is None else scores + noise, axis=-1))


def rejection(
    tokens: mx.array, q: mx.array | None, p: mx.array, u: mx.array, residual_noise: mx.array
) -> tuple[mx.array, mx.array]:
    """Rejection sampling (Leviathan et al. 2023, alg. 1): accepted and next anchor, `[B]` int32.

    Shapes: tokens `[B, γ]`; q `[B, γ, V]` or None (a point mass), p `[B, γ + 1, V]`, u `[B, γ]` and residual_noise
    `[B, V]` float32.
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
    return accepted, next_anchor.astype(mx.int32)


def _leading(kept: mx.array) -> mx.array:
    """Number of leading true entries, [B, γ] bool -> [B] int32."""
    return mx.cumprod(kept.astype(mx.int32), axis=1).sum(axis=1).astype(mx.int32)


def _pick(rows: mx.array, index: mx.array) -> mx.array:
    """Row index[b] of lane b, [B, T, ...] -> [B, ...]; the other rows are not touched."""
    return rows[mx.arange(rows.shape[0]), index]
