"""A drafter's tokens where each depends on the one before it, without a look at the device between them."""

import mlx.core as mx

from specmlx.kernels import dispatch
from specmlx.kernels.draft_head import metal, reference
from specmlx.kernels.draft_head.reference import best_path

__all__ = ["best_path", "chain", "path", "top_k", "walk"]


def top_k(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest logits `[..., k]` float32 of `[..., V]` in any order, and their ids int32."""
    if metal.supports_top_k(logits, k) and (factory := dispatch.kernel("draft_head", logits.dtype)):
        return metal.top_k(logits, k, factory)
    ids = mx.argpartition(-logits, kth=k - 1, axis=-1)[..., :k].astype(mx.int32)
    return mx.take_along_axis(logits, ids, axis=-1).astype(mx.float32), ids


def chain(
    logits: mx.array, w1: mx.array, w2: mx.array, *given, keep_logits: bool = False, **options
) -> tuple[mx.array, mx.array | None]:
    """As `reference.chain`; the biased logits only if they are to be kept."""
    if metal.supports_chain(logits, w1, w2) and (factory := dispatch.kernel("draft_head", logits.dtype)):
        return metal.chain(logits, w1, w2, *given, keep_logits=keep_logits, factory=factory, **options)
    tokens, biased = reference.chain(logits, w1, w2, *given, **options)
    return tokens, biased if keep_logits else None


def walk(unary: mx.array, ids: mx.array, before: mx.array, *given) -> tuple[mx.array, mx.array]:
    """As `reference.walk`."""
    if metal.supports_candidates(ids) and (factory := dispatch.kernel("draft_head", before.dtype)):
        return metal.walk(unary, ids, before, *given, factory=factory)
    return reference.walk(unary, ids, before, *given)


def path(unary: mx.array, ids: mx.array, before: mx.array, *given) -> mx.array:
    """As `reference.path`."""
    if metal.supports_candidates(ids) and (factory := dispatch.kernel("draft_head", before.dtype)):
        return metal.path(unary, ids, before, *given, factory=factory)
    return reference.path(unary, ids, before, *given)
