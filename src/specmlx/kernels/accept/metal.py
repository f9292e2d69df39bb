"""Launch of the acceptance kernels: one pass over the rows, then a few numbers; nothing is read on the host."""

from collections.abc import Callable

import mlx.core as mx

from specmlx.kernels.source import Source
from specmlx.kernels.tuning import tuning

_THREADS = 256
MAX_ROWS = 32

_ROWS = Source("accept_rows", "scores noise", "values ids", "accept/rows", "argmax")
_MATCH = Source("accept_match", "values ids tokens", "accepted next_anchor", "accept/match", "argmax")
_RESIDUAL = Source("accept_residual", "tokens q p u noise", "values ids accepted", "accept/residual", "argmax")
_DRAW = Source("accept_draw", "values ids", "next_anchor", "accept/draw", "argmax")


def supports(rows: mx.array) -> bool:
    """Whether the kernels take rows `[B, T, V]`."""
    return rows.ndim == 3 and rows.shape[1] <= MAX_ROWS and rows.shape[2] >= 8


def match(
    tokens: mx.array, scores: mx.array, noise: mx.array | None = None, factory: Callable = mx.fast.metal_kernel
) -> tuple[mx.array, mx.array]:
    """`reference.match` for the argmax of scores `[B, T, V]` (plus noise, float32 of their shape) as target tokens."""
    B, L, V = scores.shape
    segments, common = _pass(V)
    best = _ROWS(
        factory,
        [scores, scores if noise is None else noise],
        [((B * L, segments), mx.float32), ((B * L, segments), mx.int32)],
        (_THREADS, segments, B * L),
        (_THREADS, 1, 1),
        **{"T": scores.dtype, **common, "NOISY": noise is not None},
    )
    inputs, outputs = [*best, _filled(tokens)], [((B,), mx.int32)] * 2
    return tuple(_MATCH(factory, inputs, outputs, (32 * L, B, 1), (32 * L, 1, 1), L=L, V=V))


def rejection(
    tokens: mx.array,
    q: mx.array | None,
    p: mx.array,
    u: mx.array,
    residual_noise: mx.array,
    factory: Callable = mx.fast.metal_kernel,
) -> tuple[mx.array, mx.array]:
    """As `reference.rejection`."""
    B, L, V = p.shape
    segments, common = _pass(V)
    values, ids, accepted = _RESIDUAL(
        factory,
        [_filled(tokens), p if q is None or L == 1 else q, p, _filled(u), residual_noise],
        [((B, 2, segments), mx.float32), ((B, 2, segments), mx.int32), ((B,), mx.int32)],
        (_THREADS, segments, B),
        (_THREADS, 1, 1),
        **{**common, "L": L, "POINT": q is None or L == 1},
    )
    [next_anchor] = _DRAW(factory, [values, ids], [((B,), mx.int32)], (32, B, 1), (32, 1, 1), V=V)
    return accepted, next_anchor


def _pass(V: int) -> tuple[int, dict]:
    segment = tuning().segment
    return -(-V // segment), {"V": V, "W": 4 if V % 4 == 0 else 1, "SEGMENT": segment, "THREADS": _THREADS}


def _filled(x: mx.array) -> mx.array:
    # An array without elements has no buffer to bind.
    return x if x.size else mx.zeros((1,), dtype=x.dtype)
