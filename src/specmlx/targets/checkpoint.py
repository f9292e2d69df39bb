"""A target from a checkpoint directory: mlx-lm's files and raw Hugging Face ones, of a hybrid or any mlx-lm model."""

import json
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from specmlx.formats.checkpoint import eos_token_ids, read_config, read_weights, tensors_of
from specmlx.formats.config import shown
from specmlx.formats.header import Entry
from specmlx.formats.module_weights import column_major
from specmlx.formats.quantization import scheme, scheme_name
from specmlx.formats.rope import rope_at_top
from specmlx.formats.scaled import is_scaled, read_scaled
from specmlx.formats.scaled_linear import SCALES, place
from specmlx.targets.adapters import add_adapter, read_adapter
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.config import MODEL_TYPES, UNFIT, HybridConfig, check_target
from specmlx.targets.gguf import gguf_files, load_gguf
from specmlx.targets.hybrid import Model
from specmlx.targets.sharding import shard, shard_any
from specmlx.targets.tied_head import settle_head

# Where ModelOpt says how it quantized, in older exports.
MODELOPT = "hf_quant_config.json"
# How names of a config that are sizes end.
SIZE_NAMES = ("_size", "_layers", "_heads", "_experts", "_dim", "_interval", "_step")


def load_target(
    path: Path,
    *,
    dtype: mx.Dtype | None = None,
    lazy: bool = False,
    strict: bool = True,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    group: mx.distributed.Group | None = None,
) -> tuple[Model | AnyLM, dict[str, Any]]:
    """The model of a checkpoint directory and its config; `dtype` overrides the dtype of the file's unpacked weights.

    The config's `eos_token_id` is the list of all stop tokens that the files name, the tokenizer's apart.
    Hybrids are ours, any other model is mlx-lm's. With a `group` of processes each keeps its part of a hybrid. Raises
    ValueError in one line for what mlx-lm does not know, what can't be split over the group, and for missing, extra,
    corrupt or truncated weights.
    """
    if adapter_path is not None and group is not None:
        raise ValueError(f"the adapter {adapter_path} can't be split over processes: run mlx_lm.fuse first")
    adapter = None if adapter_path is None else (Path(adapter_path), read_adapter(Path(adapter_path)))
    if files := gguf_files(path):
        if model_config:
            raise ValueError(f"model_config can't change {files[0].name}: leave it out")
        model, config = load_gguf(files)
        config |= eos_token_ids(config, files[0].parent)
        return _finished(model, config, path, dtype, lazy, adapter, group), config
    config = read_config(path)
    if "quantization_config" not in config and (path / MODELOPT).exists():
        config["quantization_config"] = {"quant_method": "modelopt"} | read_config(path, MODELOPT)
    config |= eos_token_ids(config, path) | (model_config or {})
    check_target(config, path)
    hybrid = config["model_type"] in MODEL_TYPES
    if not hybrid:
        _check_known(config, path)
        config |= rope_at_top(config)
    tensors = tensors_of(path)
    check_sizes(config, tensors, path)
    weights = read_weights(path)
    settle_head(config, weights, path)
    try:
        if hybrid and (is_scaled(tensors) or any(entry.dtype.startswith("F8") for entry in tensors.values())):
            model = _load_scaled(weights, config, strict)
        else:
            model, config = _load_plain(weights, config, hybrid, strict)
    except (RuntimeError, ValueError) as error:
        found = scheme(config)
        note = "" if found is None else f", quantized by {scheme_name(found)}"
        raise ValueError(f"can't load the weights of {path}{note}: {_one_line(error)}") from None
    except UNFIT as error:
        what = _one_line(error) or "no reason given"
        raise ValueError(f"{path}/config.json is not as mlx-lm reads it: {type(error).__name__}: {what}") from None
    return _finished(model, config, path, dtype, lazy, adapter, group), config


def _finished(
    model: Any,
    config: dict[str, Any],
    path: Path,
    dtype: mx.Dtype | None,
    lazy: bool,
    adapter: tuple[Path, dict[str, Any]] | None,
    group: mx.distributed.Group | None,
) -> Model | AnyLM:
    if adapter is not None:
        model = add_adapter(model, *adapter)
    if dtype is not None:
        cast(model, dtype)
    model.eval()
    if group is not None:
        shard(model, group) if isinstance(model, Model) else shard_any(model, config, group)
    if mx.default_device() == mx.cpu:
        column_major(model)
    if not lazy:
        # Of what is cut up, no more than a layer is whole at a time.
        for layer in model.layers if group is not None else ():
            mx.eval(layer.parameters())
        mx.eval(model.parameters())
    target = model if isinstance(model, Model) else AnyLM(model, config)
    target.sharding_group = group
    target.directory, target.source = path if path.is_dir() else path.parent, path
    return target


def check_sizes(config: dict[str, Any], tensors: dict[str, Entry], path: Path) -> None:
    """Raise ValueError where a config names sizes that its files can't hold, before a model of them is built."""
    most = {"num_hidden_layers": len(tensors), "num_experts": sum(entry.nbytes for entry in tensors.values())}
    for part in (config, config.get("text_config")):
        for name, value in part.items() if isinstance(part, dict) else ():
            if type(value) in (int, float) and name.endswith(SIZE_NAMES) and not name.startswith("max_"):
                # Some models say -1 for none.
                if not -1 <= value <= most.get(name, most["num_experts"]):
                    raise ValueError(f"{path}/config.json: {name} is {shown(value)}, which its weights can't have")


def _load_scaled(weights: dict[str, mx.array], config: dict[str, Any], strict: bool) -> Model:
    model = Model(HybridConfig.from_dict(config))
    weights = model.sanitize(read_scaled(weights, config))
    place(model, weights)
    model.load_weights(list(weights.items()), strict=strict)
    return model


def _load_plain(
    weights: dict[str, mx.array], config: dict[str, Any], hybrid: bool, strict: bool
) -> tuple[nn.Module, dict[str, Any]]:
    """A model with these weights by mlx-lm's loader, which by itself would take every file that a folder lists."""
    from mlx_lm.utils import _get_classes, load_model

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        model_class, args_class = (Model, HybridConfig) if hybrid else _get_classes(config)

        def build(args: Any) -> nn.Module:
            model = model_class(args)
            own = model.sanitize if hasattr(model, "sanitize") else lambda weights: weights
            model.sanitize = lambda _: own(weights)
            return model

        return build, args_class

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        mx.save_safetensors(f"{folder}/model.safetensors", {})
        model, config = load_model(Path(folder), lazy=True, strict=strict, get_model_classes=classes)
    del model.sanitize
    return model, config


def cast(model, dtype: mx.Dtype) -> None:
    """Cast floating parameters in place; A_log, which makes the decay, and scales of FP8 and FP4 weights to float32."""

    def to(path: str, x: mx.array) -> mx.array:
        if not mx.issubdtype(x.dtype, mx.floating):
            return x
        return x.astype(mx.float32 if path.endswith(("A_log", *SCALES)) else dtype)

    model.update(tree_map_with_path(to, model.parameters()))


def _check_known(config: dict[str, Any], path: Path) -> None:
    from mlx_lm import __version__
    from mlx_lm.utils import _get_classes

    if config.get("model_file") is not None:
        raise ValueError(f"{path} asks for its own code (model_file {shown(config['model_file'])}): specmlx runs none")
    try:
        _get_classes(config)
    except ValueError:
        kind = config["model_type"]
        raise ValueError(
            f"{path} has model_type {shown(kind)}, which mlx-lm {__version__} can't run: try a newer one"
        ) from None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:400]}…"
