"""The gated delta rule: rows of a pass and the fold of committed ones, and many rows that are all kept."""

from collections.abc import Callable

import mlx.core as mx

from specmlx.kernels.choice.serving import Serve, kernel_factory
from specmlx.kernels.gated_delta import metal, reference
from specmlx.kernels.gated_delta.reference import Tape, steps

__all__ = ["STEP", "Tape", "advance", "factory", "fold", "prefill", "prefill_factory", "steps"]

# Steps of a prefill are multiples of so many rows: whole chunks of mlx's operator on Metal.
STEP = 64


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
        tape, count = metal.no_tape(k, v, g), 0
    return metal.advance(S, tape, _per_lane(count, S.shape[0]), q, k, v, g, beta, make)


def fold(S: mx.array, tape: Tape, count: int | mx.array, serve: Serve = kernel_factory) -> mx.array:
    """S with the first `count` rows of the tape in it, with the bits that `advance` gives it."""
    make = _factory(S, tape.k, serve)
    if make is None:
        return reference.fold(S, tape, count)
    return metal.fold(S, tape, _per_lane(count, S.shape[0]), make)


def prefill(
    S: mx.array,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    serve: Serve | None = kernel_factory,
) -> tuple[mx.array, mx.array]:
    """Outputs y `[B, T, Hv, Dv]` (q's dtype) of T rows that are all kept, and the state after them.

    Shapes and dtypes are those of `reference.steps`. mlx's operator runs them, on the CPU with the bits of stepping;
    where it is not right on Metal, our kernel, which has no gradient. With `serve` None the operator in any case.
    """
    # In float32: the operator rounds g and beta to q's dtype.
    rows = [x.astype(mx.float32) for x in (q, k, v, g, beta)]
    make = None if serve is None else prefill_factory(k.shape[2], v.shape[2], k.shape[3], v.shape[3], serve)
    y, S = mx.fast.gated_delta_update(*rows, S) if make is None else metal.prefill(S, *rows, factory=make)
    return y.astype(q.dtype), S


def prefill_factory(Hk: int, Hv: int, Dk: int, Dv: int, serve: Serve = kernel_factory) -> Callable | None:
    """What makes the kernels for a prefill by these heads, or None where mlx's operator runs it."""
    if not metal.supports(Dk, Dv):
        return None
    return serve("gated_delta_prefill", mx.float32, Hk=Hk, Hv=Hv, Dk=Dk, Dv=Dv)


def factory(dtype: mx.Dtype, Hk: int, Hv: int, Dk: int, Dv: int, serve: Serve = kernel_factory) -> Callable | None:
    """What makes the kernels for heads of these numbers and sizes, or None where mlx's operations run."""
    return serve("gated_delta", dtype, Hk=Hk, Hv=Hv, Dk=Dk, Dv=Dv) if metal.supports(Dk, Dv) else None


def _factory(S: mx.array, k: mx.array, serve: Serve) -> Callable | None:
    _, Hv, Dv, Dk = S.shape
    return factory(k.dtype, k.shape[2], Hv, Dk, Dv, serve)


def _per_lane(count: int | mx.array, B: int) -> mx.array:
    return mx.full((B,), count, dtype=mx.int32) if isinstance(count, int) else count
