"""What a config.json says of rotary positions, in every form that transformers reads, and the periods that it means."""

import math
from typing import Any

import mlx.core as mx

from specmlx.formats.config import read

# `mrope`, on text, is the default rope; so is `dynamic` up to max_position_embeddings.
_PLAIN = ("default", "mrope", "dynamic", "linear")
_ORIGINAL = "original_max_position_embeddings"
# The positive numbers that each kind needs, and those that it may have.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "mrope": ((), ()),
    "dynamic": (("factor",), ()),
    "linear": (("factor",), ()),
    "proportional": ((), ("factor",)),
    "yarn": (("factor", _ORIGINAL), ("beta_fast", "beta_slow", "attention_factor")),
    "longrope": ((_ORIGINAL,), ()),
    "llama3": (("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"), ()),
}
MOST_POSITIONS = (1 << 31) - 1


def max_positions(config: dict[str, Any], default: int | None = None) -> int | None:
    """A config's max_position_embeddings."""
    return read(config, "max_position_embeddings", int, default, above=0, most=MOST_POSITIONS)


def rope_parameters(config: dict[str, Any], share: float | None = None) -> dict[str, Any]:
    """A config's `rope_parameters`, completed as transformers 5 does (modeling_rope_utils.RotaryEmbeddingConfigMixin).

    A `rope_scaling` that isn't empty replaces them; `rope_type` counts before `type`. `rope_theta` and
    `partial_rotary_factor` may be at the top, as their defaults, which are 10000 and `share`;
    `original_max_position_embeddings` counts first there, and is max_position_embeddings by default.

    Raises ValueError, one line, for a kind of rope that isn't known, and for fields that are missing, of another kind
    or out of range.
    """
    scaling, parameters = (read(config, key, dict, {}) for key in ("rope_scaling", "rope_parameters"))
    given = scaling or parameters
    rope = {key: value for key, value in given.items() if value is not None}
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ValueError(f"rope_parameters has an object for {nested[0][:40]!r}: one rope for all layers is supported")
    kind = rope["rope_type"] = read(rope, "rope_type", str, read(rope, "type", str, "default"))
    if kind not in _FIELDS:
        raise ValueError(f"rope_type is {kind[:40]!r}: not supported; specmlx knows {', '.join(_FIELDS)}")
    rope.setdefault("rope_theta", read(config, "rope_theta", float, 10000.0, above=1))
    if (share := read(config, "partial_rotary_factor", float, share)) is not None:
        rope.setdefault("partial_rotary_factor", share)
    positions = max_positions(config)
    if _ORIGINAL in _FIELDS[kind][0]:
        first = (config.get(_ORIGINAL), rope.get(_ORIGINAL), positions)
        rope[_ORIGINAL] = next((value for value in first if value is not None), None)
        read(rope, _ORIGINAL, float, above=0)
        if kind == "yarn" and "factor" in given and given["factor"] is None and positions is not None:
            rope["factor"] = positions / rope[_ORIGINAL]
    read(rope, "rope_theta", float, above=1)
    required, others = _FIELDS[kind]
    for name in required:
        read(rope, name, float, above=0)
    for name in others:
        read(rope, name, float, None, above=0)
    if kind == "proportional":
        read(rope, "partial_rotary_factor", float, None, above=0, most=1)
    elif kind == "yarn":
        for name in ("mscale", "mscale_all_dim"):
            read(rope, name, float, None, least=0)
        read(rope, "truncate", bool, None)
    elif kind == "longrope":
        short, long = (read(rope, name, [float], above=0) for name in ("short_factor", "long_factor"))
        if short != long:
            raise ValueError("rope_type is longrope with a short_factor that is not its long_factor: not supported")
        read(rope, "attention_factor", float, above=0)
    elif kind == "llama3":
        read(rope, "high_freq_factor", float, above=rope["low_freq_factor"])
    return rope


