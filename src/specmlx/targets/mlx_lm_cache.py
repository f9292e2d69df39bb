"""mlx-lm's own caches as layer states, and back: so that a stock `prompt_cache` list is one of ours."""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from specmlx.cache import checks
from specmlx.cache.kv import KV
from specmlx.cache.layers import LayerStates
from specmlx.cache.recurrent import Recurrent


def empty_caches(is_linear: Sequence[bool]) -> list:
    """One empty mlx-lm cache a layer: ArraysCache(2) for Gated DeltaNet, KVCache for attention."""
    return [ArraysCache(size=2) if linear else KVCache() for linear in is_linear]


def length_of(caches: list) -> int:
    """The rows that caches hold. Raises ValueError where they disagree."""
    lengths = {cache.offset for cache in caches if hasattr(cache, "offset")}
    if len(lengths) > 1:
        raise ValueError(f"prompt_cache layers hold different lengths {sorted(lengths)}: they must agree")
    return max(lengths, default=0)


def import_caches(caches: list, states: LayerStates, heads: tuple[int, int]) -> LayerStates:
    """Put what the caches hold into new `states`; `heads`: the model's key-value heads and their size.

    Raises TypeError for a cache of another class (naming it and its layer), ValueError where layers disagree in length
    or hold another model's states.
    """
    if len(caches) != len(states.layers):
        raise ValueError(f"prompt_cache has {len(caches)} layers but the model has {len(states.layers)}")
    layers = []
    for i, (cache, empty) in enumerate(zip(caches, states.layers, strict=True)):
        expected = ArraysCache if isinstance(empty, Recurrent) else KVCache
        if type(cache) is not expected:
            raise TypeError(
                f"prompt_cache layer {i} is a {type(cache).__name__}: specmlx reads {expected.__name__} there"
            )
        if expected is KVCache:
            layers.append(None if cache.empty() else KV(cache.keys, cache.values))
        else:
            if len(cache.cache) != 2:
                raise ValueError(f"prompt_cache layer {i} has {len(cache.cache)} arrays, not the 2 of a state")
            if cache.lengths is not None or cache.left_padding is not None:
                raise ValueError(
                    f"prompt_cache layer {i} is of a batch with padding: specmlx goes on with one sequence"
                )
            conv, S = cache.cache
            if (S is None) != (conv is None):
                raise ValueError(f"prompt_cache layer {i} holds half of a state")
            layers.append(empty if S is None else Recurrent(S, conv))
    length = length_of(caches)
    held = {i: empty for i, empty in enumerate(states.layers) if layers[i] is not None}
    checks.check_fit(dict(enumerate(layers)), held, heads, what="prompt_cache layer")
    return LayerStates.holding(length, layers, states.batch)


def export_caches(states: LayerStates, caches: list) -> None:
    """Write the committed rows into the caches, in place."""
    for cache, layer in zip(caches, states.folded(), strict=True):
        if isinstance(layer, Recurrent):
            cache[0], cache[1] = layer.conv, layer.S
        elif layer is not None:
            cache.keys, cache.values = layer
            cache.offset = int(mx.array(states.length).max().item())
