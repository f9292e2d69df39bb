"""Launch of the draft head's kernels: token after token on the device, without a look at it."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import mlx.core as mx

from specmlx.kernels.tuning import tuning

_HERE = Path(__file__).parent
_THREADS = 256


def supports_chain(logits: mx.array, w1: mx.array, w2: mx.array) -> bool:
    """Whether `chain` takes these: dense weights in the logits' dtype, a rank in whole lines, up to four lanes."""
    dense = logits.dtype == w1.dtype == w2.dtype and w2.shape == (logits.shape[-1], w1.shape[-1])
    return dense and w1.shape[-1] % 64 == 0 and w1.shape[-1] <= 512 and logits.shape[0] <= 4


def supports_top_k(logits: mx.array, k: int) -> bool:
    """Whether `top_k` takes these."""
    return 1 <= k <= 32 <= logits.shape[-1]


def top_k(logits: mx.array, k: int, factory: Callable = mx.fast.metal_kernel) -> tuple[mx.array, mx.array]:
    """As `reference.top_k`."""
    *lead, V = logits.shape
    rows = logits.size // V
    segment = tuning().segment
    segments = -(-V // segment)
    template = [("K", k), ("T", logits.dtype)]
    values, ids = _kernel("top_k", factory)(
        inputs=[logits],
        template=[*template, ("V", V), ("W", 4 if V % 4 == 0 else 1), ("SEGMENT", segment), ("THREADS", _THREADS)],
        grid=(_THREADS, segments, rows),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, segments, k)] * 2,
        output_dtypes=[mx.float32, mx.int32],
    )
    values, ids = _kernel("merge", factory)(
        inputs=[values, ids],
        template=[("K", k)],
        grid=(32, rows, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(rows, k)] * 2,
        output_dtypes=[mx.float32, mx.int32],
    )
    return values.reshape(*lead, k), ids.reshape(*lead, k)


