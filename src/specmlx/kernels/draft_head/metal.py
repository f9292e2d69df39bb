"""Launch of the draft head's kernels: token after token on the device, without a look at it.

Beside each function of `reference`, whether its kernel takes the arguments: the key of these, or None.
"""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from specmlx.kernels.draft_head.reference import Candidates
from specmlx.kernels.source import Source
from specmlx.kernels.tuning import THREADS, segments, tuning

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
_PATH = Source("draft_path", "unary ids before after anchor z", "tokens", "draft_head/path", "argmax")
_WALK = Source("draft_walk", f"{_PATH.inputs} noise scale", "tokens scores", "draft_head/walk", "argmax")


def top_k_key(logits: mx.array, k: int) -> dict | None:
    return {"dtype": logits.dtype} if 1 <= k <= 32 <= logits.shape[-1] else None


def top_k(logits: mx.array, k: int, *, factory: Callable) -> tuple[mx.array, mx.array]:
    """As `reference.top_k`, largest first; of equal ones the smaller id comes first."""
    *lead, V = logits.shape
    rows = logits.size // V
    n, split = segments(V)
    outputs = [((rows, n, k), mx.float32), ((rows, n, k), mx.int32)]
    best = _TOP_K(factory, [logits], outputs, (THREADS, n, rows), K=k, T=logits.dtype, **split)
    outputs = [((rows, k), mx.float32), ((rows, k), mx.int32)]
    values, ids = _MERGE(factory, best, outputs, (32, rows, 1), K=k)
    return values.reshape(*lead, k), ids.reshape(*lead, k)


def chain_key(logits: mx.array, w1: mx.array, w2: mx.array, *_, **__) -> dict | None:
    """Dense weights in the logits' dtype, a rank in whole lines, up to four lanes."""
    dense = logits.dtype == w1.dtype == w2.dtype and w2.shape == (logits.shape[-1], w1.shape[-1])
    taken = dense and w1.shape[-1] % 64 == 0 and w1.shape[-1] <= 512 and logits.shape[0] <= 4
    return {"dtype": logits.dtype} if taken else None


def chain(
    logits: mx.array,
    w1: mx.array,
    w2: mx.array,
    anchor: mx.array,
    noise: mx.array | None = None,
    scale: float = 1.0,
    target_ids: mx.array | None = None,
    keep_logits: bool = False,
    *,
    factory: Callable,
) -> tuple[mx.array, mx.array | None]:
    """As `reference.chain`: a launch a slot, each reading w2 once."""
    B, S, V = logits.shape
    segment = tuning().markov_rows
    n = -(-V // segment)
    launch = _CHAIN_LOGITS if keep_logits else _CHAIN
    outputs = [((B, n), mx.float32), ((B, n), mx.int32), ((B,), mx.int32), ((B, V), logits.dtype)][: 3 + keep_logits]
    template = {"T": logits.dtype, "B": B, "V": V, "R": w1.shape[-1], "SEGMENT": segment, "THREADS": THREADS}
    template |= {"NOISY": noise is not None, "MAPPED": target_ids is not None}
    noise = logits if noise is None else noise
    target_ids = anchor if target_ids is None else target_ids
    scale = mx.array(scale, dtype=mx.float32)
    # Eight of them, since mlx binds fewer elements in another way: one more kernel to compile.
    values, ids = mx.zeros((B, 8)), mx.broadcast_to(anchor.astype(mx.int32)[:, None], (B, 8))
    tokens, biased = [], []
    for slot in range(S):
        inputs = [logits, w1, w2, values, ids, noise, target_ids, scale, mx.array(slot)]
        values, ids, previous, *kept = launch(factory, inputs, outputs, (THREADS, n, 1), **template)
        tokens.append(previous)
        biased += kept
    last = _LAST(factory, [values, ids], [((B,), mx.int32)], (32, B, 1), V=w1.shape[0])
    return mx.stack([*tokens[1:], *last], axis=1), mx.stack(biased, axis=1) if keep_logits else None


def candidates_key(candidates: Candidates, *_, **__) -> dict | None:
    """The scores of all their pairs fit in 32 KB."""
    _, S, K = candidates.ids.shape
    taken = 1 <= K <= 32 and 4 * S * K * (K + 1) + 4 * K <= 32768
    return {"dtype": candidates.before.dtype} if taken else None


def walk(
    candidates: Candidates, noise: mx.array | None = None, scale: float = 1.0, *, factory: Callable
) -> tuple[mx.array, mx.array]:
    """As `reference.walk`: all slots in one launch."""
    B, S, K = candidates.ids.shape
    given = [candidates.unary if noise is None else noise, mx.array(scale, dtype=mx.float32)]
    outputs = [((B, S), mx.int32), ((B, S, K), mx.float32)]
    return tuple(_launch(_WALK, candidates, factory, outputs, given, NOISY=noise is not None))


def path(candidates: Candidates, *, factory: Callable) -> mx.array:
    """As `reference.path`: the scores of all pairs and the search in one launch."""
    return _launch(_PATH, candidates, factory, [(candidates.ids.shape[:2], mx.int32)])[0]


def _launch(source: Source, x: Candidates, factory: Callable, outputs: list, given: list = (), **template) -> list:
    B, S, K = x.ids.shape
    V, R = x.before.shape
    inputs = [*x[:4], x.anchor.astype(mx.int32), x.unary if x.z is None else x.z, *given]
    return source(factory, inputs, outputs, (32 * K, B, 1), S=S, K=K, V=V, R=R, HAS_Z=x.z is not None, **template)
