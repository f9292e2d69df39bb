"""Shapes of targets and drafters: built in, or read from a config.json."""

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from specmlx.drafters.config import DFLASH, DFLASH2, DSPARK, DrafterConfig
from specmlx.formats.checkpoint import read_config
from specmlx.formats.sizes import FORMATS, quantized
from specmlx.loading.hub import download_config
from specmlx.loading.resolve import DEMO, resolve
from specmlx.targets.config import HybridConfig

KINDS = (DFLASH, DFLASH2, DSPARK)

_PUBLISHED = json.loads(files(__package__).joinpath("published.json").read_text(encoding="utf-8"))
TARGETS = {name: HybridConfig(**shape) for name, shape in _PUBLISHED["targets"].items()}


def published_drafter(kind: str, target: HybridConfig) -> DrafterConfig:
    """The drafter that publishers train for a target of this size: five layers as wide as the target's, block 8.

    RadixArk's DSpark has a block of 7, of which every row proposes. Raises ValueError for an unknown kind, and for a
    target that has experts only.
    """
    if not target.intermediate_size:
        raise ValueError("drafters for mixtures of experts have no common shape: pass --draft-model")
    if kind not in KINDS:
        raise ValueError(f"unknown kind of drafter {kind!r}: there are {', '.join(KINDS)} and none")
    shape = {name: getattr(target, name) for name in ("hidden_size", "intermediate_size", "vocab_size")}
    shape |= {"draft_vocab_size": target.vocab_size, "sample_from_anchor": kind == DSPARK}
    return DrafterConfig(kind, **shape | _PUBLISHED["drafters"]["common"] | _PUBLISHED["drafters"][kind])


def drafter_geometry(name: str) -> DrafterConfig:
    """A drafter's config.json: of a directory, a Hub id, demo/dflash or demo/dspark.

    Raises ValueError, one line, for what is no drafter.
    """
    try:
        config = DrafterConfig.from_dict(_config(name))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
    # Whether there is a confidence head is known by its tensors alone, where config.json does not say.
    return replace(config, enable_confidence_head=config.enable_confidence_head is not False)


def target_geometry(name: str) -> tuple[HybridConfig, dict[str, Any] | None]:
    """The geometry of a built-in name, a config.json, a checkpoint directory or a Hub id, and its config.json.

    The latter is None for a built-in name; of a Hub id it alone is downloaded. Raises ValueError, one line, for what is
    no hybrid.
    """
    if name.lower() in TARGETS:
        return TARGETS[name.lower()], None
    config = _config(name)
    try:
        geometry = HybridConfig.from_dict(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
    return geometry, config


def stored_format(config: dict[str, Any]) -> str:
    """The name of the format that a config.json says its weights are in. Raises ValueError where that is unclear."""
    if entry := config.get("quantization"):
        try:
            return quantized(entry.get("mode", "affine"), entry["bits"], entry["group_size"]).name
        except (AttributeError, KeyError, TypeError):
            raise ValueError(f"config.json's quantization is {str(entry)[:100]}: pass --weights") from None
    if other := config.get("quantization_config"):
        other = other if isinstance(other, dict) else {}
        method, algorithm = other.get("quant_method"), str(other.get("quant_algo"))
        if method == "modelopt" and algorithm in ("NVFP4", "MIXED_PRECISION"):
            return "modelopt-nvfp4"
        if method == "fp8" and other.get("weight_block_size") == [128, 128]:
            return "fp8-block"
        raise ValueError(f"config.json's quant_method {method!r} may be any mix of formats: pass --weights")
    text = config.get("text_config") or {}
    dtype = next((c[key] for c in (config, text) for key in ("dtype", "torch_dtype") if c.get(key)), "bfloat16")
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(str(dtype))
    if short not in FORMATS:
        raise ValueError(f"config.json's dtype is {dtype!r}: pass --weights")
    return short


def _config(name: str) -> dict[str, Any]:
    path = Path(name).expanduser()
    if path.suffix == ".json":
        if not path.is_file():
            raise ValueError(f"no such file: {name}")
        return read_config(path.parent, path.name)
    if path.exists() or name.split("/")[0] == DEMO or name.count("/") != 1 or name[0] in "./~":
        if not path.exists() and "/" not in name and name != DEMO:
            known = ", ".join(TARGETS)
            raise ValueError(
                f"no geometry named {name}: there are {known}; or pass a config.json, a directory, a Hub id"
            )
        return read_config(resolve(name))
    if (config := download_config(name)) is None:
        raise ValueError(f"can't get config.json of {name}: it has none, or the Hub can't be reached")
    return config