def chain(
    logits: mx.array,
    w1: mx.array,
    w2: mx.array,
    anchor: mx.array,
    noise: mx.array | None = None,
    scale: float = 1.0,
    target_ids: mx.array | None = None,
    keep_logits: bool = False,
    factory: Callable = mx.fast.metal_kernel,
) -> tuple[mx.array, mx.array | None]:
    """As `reference.chain`: a launch a slot, each reading w2 once. The biased logits only if they are to be kept."""
    B, S, V = logits.shape
    segment = tuning().markov_rows
    segments = -(-V // segment)
    kernel = _kernel("chain_logits" if keep_logits else "chain", factory)
    scale = mx.array(scale, dtype=mx.float32)
    # Eight of them, since mlx binds fewer elements in another way: one more kernel to compile.
    values, ids = mx.zeros((B, 8)), mx.broadcast_to(anchor.astype(mx.int32)[:, None], (B, 8))
    tokens, biased = [], []
    for slot in range(S):
        values, ids, previous, *kept = kernel(
            inputs=[
                logits,
                w1,
                w2,
                values,
                ids,
                noise if noise is not None else logits,
                target_ids if target_ids is not None else anchor,
                scale,
                mx.array(slot),
            ],
            template=[
                ("T", logits.dtype),
                ("B", B),
                ("V", V),
                ("R", w1.shape[-1]),
                ("SEGMENT", segment),
                ("THREADS", _THREADS),
                ("NOISY", noise is not None),
                ("MAPPED", target_ids is not None),
            ],
            grid=(_THREADS, segments, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(B, segments), (B, segments), (B,), (B, V)][: 4 if keep_logits else 3],
            output_dtypes=[mx.float32, mx.int32, mx.int32, logits.dtype][: 4 if keep_logits else 3],
        )
        tokens.append(previous)
        biased += kept
    last = _kernel("last", factory)(
        inputs=[values, ids],
        template=[("V", w1.shape[0])],
        grid=(32, B, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(B,)],
        output_dtypes=[mx.int32],
    )
    return mx.stack([*tokens[1:], *last], axis=1), mx.stack(biased, axis=1) if keep_logits else None


def supports_candidates(ids: mx.array) -> bool:
    """Whether `walk` and `path` take candidates `[B, S, K]`: the scores of all their pairs fit in 32 KB."""
    _, S, K = ids.shape
    return 1 <= K <= 32 and 4 * S * K * (K + 1) + 4 * K <= 32768


def walk(
    unary: mx.array,
    ids: mx.array,
    before: mx.array,
    after: mx.array,
    anchor: mx.array,
    z: mx.array | None = None,
    noise: mx.array | None = None,
    scale: float = 1.0,
    factory: Callable = mx.fast.metal_kernel,
) -> tuple[mx.array, mx.array]:
    """As `reference.walk`: all slots in one launch."""
    B, S, K = ids.shape
    return tuple(
        _kernel("walk", factory)(
            inputs=[
                unary,
                ids,
                before,
                after,
                anchor.astype(mx.int32),
                unary if z is None else z,
                unary if noise is None else noise,
                mx.array(scale, dtype=mx.float32),
            ],
            template=[*_candidates(ids, before, z), ("NOISY", noise is not None)],
            grid=(32 * K, B, 1),
            threadgroup=(32 * K, 1, 1),
            output_shapes=[(B, S), (B, S, K)],
            output_dtypes=[mx.int32, mx.float32],
        )
    )


def path(
    unary: mx.array,
    ids: mx.array,
    before: mx.array,
    after: mx.array,
    anchor: mx.array,
    z: mx.array | None = None,
    factory: Callable = mx.fast.metal_kernel,
) -> mx.array:
    """As `reference.path`: the scores of all pairs and the search in one launch."""
    B, S, K = ids.shape
    return _kernel("path", factory)(
        inputs=[unary, ids, before, after, anchor.astype(mx.int32), unary if z is None else z],
        template=_candidates(ids, before, z),
        grid=(32 * K, B, 1),
        threadgroup=(32 * K, 1, 1),
        output_shapes=[(B, S)],
        output_dtypes=[mx.int32],
    )[0]


def _candidates(ids: mx.array, before: mx.array, z: mx.array | None) -> list:
    _, S, K = ids.shape
    V, R = before.shape
    return [("S", S), ("K", K), ("V", V), ("R", R), ("HAS_Z", z is not None)]


_CHAIN = ["logits", "w1", "w2", "before_values", "before_ids", "noise", "target_ids", "scale", "slot"]
_ARGUMENTS = {
    "top_k": (["logits"], ["values", "ids"]),
    "merge": (["values", "ids"], ["best_values", "best_ids"]),
    "chain": (_CHAIN, ["values", "ids", "previous_tokens"]),
    "chain_logits": (_CHAIN, ["values", "ids", "previous_tokens", "biased"]),
    "last": (["values", "ids"], ["token"]),
    "walk": (["unary", "ids", "before", "after", "anchor", "z", "noise", "scale"], ["tokens", "scores"]),
    "path": (["unary", "ids", "before", "after", "anchor", "z"], ["tokens"]),
}
_HEADERS = {"top_k": "candidates", "merge": "candidates", "chain": "chosen", "chain_logits": "chosen", "last": "chosen"}


@lru_cache
def _kernel(name: str, factory: Callable) -> Callable:
    inputs, outputs = _ARGUMENTS[name]
    header = (_HERE.parent / "argmax.metal").read_text()
    if name in _HEADERS:
        header += (_HERE / f"{_HEADERS[name]}.metal").read_text()
    if name == "chain_logits":
        header += "#define KEEP_LOGITS\n"
    source = (_HERE / f"{name.removesuffix('_logits')}.metal").read_text()
    return factory(name=f"specmlx_draft_{name}", input_names=inputs, output_names=outputs, source=source, header=header)
