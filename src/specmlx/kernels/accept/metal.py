"""Launch of the acceptance kernels: one pass over the rows, then a few numbers; nothing is read on the host."""

from collections.abc import Callable

import mlx.core as mx

from specmlx.kernels.source import Source
from specmlx.kernels.tuning import THREADS, segments

MAX_ROWS = 32

_ROWS = Source("accept_rows", "scores noise", "values ids", "accept/rows", "argmax")
_MATCH = Source("accept_match", "values ids tokens", "accepted next_anchor", "accept/match", "argmax")
_RESIDUAL = Source("accept_residual", "tokens q p u noise", "values ids accepted", "accept/residual", "argmax")
_DRAW = Source("accept_draw", "values ids", "next_anchor", "accept/draw", "argmax")


def key(rows: mx.array) -> dict | None:
    """The key of the kernels for rows `[B, T, V]`; None where they don't take them."""
    taken = rows.ndim == 3 and rows.shape[1] <= MAX_ROWS and rows.shape[2] >= 8
    return {"dtype": rows.dtype} if taken else None


def match_best(
    tokens: mx.array, scores: mx.array, noise: mx.array | None = None, *, factory: Callable
) -> tuple[mx.array, mx.array]:
    """As `reference.match_best`."""
    B, L, V = scores.shape
    n, split = segments(V)
    template = {"T": scores.dtype, **split, "NOISY": noise is not None}
    outputs = [((B * L, n), mx.float32), ((B * L, n), mx.int32)]
    inputs = [scores, scores if noise is None else noise]
    best = _ROWS(factory, inputs, outputs, (THREADS, n, B * L), **template)
    inputs, outputs = [*best, _filled(tokens)], [((B,), mx.int32)] * 2
    return tuple(_MATCH(factory, inputs, outputs, (32 * L, B, 1), L=L, V=V))


def rejection(
    tokens: mx.array, q: mx.array | None, p: mx.array, u: mx.array, residual_noise: mx.array, *, factory: Callable
) -> tuple[mx.array, mx.array]:
    """As `reference.rejection`."""
    B, L, V = p.shape
    q = None if L == 1 else q
    n, split = segments(V)
    inputs = [_filled(tokens), p if q is None else q, p, _filled(u), residual_noise]
    outputs = [((B, 2, n), mx.float32), ((B, 2, n), mx.int32), ((B,), mx.int32)]
    *best, accepted = _RESIDUAL(factory, inputs, outputs, (THREADS, n, B), **split, L=L, POINT=q is None)
    [next_anchor] = _DRAW(factory, best, [((B,), mx.int32)], (32, B, 1), V=V)
    return accepted, next_anchor


def _filled(x: mx.array) -> mx.array:
    # An array without elements has no buffer to bind.
    return x if x.size else mx.zeros((1,), dtype=x.dtype)
