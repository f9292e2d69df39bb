"""The gated delta rule: rows of a pass and the fold of committed ones, and many rows that are all kept."""

import mlx.core as mx

from specmlx.kernels import dispatch
from specmlx.kernels.dispatch import Dispatched
from specmlx.kernels.gated_delta import metal, reference
from specmlx.kernels.gated_delta.metal import key
from specmlx.kernels.gated_delta.reference import Tape, steps

__all__ = ["STEP", "Tape", "advance", "fold", "key", "prefill", "steps"]

# Steps of a prefill are multiples of so many rows: whole chunks of mlx's operator on Metal.
STEP = 64


advance = Dispatched("gated_delta", reference, metal, "advance", lambda S, tape, count, q, k, *_: key(S, k))
fold = Dispatched("gated_delta", reference, metal, "fold", lambda S, tape, count: key(S, tape.k))


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
    factory = None if gradient else dispatch.kernel(operator, key(S, given[1]))
    y, S = mx.fast.gated_delta_update(*given, S) if factory is None else metal.prefill(S, *given, factory=factory)
    return y.astype(rows[0].dtype), S
