"""The gated delta rule: rows of a pass and the fold of committed ones, and the block-parallel form for prefill."""

from collections.abc import Callable

import mlx.core as mx

from specmlx.kernels.choice.serving import Serve, kernel_factory
from specmlx.kernels.gated_delta import metal, reference
from specmlx.kernels.gated_delta.chunk import GRID, delta_rule
from specmlx.kernels.gated_delta.reference import Tape, steps

__all__ = ["GRID", "Tape", "advance", "delta_rule", "factory", "fold", "steps"]


def advance(
    S: mx.array,
    tape: Tape | None,
    count: int | mx.array,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    serve: Serve = kernel_factory,
) -> tuple[mx.array, mx.array, Tape]:
    """S with the first `count` rows of the tape in it, the outputs `[B, T, Hv, Dv]` of T rows from there, their tape.

    Shapes are those of `reference.steps`; `count` is an int, or int32 `[B]` on the device. `serve` says what
    makes the kernels; where nothing does, the operator runs as mlx's operations.
    """
    make = _factory(S, k, serve)
    if make is None:
        base = S if tape is None else reference.fold(S, tape, count)
        y, _, new = reference.steps(base, q, k, v, g, beta)
        return base, y, new
    if tape is None:
        tape, count = Tape(k[:, :1], mx.zeros(v[:, :1].shape), mx.zeros(g[:, :1].shape)), 0
    return metal.advance(S, tape, _per_lane(count, S.shape[0]), q, k, v, g, beta, make)


def fold(S: mx.array, tape: Tape, count: int | mx.array, serve: Serve = kernel_factory) -> mx.array:
    """S with the first `count` rows of the tape in it, with the bits that `advance` gives it."""
    make = _factory(S, tape.k, serve)
    if make is None:
        return reference.fold(S, tape, count)
    return metal.fold(S, tape, _per_lane(count, S.shape[0]), make)


def factory(dtype: mx.Dtype, Hk: int, Hv: int, Dk: int, Dv: int, serve: Serve = kernel_factory) -> Callable | None:
    """What makes the kernels for heads of these numbers and sizes, or None where mlx's operations run."""
    return serve("gated_delta", dtype, Hk=Hk, Hv=Hv, Dk=Dk, Dv=Dv) if metal.supports(Dk, Dv) else None


def _factory(S: mx.array, k: mx.array, serve: Serve) -> Callable | None:
    _, Hv, Dv, Dk = S.shape
    return factory(k.dtype, k.shape[2], Hv, Dk, Dv, serve)


def _per_lane(count: int | mx.array, B: int) -> mx.array:
    return mx.full((B,), count, dtype=mx.int32) if isinstance(count, int) else count
