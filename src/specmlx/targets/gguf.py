"""Targets in GGUF files: llama.cpp's names and order of rows, mapped to mlx-lm's."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from specmlx.formats.gguf import GGUF, read_gguf
from specmlx.formats.gguf_blocks import BITS, DENSE, GROUP, to_mlx
from specmlx.targets.config import UNFIT, HybridConfig
from specmlx.targets.gguf_config import FACTORS, PLAIN, blocks, config_of
from specmlx.targets.hybrid import Model

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
# Of an MTP head, around its layer.
_HEAD = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}
# Parameters that are no module's weight or bias.
_BARE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}


def gguf_files(path: Path) -> list[Path]:
    """The GGUF files of a model: the file itself with its other parts, or the one of a directory without safetensors.

    A vision projector or an importance matrix beside it is none. Raises ValueError where a directory has several
    models.
    """
    if path.is_dir():
        files = [] if any(path.glob("*.safetensors")) else sorted(path.glob("*.gguf"))
        files = [file for file in files if not re.search("mmproj|imatrix", file.name.lower())] or files
    else:
        files = [path] if path.suffix == ".gguf" else []
    if files and (part := re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", files[0].name)):
        parts = [files[0].with_name(f"{part[1]}-{i:05}-of-{part[2]}.gguf") for i in range(1, int(part[2]) + 1)]
        files = [*parts, *(file for file in files if file not in parts)] if path.is_dir() else parts
        if len(files) == len(parts):
            return parts
    if len(files) > 1:
        files = [file for file in files if _is_model(file)] or files
    if len(files) > 1:
        raise ValueError(f"{path} has several models ({', '.join(file.name for file in files[:3])} …): name one file")
    return files


def _is_model(file: Path) -> bool:
    metadata = read_gguf(file).metadata
    return metadata.get("general.type", "model") == "model" and metadata.get("general.architecture") != "clip"


def read_parts(files: list[Path]) -> list[GGUF]:
    """The headers of a model's files. Raises ValueError for a part that is missing and for a tensor in two of them."""
    parts: list[GGUF] = []
    seen: dict[str, Path] = {}
    for file in files:
        if not file.exists():
            raise ValueError(f"{file} is missing: it is a part of {files[0].name}")
        parts.append(read_gguf(file))
        for name in parts[-1].tensors:
            if name in seen:
                raise ValueError(f"{name[:80]} is in {seen[name]} and in {file}: which of them counts?")
            seen[name] = file
    count = parts[0].metadata.get("split.count", 0)
    if type(count) is int and count > len(parts):
        raise ValueError(f"{files[0]} is one of {count} parts: give them their names again, …-00001-of-{count:05}.gguf")
    return parts


def planned(parts: list[GGUF]) -> tuple[nn.Module, dict[str, Any]]:
    """The model of GGUF files before any weight is read, and the config that their metadata amount to.

    Raises ValueError in one line for whatever `load_gguf` would refuse by the headers.
    """
    config = config_of(parts)
    try:
        if config["model_type"] in PLAIN.values():
            from mlx_lm.utils import _get_classes

            model_class, args_class = _get_classes(config)
            model = model_class(args_class.from_dict(config))
        else:
            model = Model(HybridConfig.from_dict(config))
    # Sizes that no array can have may raise more than ValueError.
    except UNFIT as error:
        raise ValueError(f"{parts[0].path}: {' '.join(str(error).split())[:300]}") from None
    _check(model, parts, config, "")
    return model, config


def load_gguf(files: list[Path]) -> tuple[nn.Module, dict[str, Any]]:
    """The model of GGUF files (ours of a hybrid, mlx-lm's of any other) and the config that they amount to; packed
    where mlx has an exact layout.

    Scales are float32, and so is everything that the model computes, unless it is cast. Raises ValueError in one line
    for a file that is not whole, another architecture, a tensor's type that can't be held exactly, and missing tensors.
    """
    parts = read_parts(files)
    model, config = planned(parts)
    weights = _weights(parts, config, "")
    fill(model, weights)
    model.set_dtype(mx.float32)
    for _, module in model.named_modules():
        # A rope's frequencies are no parameters: left lazy, only this thread could evaluate them.
        mx.eval([value for name, value in module.items() if name.startswith("_") and isinstance(value, mx.array)])
    if any(name.endswith(".scales") for name in weights):
        # mlx_lm tells the bits of each layer by its shapes.
        config["quantization"] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    return model, config


