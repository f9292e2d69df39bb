"""Acceptance on the device: how many proposed tokens stand, and the target's own token after them."""

import mlx.core as mx

from specmlx.kernels import dispatch
from specmlx.kernels.accept import metal, reference
from specmlx.kernels.accept.reference import match

__all__ = ["match", "match_best", "rejection"]


def match_best(tokens: mx.array, scores: mx.array, noise: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """Leading tokens `[B, γ]` that equal the rows' best ones, and the best one of the row after them: `[B]` int32.

    A row's best token is the argmax of scores `[B, γ + 1, V]`, plus noise of that shape in float32.
    """
    if metal.supports(scores) and (factory := dispatch.kernel("accept", scores.dtype)):
        return metal.match(tokens, scores, noise, factory)
    return match(tokens, mx.argmax(scores if noise is None else scores + noise, axis=-1))


def rejection(
    tokens: mx.array, q: mx.array | None, p: mx.array, u: mx.array, residual_noise: mx.array
) -> tuple[mx.array, mx.array]:
    """As `reference.rejection`."""
    if metal.supports(p) and (factory := dispatch.kernel("accept", p.dtype)):
        return metal.rejection(tokens, q, p, u, residual_noise, factory)
    return reference.rejection(tokens, q, p, u, residual_noise)