def rope_at_top(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that a config's `rope_parameters` come to at its top, without those that it has there.

    Most of mlx-lm's models read their rope from the top, transformers 5 doesn't write it there. Nothing where there is
    a rope for each kind of layer: models that have such read them by themselves.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return {}
    top = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if rope.get(name) is not None}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        top["rope_scaling"] = rope | {"type": kind}
    return {name: value for name, value in top.items() if config.get(name) is None}


def is_plain(rope: dict[str, Any]) -> bool:
    """Whether rows are turned by powers of theta, at most slowed down as a whole (`linear`)."""
    return rope["rope_type"] in _PLAIN


def slowdown(rope: dict[str, Any]) -> float:
    """What a linear rope divides positions by."""
    return rope["factor"] if rope["rope_type"] == "linear" else 1.0


def rotary_dims(rope: dict[str, Any], head_dim: int) -> int:
    """How many of a head's dims are turned. Raises ValueError where that isn't an even number, up to all."""
    share = read(rope, "partial_rotary_factor", float, 1.0, above=0, most=1)
    dims = head_dim if rope["rope_type"] == "proportional" else int(head_dim * share)
    if dims < 2 or dims % 2:
        fits = f"a share of head_dim {head_dim} of 2, 4, 6 … dims"
        raise ValueError(f"partial_rotary_factor is {share}: it must be {fits}")
    return dims


def max_length(rope: dict[str, Any], positions: int) -> int:
    """How many positions a model has whose max_position_embeddings are `positions`, as vLLM counts them.

    A dynamic rope has no more: what it does beyond them depends on the number of rows in a pass.
    """
    if rope["rope_type"] == "yarn":
        positions = rope["factor"] * rope[_ORIGINAL]
    return max(1, int(min(positions * slowdown(rope), MOST_POSITIONS)))


def periods(rope: dict[str, Any], dims: int) -> mx.array:
    """Periods `[dims / 2]` float32, as mx.fast.rope takes them: a row at position p is turned by p / period.

    Raises ValueError where a longrope has another number of factors.
    """
    theta, kind, factor = rope["rope_theta"], rope["rope_type"], rope.get("factor", 1.0)
    if is_plain(rope):
        return mx.array([slowdown(rope) * theta ** (i / dims) for i in range(0, dims, 2)], dtype=mx.float32)
    if kind == "proportional":
        # Gemma 4: the first pairs of the whole head turn, the others never.
        turned = int(rope.get("partial_rotary_factor", 1.0) * dims // 2)
        turns = [factor * theta ** (2 * i / dims) if i < turned else math.inf for i in range(dims // 2)]
        return mx.array(turns, dtype=mx.float32)
    if kind == "yarn":
        return _yarn(rope, dims)
    if kind == "longrope" and len(factors := rope["short_factor"]) != dims // 2:
        raise ValueError(f"short_factor has {len(factors)} factors: {dims // 2} would fit")
    # It takes seconds to import, and config.json files are checked before.
    from mlx_lm.models.rope_utils import initialize_rope

    return initialize_rope(dims, theta, False, rope | {"type": kind}, 1)._freqs


def _yarn(rope: dict[str, Any], dims: int) -> mx.array:
    """Fast dims stay, slow ones are interpolated, by a ramp between (arXiv 2309.00071).

    mlx-lm's operations, so that bits are its own; it has no `truncate`.
    """
    fast = rope["rope_theta"] ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    original, slow = rope[_ORIGINAL], rope["factor"] * fast

    def dimension(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension(rope.get("beta_fast", 32)), dimension(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    stays = 1.0 - mx.clip((mx.arange(dims // 2, dtype=mx.float32) - low) / (high - low), 0, 1)
    return (slow * fast) / (slow * stays + fast * (1 - stays))


def attention_factor(rope: dict[str, Any]) -> float:
    """What YaRN and longrope multiply turned queries and keys by, else 1."""
    if rope["rope_type"] not in ("yarn", "longrope"):
        return 1.0
    if (given := rope.get("attention_factor")) is not None:
        return given

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * weight * math.log(rope["factor"]) + 1.0

    numerator, denominator = rope.get("mscale"), rope.get("mscale_all_dim")
    return mscale(numerator) / mscale(denominator) if numerator and denominator else mscale()
