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


def supports(Dk: int, Dv: int) -> bool:
    """Whether the kernels take heads of these sizes."""
    return Dk % 32 == 0 and Dv % 32 == 0


def advance(
    S: mx.array,
    tape: Tape,
    count: mx.array,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    factory: Callable = mx.fast.metal_kernel,
) -> tuple[mx.array, mx.array, Tape]:
    """S after the first `count` `[B]` int32 rows of the tape, the outputs of T rows from there, and their tape.

    Shapes and dtypes are those of `reference.fold` and `reference.steps`.
    """
    inputs = [S, tape.k, tape.delta, tape.g, count, q, k, v, g, beta]
    S, y, delta = _launch(_ADVANCE, factory, inputs, [(v.shape, q.dtype), (v.shape, mx.float32)])
    return S, y, Tape(k, delta, g)


def prefill(S: mx.array, *rows: mx.array, factory: Callable = mx.fast.metal_kernel) -> tuple[mx.array, mx.array]:
    """The outputs of T rows (q, k, v, g, beta) from S and the state after them, in passes of at most 16 rows."""
    ys, tape, count = [], no_tape(*rows[1:4]), mx.zeros(S.shape[:1], dtype=mx.int32)
    for start in range(0, rows[0].shape[1], _PASS):
        S, y, tape = advance(S, tape, count, *(x[:, start : start + _PASS] for x in rows), factory=factory)
        count = mx.full(S.shape[:1], y.shape[1], dtype=mx.int32)
        ys.append(y)
    return mx.concatenate(ys, axis=1), fold(S, tape, count, factory)


def no_tape(k: mx.array, v: mx.array, g: mx.array) -> Tape:
    """A tape for a pass before which nothing is to be folded."""
    return Tape(k[:, :1], mx.zeros(v[:, :1].shape), mx.zeros(g[:, :1].shape))


def fold(S: mx.array, tape: Tape, count: mx.array, factory: Callable = mx.fast.metal_kernel) -> mx.array:
    """S after the first `count` `[B]` int32 rows of the tape, with the bits that `advance` gives it."""
    return _launch(_FOLD, factory, [S, tape.k, tape.delta, tape.g, count], [])[0]


def _launch(source: Source, factory: Callable, inputs: list, outputs: list) -> list[mx.array]:
    S, k = inputs[:2]
    B, Hv, Dv, Dk = S.shape
    # Two rows a lane share the loads of k and q; beyond Dk 128 their S would not fit in registers.
    R = 2 if Dk <= 128 else 1
    template = {"T": k.dtype, "Hk": k.shape[2], "Hv": Hv, "Dk": Dk, "Dv": Dv, "R": R}
    grid, threadgroup = (32, Dv // (4 * R), B * Hv), (32, tuning().delta_simdgroups, 1)
    return source(factory, inputs, [(S.shape, mx.float32), *outputs], grid, threadgroup, **template)
