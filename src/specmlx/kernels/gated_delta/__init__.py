"""The gated delta rule: rows of a pass and the fold of committed ones, and many rows that are all kept."""

from collections.abc import Callable

import mlx.core as mx

from specmlx.kernels import dispatch
from specmlx.kernels.dispatch import Dispatched
from specmlx.kernels.gated_delta import metal, reference
from specmlx.kernels.gated_delta.reference import Tape, steps

__all__ = ["STEP", "Tape", "advance", "fold", "kernel", "prefill", "steps"]

# Steps of a prefill are multiples of so many rows: whole chunks of mlx's operator on Metal.
STEP = 64


def _key(S: mx.array, k: mx.array) -> dict | None:
    _, Hv, Dv, Dk = S.shape
    return metal.key(k.dtype, k.shape[2], Hv, Dk, Dv)


advance = Dispatched("gated_delta", reference, metal, "advance", lambda S, tape, count, q, k, *_: _key(S, k))
fold = Dispatched("gated_delta", reference, metal, "fold", lambda S, tape, count: _key(S, tape.k))


def prefill(
    S: mx.array, *rows: mx.array, consistent: bool = False, gradient: bool = False
) -> tuple[mx.array, mx.array]:
    """Outputs y `[B, T, Hv, Dv]` (q's dtype) of T rows that are all kept, and the state after them.

    rows: q, k, v, g and beta, with the shapes and dtypes of `reference.steps`. mlx's operator runs them, on the CPU
    with the bits of stepping; on Metal our kernel where it is not right, and where they have to be `consistent` with
    steps. Only the operator has a gradient.
    """
    # In float32: the operator rounds g and beta to q's dtype.
    given = [x.astype(mx.float32) for x in rows]
    operator = "gated_delta" if consistent else "gated_delta_prefill"
    factory = None if gradient else dispatch.kernel(operator, _key(S, given[1]))
    y, S = mx.fast.gated_delta_update(*given, S) if factory is None else metal.prefill(S, *given, factory=factory)
    return y.astype(rows[0].dtype), S


def kernel(operator: str, dtype: mx.Dtype, Hk: int, Hv: int, Dk: int, Dv: int) -> Callable | None:
    """What makes the kernels for heads of these numbers and sizes, or None where mlx's operations run."""
    return dispatch.kernel(operator, metal.key(dtype, Hk, Hv, Dk, Dv))
