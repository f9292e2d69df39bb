"""A drafter's tokens where each depends on the one before it, without a look at the device between them."""

import mlx.core as mx

from specmlx.kernels.choice.serving import Serve, kernel_factory
from specmlx.kernels.draft_head import metal, reference
from specmlx.kernels.draft_head.reference import best_path

__all__ = ["best_path", "chain", "path", "top_k", "walk"]


def top_k(logits: mx.array, k: int, serve: Serve = kernel_factory) -> tuple[mx.array, mx.array]:
    """The k largest logits `[..., k]` float32 of `[..., V]` in any order, and their ids int32.

    serve: says what makes the kernels, here and below; where nothing does, mlx's operations run.
    """
    if metal.supports_top_k(logits, k) and (factory := serve("draft_head", logits.dtype)):
        return metal.top_k(logits, k, factory)
    ids = mx.argpartition(-logits, kth=k - 1, axis=-1)[..., :k].astype(mx.int32)
    return mx.take_along_axis(logits, ids, axis=-1).astype(mx.float32), ids


def chain(
    logits: mx.array,
    w1: mx.array,
    w2: mx.array,
    anchor: mx.array,
    noise: mx.array | None = None,
    scale: float = 1.0,
    target_ids: mx.array | None = None,
    keep_logits: bool = False,
    serve: Serve = kernel_factory,
) -> tuple[mx.array, mx.array | None]:
    """As `reference.chain`; the biased logits only if they are to be kept."""
    if metal.supports_chain(logits, w1, w2) and (factory := serve("draft_head", logits.dtype)):
        return metal.chain(logits, w1, w2, anchor, noise, scale, target_ids, keep_logits, factory)
    tokens, biased = reference.chain(logits, w1, w2, anchor, noise, scale, target_ids)
    return tokens, biased if keep_logits else None


def walk(
    unary: mx.array,
    ids: mx.array,
    before: mx.array,
    after: mx.array,
    anchor: mx.array,
    z: mx.array | None = None,
    noise: mx.array | None = None,
    scale: float = 1.0,
    serve: Serve = kernel_factory,
) -> tuple[mx.array, mx.array]:
    """As `reference.walk`."""
    if metal.supports_candidates(ids) and (factory := serve("draft_head", before.dtype)):
        return metal.walk(unary, ids, before, after, anchor, z, noise, scale, factory)
    return reference.walk(unary, ids, before, after, anchor, z, noise, scale)


def path(
    unary: mx.array,
    ids: mx.array,
    before: mx.array,
    after: mx.array,
    anchor: mx.array,
    z: mx.array | None = None,
    serve: Serve = kernel_factory,
) -> mx.array:
    """As `reference.path`."""
    if metal.supports_candidates(ids) and (factory := serve("draft_head", before.dtype)):
        return metal.path(unary, ids, before, after, anchor, z, factory)
    return reference.path(unary, ids, before, after, anchor, z)
