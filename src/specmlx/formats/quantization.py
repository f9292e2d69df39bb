"""What other publishers' `quantization_config` says of the weights, and whether they can be read."""

from typing import Any

from specmlx.formats.config import read, shown

# Of these, files of a hybrid are read by `formats.scaled`, the others by mlx-lm.
_METHODS = ("awq", "bitnet", "compressed-tensors", "fp8", "modelopt", "mxfp4", "mxfp8")
_INSTEAD = "take the unquantized model, or an mlx conversion"


def scheme(config: dict[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` of a config.json or of its text_config; None beside mlx's own, and where there is none.

    Raises ValueError where it isn't an object.
    """
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    if any(part.get("quantization") for part in parts):
        return None
    return next((found for part in parts if (found := read(part, "quantization_config", dict, None))), None)


def scheme_name(found: dict[str, Any]) -> str:
    """Its method, format and bits, as messages name them."""
    parts = [shown(found.get("quant_method"))]
    parts += [f"{key} {shown(found[key])}" for key in ("format", "bits", "version") if found.get(key) is not None]
    return ", ".join(parts)


def check_quantization(config: dict[str, Any], hybrid: bool) -> None:
    """Raise ValueError in one line, which names the method, for quantized weights that can't be read."""
    if (own := read(config, "quantization", dict, None)) is not None:
        for name in ("group_size", "bits"):
            read(own, name, int, above=0, most=128)
        read(own, "mode", str, None)
    if (found := scheme(config)) is None:
        return
    old = found.get("load_in_4bit") or found.get("load_in_8bit")
    default = "bitsandbytes" if old else "modelopt" if "quant_algo" in found else None
    method = read(found, "quant_method", str, default)
    if method is None:
        raise ValueError(f"quantization_config has no quant_method: how are the weights quantized? {_INSTEAD}")
    known = method in _METHODS and not (hybrid and method == "bitnet")
    if method == "awq":
        # mlx-lm reads AutoAWQ's order of codes.
        known = found.get("bits", 4) == 4 and str(found.get("version") or "gemm").lower() == "gemm"
    elif method == "compressed-tensors" and hybrid:
        groups = read(found, "config_groups", dict, {}).values()
        weights = [group.get("weights") for group in groups if isinstance(group, dict)]
        integers = any(isinstance(part, dict) and part.get("type") == "int" for part in weights)
        known = not integers and found.get("format") not in ("pack-quantized", "int-quantized", "marlin-24")
    if not known:
        name = scheme_name(found | {"quant_method": method})
        raise ValueError(f"quantization_config has quant_method {name}, which specmlx can't read: {_INSTEAD}")