def fill(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Give a model its weights, and quantized layers where they have scales, of as many bits as shapes say."""

    def layout(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights:
            return False
        bits = weights[f"{path}.weight"].shape[-1] * 32 // (weights[f"{path}.scales"].shape[-1] * GROUP)
        return {"group_size": GROUP, "bits": bits}

    nn.quantize(model, group_size=GROUP, bits=4, class_predicate=layout)
    model.load_weights(list(weights.items()))


def has_head(parts: list[GGUF]) -> bool:
    """Whether GGUF files have an MTP head."""
    return bool(blocks(name for part in parts for name in part.tensors)[1])


def head_weights(parts: list[GGUF], config: dict[str, Any], head: nn.Module) -> dict[str, mx.array]:
    """The MTP head's parameters by the names of `MTPHead`; norms are w. Without a final norm it has the target's.

    Raises ValueError in one line for a tensor that the head has not, and for one that is missing.
    """
    _check(head, parts, config, "mtp.")
    return _weights(parts, config, "mtp.")


def _check(model: nn.Module, parts: list[GGUF], config: dict[str, Any], prefix: str) -> None:
    """Raise ValueError unless the files' tensors are what the model has, no more and no less, in types that can be."""
    wanted, modules = dict(tree_flatten(model.parameters())), dict(model.named_modules())
    given: dict[str, str] = {}
    for part, name, place in _placed(parts, config, prefix):
        info = part.tensors[name]
        if place not in wanted:
            raise ValueError(f"{part.path}: {name[:80]}: a {config['model_type']} model has no such tensor")
        if place in given:
            raise ValueError(f"{part.path}: {name[:80]} and {given[place]} are the same tensor of the model")
        given[place] = name
        if info.kind not in BITS and info.kind not in DENSE:
            known = ", ".join(BITS)
            raise ValueError(
                f"{part.path}: {name[:80]}: {info.kind} has no exact layout in mlx: "
                f"use a file of {known}, Q6_K or floats"
            )
        if _squeezed(info.shape) != _squeezed(wanted[place].shape):
            want = list(wanted[place].shape)
            raise ValueError(f"{part.path}: {name[:80]} is {list(info.shape)}, should be {want}")
        owner, _, last = place.rpartition(".")
        if info.kind in BITS and (last != "weight" or not hasattr(modules[owner], "to_quantized")):
            raise ValueError(f"{part.path}: {name[:80]} is {info.kind}: it can only be floats")
        if info.kind in BITS and owner.endswith("linear_attn.out_proj") and config["linear_value_head_dim"] % GROUP:
            raise ValueError(f"{part.path}: {name[:80]} is {info.kind}, which can't be cut between its heads")
    if missing := sorted(wanted.keys() - given.keys()):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"{parts[0].path} has no {', '.join(missing[:3])}{more}: it may be cut")


def _squeezed(shape: tuple[int, ...]) -> list[int]:
    # A convolution's last axis and a matrix of one row are left out in files.
    return [n for n in shape if n != 1]


def _placed(parts: list[GGUF], config: dict[str, Any], prefix: str) -> Iterator[tuple[GGUF, str, str]]:
    """Each tensor that belongs to the model, or with "mtp." to its head: file, name, and name of the parameter."""
    for part in parts:
        for name in part.tensors:
            place = _place(name, config)
            if place is not None and place.startswith("mtp.") == bool(prefix):
                yield part, name, place.removeprefix("mtp.")
    names = {name for part in parts for name in part.tensors}
    own = f"blk.{config['num_hidden_layers']}.nextn.shared_head_norm.weight"
    if prefix and own not in names and "output_norm.weight" in names:
        yield next(part for part in parts if "output_norm.weight" in part.tensors), "output_norm.weight", "norm.weight"


