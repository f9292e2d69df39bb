"""Launch of the gated delta kernels: the deferred commit's fold and the rows of a pass, S read and written once."""

from collections.abc import Callable

import mlx.core as mx

from specmlx.kernels.gated_delta.reference import Tape
from specmlx.kernels.source import Source
from specmlx.kernels.tuning import tuning

# The most rows for which the kernel is checked.
_PASS = 16

_TAPE = "S tape_k tape_delta tape_g count"
_FOLD = Source("gated_delta_fold", _TAPE, "S_out", "gated_delta/fold", "gated_delta/step")
_ADVANCE = Source(
    "gated_delta",
    f"{_TAPE} q k v g beta",
    "S_out y delta",
    "gated_delta/fold gated_delta/kernel",
    "gated_delta/step",
)


def key(S: mx.array, k: mx.array) -> dict | None:
    """The key of the kernels for heads as of this state and these rows; None where they don't take them."""
    _, Hv, Dv, Dk = S.shape
    return {"dtype": k.dtype, "Hk": k.shape[2], "Hv": Hv, "Dk": Dk, "Dv": Dv} if Dk % 32 == Dv % 32 == 0 else None


def advance(
    S: mx.array, tape: Tape | None, count: int | mx.array, *rows: mx.array, factory: Callable
) -> tuple[mx.array, mx.array, Tape]:
    """As `reference.advance`."""
    q, k, v, g, _ = rows
    if tape is None:
        # Nothing of it is folded.
        tape, count = Tape(k[:, :1], mx.zeros(v[:, :1].shape), mx.zeros(g[:, :1].shape)), 0
    S, y, delta = _launch(_ADVANCE, factory, S, tape, count, rows, [(v.shape, q.dtype), (v.shape, mx.float32)])
    return S, y, Tape(k, delta, g)


def prefill(S: mx.array, *rows: mx.array, factory: Callable) -> tuple[mx.array, mx.array]:
    """The outputs of T rows (q, k, v, g, beta) from S and the state after them, in passes of at most 16 rows."""
    ys, tape, count = [], None, 0
    for start in range(0, rows[0].shape[1], _PASS):
        S, y, tape = advance(S, tape, count, *(x[:, start : start + _PASS] for x in rows), factory=factory)
        count = y.shape[1]
        ys.append(y)
    return mx.concatenate(ys, axis=1), fold(S, tape, count, factory=factory)


def fold(S: mx.array, tape: Tape, count: int | mx.array, *, factory: Callable) -> mx.array:
    """As `reference.fold`, with the bits that `advance` gives S."""
    return _launch(_FOLD, factory, S, tape, count)[0]


def _launch(source: Source, factory: Callable, S, tape, count, rows=(), outputs=()) -> list[mx.array]:
    B, Hv, Dv, Dk = S.shape
    k = tape.k
    count = mx.full((B,), count, dtype=mx.int32) if isinstance(count, int) else count
    # Two rows a lane share the loads of k and q; beyond Dk 128 their S would not fit in registers.
    R = 2 if Dk <= 128 else 1
    template = {"T": k.dtype, "Hk": k.shape[2], "Hv": Hv, "Dk": Dk, "Dv": Dv, "R": R}
    grid, threadgroup = (32, Dv // (4 * R), B * Hv), (32, tuning().delta_simdgroups, 1)
    inputs = [S, *tape, count, *rows]
    return source(factory, inputs, [(S.shape, mx.float32), *outputs], grid, threadgroup, **template)
