"""Launch of the draft head's kernels: token after token on the device, without a look at it."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from specmlx.kernels.source import Source
from specmlx.kernels.tuning import tuning

_THREADS = 256

_TOP_K = Source("draft_top_k", "logits", "values ids", "draft_head/top_k", "argmax draft_head/candidates")
_MERGE = Source("draft_merge", "values ids", "best_values best_ids", "draft_head/merge", _TOP_K.header)
_CHAIN = Source(
    "draft_chain",
    "logits w1 w2 before_values before_ids noise target_ids scale slot",
    "values ids previous_tokens",
    "draft_head/chain",
    "argmax draft_head/chosen",
)
_CHAIN_LOGITS = replace(_CHAIN, name="draft_chain_logits", outputs=f"{_CHAIN.outputs} biased", define="KEEP_LOGITS")
_LAST = Source("draft_last", "values ids", "token", "draft_head/last", _CHAIN.header)
_WALK = Source(
    "draft_walk", "unary ids before after anchor z noise scale", "tokens scores", "draft_head/walk", "argmax"
)
_PATH = Source("draft_path", "unary ids before after anchor z", "tokens", "draft_head/path", "argmax")


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
    best = _TOP_K(
        factory,
        [logits],
        [((rows, segments, k), mx.float32), ((rows, segments, k), mx.int32)],
        (_THREADS, segments, rows),
        (_THREADS, 1, 1),
        **{"K": k, "T": logits.dtype, "V": V, "W": 4 if V % 4 == 0 else 1, "SEGMENT": segment, "THREADS": _THREADS},
    )
    outputs = [((rows, k), mx.float32), ((rows, k), mx.int32)]
    values, ids = _MERGE(factory, best, outputs, (32, rows, 1), (32, 1, 1), K=k)
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
    chain = _CHAIN_LOGITS if keep_logits else _CHAIN
    outputs = [((B, segments), mx.float32), ((B, segments), mx.int32), ((B,), mx.int32), ((B, V), logits.dtype)]
    template = {"T": logits.dtype, "B": B, "V": V, "R": w1.shape[-1], "SEGMENT": segment, "THREADS": _THREADS}
    template |= {"NOISY": noise is not None, "MAPPED": target_ids is not None}
    noise = logits if noise is None else noise
    target_ids = anchor if target_ids is None else target_ids
    scale = mx.array(scale, dtype=mx.float32)
    # Eight of them, since mlx binds fewer elements in another way: one more kernel to compile.
    values, ids = mx.zeros((B, 8)), mx.broadcast_to(anchor.astype(mx.int32)[:, None], (B, 8))
    tokens, biased = [], []
    for slot in range(S):
        values, ids, previous, *kept = chain(
            factory,
            [logits, w1, w2, values, ids, noise, target_ids, scale, mx.array(slot)],
            outputs if keep_logits else outputs[:3],
            (_THREADS, segments, 1),
            (_THREADS, 1, 1),
            **template,
        )
        tokens.append(previous)
        biased += kept
    last = _LAST(factory, [values, ids], [((B,), mx.int32)], (32, B, 1), (32, 1, 1), V=w1.shape[0])
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
    inputs = [*_candidates(unary, ids, before, after, anchor, z), unary if noise is None else noise]
    return tuple(
        _WALK(
            factory,
            [*inputs, mx.array(scale, dtype=mx.float32)],
            [((B, S), mx.int32), ((B, S, K), mx.float32)],
            (32 * K, B, 1),
            (32 * K, 1, 1),
            **_template(ids, before, z),
            NOISY=noise is not None,
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
    inputs, outputs = _candidates(unary, ids, before, after, anchor, z), [((B, S), mx.int32)]
    return _PATH(factory, inputs, outputs, (32 * K, B, 1), (32 * K, 1, 1), **_template(ids, before, z))[0]


def _candidates(unary, ids, before, after, anchor, z) -> list[mx.array]:
    return [unary, ids, before, after, anchor.astype(mx.int32), unary if z is None else z]


def _template(ids: mx.array, before: mx.array, z: mx.array | None) -> dict:
    _, S, K = ids.shape
    V, R = before.shape
    return {"S": S, "K": K, "V": V, "R": R, "HAS_Z": z is not None}
