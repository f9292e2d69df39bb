"""Launch of the acceptance kernels: one pass over the rows, then a few numbers; nothing is read on the host."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import mlx.core as mx

from specmlx.kernels.tuning import tuning

_HERE = Path(__file__).parent
_THREADS = 256
MAX_ROWS = 32


def supports(rows: mx.array) -> bool:
    """Whether the kernels take rows `[B, T, V]`."""
    return rows.ndim == 3 and rows.shape[1] <= MAX_ROWS and rows.shape[2] >= 8


def match(
    tokens: mx.array, scores: mx.array, noise: mx.array | None = None, factory: Callable = mx.fast.metal_kernel
) -> tuple[mx.array, mx.array]:
    """`reference.match` for the argmax of scores `[B, T, V]` (plus noise, float32 of their shape) as target tokens."""
    B, L, V = scores.shape
    segments, common = _pass(V)
    values, ids = _kernel("accept_rows", factory)(
        inputs=[scores, scores if noise is None else noise],
        template=[("T", scores.dtype), *common, ("NOISY", noise is not None)],
        grid=(_THREADS, segments, B * L),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(B * L, segments)] * 2,
        output_dtypes=[mx.float32, mx.int32],
    )
    return tuple(
        _kernel("accept_match", factory)(
            inputs=[values, ids, _filled(tokens)],
            template=[("L", L), ("V", V)],
            grid=(32 * L, B, 1),
            threadgroup=(32 * L, 1, 1),
            output_shapes=[(B,)] * 2,
            output_dtypes=[mx.int32] * 2,
        )
    )


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
    values, ids, accepted = _kernel("accept_residual", factory)(
        inputs=[_filled(tokens), p if q is None or L == 1 else q, p, _filled(u), residual_noise],
        template=[*common, ("L", L), ("POINT", q is None or L == 1)],
        grid=(_THREADS, segments, B),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(B, 2, segments), (B, 2, segments), (B,)],
        output_dtypes=[mx.float32, mx.int32, mx.int32],
    )
    next_anchor = _kernel("accept_draw", factory)(
        inputs=[values, ids],
        template=[("V", V)],
        grid=(32, B, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(B,)],
        output_dtypes=[mx.int32],
    )[0]
    return accepted, next_anchor


def _pass(V: int) -> tuple[int, list]:
    segment = tuning().segment
    return -(-V // segment), [("V", V), ("W", 4 if V % 4 == 0 else 1), ("SEGMENT", segment), ("THREADS", _THREADS)]


def _filled(x: mx.array) -> mx.array:
    # An array without elements has no buffer to bind.
    return x if x.size else mx.zeros((1,), dtype=x.dtype)


_ARGUMENTS = {
    "rows": (["scores", "noise"], ["values", "ids"]),
    "match": (["values", "ids", "tokens"], ["accepted", "next_anchor"]),
    "residual": (["tokens", "q", "p", "u", "noise"], ["values", "ids", "accepted"]),
    "draw": (["values", "ids"], ["next_anchor"]),
}


@lru_cache
def _kernel(name: str, factory: Callable) -> Callable:
    file = name.removeprefix("accept_")
    inputs, outputs = _ARGUMENTS[file]
    return factory(
        name=f"specmlx_{name}",
        input_names=inputs,
        output_names=outputs,
        source=(_HERE / f"{file}.metal").read_text(),
        header=(_HERE.parent / "argmax.metal").read_text(),
    )
