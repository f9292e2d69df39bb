"""The gated delta rule: rows of a pass and the fold of committed ones, and many rows that are all kept."""

from collections.abc import Callable

import mlx.core as mx

from specmlx.kernels import dispatch
from specmlx.kernels.gated_delta import metal, reference
from specmlx.kernels.gated_delta.reference import Tape, steps

__all__ = ["STEP", "Tape", "advance", "fold", "kernel", "prefill", "steps"]

# Steps of a prefill are multiples of so many rows: whole chunks of mlx's operator on Metal.
STEP = 64


def advance(S: mx.array, tape: Tape | None, count: int | mx.array, *rows: mx.array) -> tuple[mx.array, mx.array, Tape]:
    """S with the first `count` rows of the tape in it, the outputs `[B, T, Hv, Dv]` of T rows from there, their tape.

    rows: q, k, v, g and beta; shapes are those of `reference.steps`. `count` is an int, or int32 `[B]` on the device.
    """
    (_, Hv, Dv, Dk), k = S.shape, rows[1]
    factory = kernel("gated_delta", k.dtype, k.shape[2], Hv, Dk, Dv)
    if factory is None:
        base = S if tape is None else reference.fold(S, tape, count)
        y, _, new = reference.steps(base, *rows)
        return base, y, new
    if tape is None:
        tape, count = metal.no_tape(k, *rows[2:4]), 0
    return metal.advance(S, tape, _per_lane(count, S.shape[0]), *rows, factory)


def fold(S: mx.array, tape: Tape, count: int | mx.array) -> mx.array:
    """S with the first `count` rows of the tape in it, with the bits that `advance` gives it."""
    _, Hv, Dv, Dk = S.shape
    factory = kernel("gated_delta", tape.k.dtype, tape.k.shape[2], Hv, Dk, Dv)
    if factory is None:
        return reference.fold(S, tape, count)
    return metal.fold(S, tape, _per_lane(count, S.shape[0]), factory)


def prefill(
    S: mx.array, *rows: mx.array, consistent: bool = False, gradient: bool = False
) -> tuple[mx.array, mx.array]:
    """Outputs y `[B, T, Hv, Dv]` (q's dtype) of T rows that are all kept, and the state after them.

    rows: q, k, v, g and beta, with the shapes and dtypes of `reference.steps`. mlx's operator runs them, on the CPU
    with the bits of stepping; on Metal our kernel where it is not right, and where they have to be `consistent` with
    steps. Only the operator has a gradient.
    """
    # In float32: the operator rounds g and beta to q's dtype.
    q, k, v, g, beta = (x.astype(mx.float32) for x in rows)
    operator = "gated_delta" if consistent else "gated_delta_prefill"
    factory = None if gradient else kernel(operator, mx.float32, k.shape[2], v.shape[2], k.shape[3], v.shape[3])
    if factory is None:
        y, S = mx.fast.gated_delta_update(q, k, v, g, beta, S)
    else:
        y, S = metal.prefill(S, q, k, v, g, beta, factory=factory)
    return y.astype(rows[0].dtype), S


def kernel(operator: str, dtype: mx.Dtype, Hk: int, Hv: int, Dk: int, Dv: int) -> Callable | None:
    """What makes the kernels for heads of these numbers and sizes, or None where mlx's operations run."""
    return dispatch.kernel(operator, dtype, Hk=Hk, Hv=Hv, Dk=Dk, Dv=Dv) if metal.supports(Dk, Dv) else None


def _per_lane(count: int | mx.array, B: int) -> mx.array:
    return mx.full((B,), count, dtype=mx.int32) if isinstance(count, int) else count