def _place(name: str, config: dict[str, Any]) -> str | None:
    """A tensor's name as a parameter's of the model or, behind "mtp.", of its head; None for one that is in the config.

    What is not known has an empty one, which is none of a parameter.
    """
    if name == FACTORS:
        return None
    top = "" if config["model_type"] in PLAIN.values() else "language_model."
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{top}{_TOP[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d{1,6})\.(.+)", name)
    if not match:
        return ""
    index, rest = int(match[1]) - config["num_hidden_layers"], match[2]
    stem, _, kind = rest.rpartition(".")
    if index >= 0 and stem in _HEAD:
        return f"mtp.{_HEAD[stem]}.{kind}"
    layer = f"{top}model.layers.{match[1]}." if index < 0 else f"mtp.layers.{index}."
    if rest in _BARE:
        return layer + _BARE[rest]
    if stem in _LAYER:
        return f"{layer}{_LAYER[stem]}.{kind}"
    return "" if index < 0 else "mtp."


def _weights(parts: list[GGUF], config: dict[str, Any], prefix: str) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    for part, name, place in _placed(parts, config, prefix):
        info = part.tensors[name]
        try:
            weights |= _named(place, to_mlx(info.kind, part.blocks(name), info.shape), config)
        except ValueError as error:
            raise ValueError(f"{part.path}: {name}: {error}") from None
    return weights


def _named(place: str, layer: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    """A tensor's parameters under mlx-lm's names, rows and columns in its order."""
    owner, _, last = place.rpartition(".")
    if "linear_attn." in place:
        layer = _grouped(place.rpartition("linear_attn.")[2].removesuffix(".weight"), layer, config)
    if config["model_type"] == "llama" and owner.endswith(("q_proj", "k_proj")):
        heads = config["num_attention_heads" if owner.endswith("q_proj") else "num_key_value_heads"]
        layer = {key: _halved(value, heads) for key, value in layer.items()}
    if owner.endswith("shared_expert_gate"):
        # A matrix of one row, without that axis in the file.
        layer = {key: value.reshape(1, -1) for key, value in layer.items()}
    return {place: layer["weight"]} if len(layer) == 1 else {f"{owner}.{key}": value for key, value in layer.items()}


def _halved(x: mx.array, heads: int) -> mx.array:
    """llama.cpp keeps the two values of a head that turn together side by side; here come all first ones first."""
    return mx.unflatten(x, 0, (heads, -1, 2)).swapaxes(1, 2).flatten(0, 2)


def _grouped(name: str, layer: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    """A Gated DeltaNet layer's tensor with its value heads by their key head, and not in turns."""
    Hk, Hv, Dv = (config[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "value_head_dim"))
    keys = 2 * Hk * config["linear_key_head_dim"]
    if name in ("A_log", "dt_bias"):
        value = layer["weight"].reshape(-1)
        return {"weight": _by_key_head(mx.log(-value) if name == "A_log" else value, 0, Hk, Hv, 1)}
    if name in ("in_proj_qkv", "conv1d"):
        layer = {k: mx.concatenate([x[:keys], _by_key_head(x[keys:], 0, Hk, Hv, Dv)]) for k, x in layer.items()}
    elif name in ("in_proj_z", "in_proj_a", "in_proj_b"):
        layer = {k: _by_key_head(x, 0, Hk, Hv, Dv if name == "in_proj_z" else 1) for k, x in layer.items()}
    elif name == "out_proj":
        layer = {k: _by_key_head(x, 1, Hk, Hv, x.shape[1] // Hv) for k, x in layer.items()}
    return {"weight": layer["weight"][..., None]} if name == "conv1d" else layer


def _by_key_head(x: mx.array, axis: int, Hk: int, Hv: int, size: int) -> mx.array:
    """llama.cpp keeps the value heads in turns, one of each key head; here all of a key head come together."""
    if x.shape[axis] != Hv * size:
        raise ValueError(f"a tensor of {list(x.shape)} does not have {Hv} value heads")
    turns = mx.unflatten(x, axis, (Hv // Hk, Hk, size)).swapaxes(axis, axis + 1)
    return turns.flatten(axis, axis + 2)
