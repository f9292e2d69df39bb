"""Adapters of a target: mlx-lm's, and PEFT's LoRA and DoRA on mlx-lm's layers for them."""

import math
import os
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from specmlx.formats.checkpoint import read_config, read_weights
from specmlx.formats.config import read, shown
from specmlx.formats.header import read_header
from specmlx.formats.scaled_linear import BlockScaledLinear, ScaledLinear

CONFIG = "adapter_config.json"
_MERGE = "merge it first (PEFT's merge_and_unload)"
# Ways to begin a training that leave the base model as it is; others (pissa, olora, loftq …) change its weights.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
# Fields that change what an adapter computes, beside whatever else is named use_* or *_config.
_UNREAD = ("modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication", "lora_bias")
_UNREAD += ("alora_invocation_tokens",)
_HARMLESS = ("use_rslora", "use_dora", "eva_config", "runtime_config")
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")
# What publishers put in front of a text model's modules.
_FRONT = re.compile(r"^(?:(?:model|language_model|text_model)\.)*")


def read_adapter(path: Path) -> dict[str, Any]:
    """The adapter_config.json of a directory. Raises ValueError in one line for a PEFT adapter that can't be loaded."""
    if not os.path.lexists(path / CONFIG):
        raise ValueError(f"{path} has no {CONFIG}: an adapter is a directory with one and its weights")
    config = read_config(path, CONFIG)
    if "peft_type" not in config:
        return config
    if config["peft_type"] != "LORA":
        kind = shown(config["peft_type"])
        raise ValueError(f"{path} is a PEFT adapter of peft_type {kind}: specmlx loads LORA; {_MERGE}")
    problems = [name for name in _UNREAD if config.get(name)]
    named = [name for name in config if name.startswith("use_") or name.endswith("_config")]
    problems += [name for name in named if config[name] and name not in _HARMLESS]
    problems += ["bias"] if config.get("bias", "none") != "none" else []
    problems += ["init_lora_weights"] if config.get("init_lora_weights") not in _PLAIN_STARTS else []
    if problems:
        value = shown(config[problems[0]])
        raise ValueError(f"{path}/{CONFIG} has {problems[0]} {value}: specmlx loads plain LoRA and DoRA; {_MERGE}")
    try:
        config |= {"r": read(config, "r", int, 8, above=0), "lora_alpha": read(config, "lora_alpha", float, 8)}
        for name in ("use_rslora", "use_dora"):
            read(config, name, bool, False)
        for name, kind, above in (("rank_pattern", int, 0), ("alpha_pattern", float, None)):
            for pattern in (patterns := read(config, name, dict, {})):
                _check_pattern(pattern)
                read(patterns, pattern, kind, above=above)
    except ValueError as error:
        raise ValueError(f"{path}/{CONFIG}: {error}") from None
    return config


def add_adapter(model: nn.Module, path: Path, config: dict[str, Any]) -> nn.Module:
    """The model with an adapter's layers, by the config that `read_adapter` gave; in place.

    Raises ValueError in one line for files that are missing or corrupt, and for tensors that fit no layer.
    """
    if "peft_type" in config:
        layers = _peft_layers(model, path, config)
        model.update_modules(tree_unflatten(list(layers.items())))
        return model
    from mlx_lm.utils import load_adapters

    if os.path.lexists(weights := path / "adapters.safetensors"):
        read_header(weights)
    try:
        return load_adapters(model, str(path))
    except (OSError, RuntimeError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"can't load the adapter {path}: {' '.join(str(error).split())[:400]}") from None


def _peft_layers(model: nn.Module, path: Path, config: dict[str, Any]) -> dict[str, nn.Module]:
    kinds = (nn.Linear, nn.QuantizedLinear, ScaledLinear, BlockScaledLinear)
    known = {_FRONT.sub("", name): (name, layer) for name, layer in model.named_modules() if isinstance(layer, kinds)}
    found: dict[str, dict[str, mx.array]] = {}
    for name, value in read_weights(path, "adapter_model").items():
        if (match := _TENSOR.fullmatch(name)) is None:
            raise ValueError(f"{path} has {name[:100]}, which is no LoRA of a linear layer: {_MERGE}")
        found.setdefault(match[1], {})[match[2]] = value
    layers = {}
    for name, parts in sorted(found.items()):
        if (place := known.get(_FRONT.sub("", name))) is None:
            raise ValueError(f"{path} adapts {name[:100]}, which is no linear layer of this model: is it another's?")
        try:
            layers[place[0]] = _layer(name, place[1], parts, config)
        except ValueError as error:
            raise ValueError(f"{path}: {name}: {error}") from None
    if not layers:
        raise ValueError(f"{path} has no tensors: train the adapter again")
    return layers


def _layer(name: str, linear: nn.Module, parts: dict[str, mx.array], config: dict[str, Any]) -> nn.Module:
    """W x + scale B A x; for DoRA times the magnitude over the norm of a row of W + scale B A (arXiv 2402.09353)."""
    from mlx_lm.tuner.dora import DoRALinear
    from mlx_lm.tuner.lora import LoRALinear

    dora = bool(config.get("use_dora"))
    names = ["lora_A", "lora_B"] + ["lora_magnitude_vector"] * dora
    if parts.keys() != set(names):
        raise ValueError(f"has {', '.join(sorted(parts))}, should have {', '.join(names)}")
    rank = _by_pattern(config.get("rank_pattern"), name, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
    outputs, inputs = _shape(linear)
    for part, want in zip(names, ((rank, inputs), (outputs, rank), (outputs,)), strict=False):
        if parts[part].shape != want or not mx.issubdtype(parts[part].dtype, mx.floating):
            raise ValueError(f"{part} is {parts[part].dtype} {list(parts[part].shape)}, should be {list(want)}")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if dora and not isinstance(linear, (nn.Linear, nn.QuantizedLinear)):
        raise ValueError(f"DoRA needs plain or mlx's own quantized weights, not a {type(linear).__name__}; {_MERGE}")
    layer = (DoRALinear if dora else LoRALinear)(inputs, outputs, r=rank, scale=scale)
    layer.linear, layer.lora_a, layer.lora_b = linear, parts["lora_A"].T, parts["lora_B"].T
    if dora:
        layer.m = parts["lora_magnitude_vector"]
    return layer


def _shape(linear: nn.Module) -> tuple[int, int]:
    """A layer's outputs and inputs."""
    outputs = linear.rows if isinstance(linear, BlockScaledLinear) else linear.weight.shape[0]
    packed = not isinstance(linear, nn.Linear)
    return outputs, linear.weight.shape[-1] * 32 // linear.bits if packed else linear.weight.shape[-1]


def _by_pattern(patterns: dict[str, Any] | None, name: str, default: Any) -> Any:
    """The value for a layer: that of the first name or regular expression which its name ends with, as PEFT has it."""
    found = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name))
    return next(found, default)


def _check_pattern(pattern: str) -> None:
    # Expressions of more repeats could run for ever.
    if len(re.findall(r"[*+{]", pattern)) > 3 or re.search(r"\)[*+?{]", pattern) or len(pattern) > 200:
        raise ValueError(f"the pattern {shown(pattern)} is too complex: name the layers")
    try:
        re.compile(pattern)
    except (re.error, RecursionError):
        raise ValueError(f"the pattern {shown(pattern)} is no regular expression") from None
