"""A target and its drafter as one directory, which mlx_lm loads too."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from specmlx.drafters.checkpoint import load_drafter, load_mtp
from specmlx.drafters.config import DrafterConfig, is_language_model
from specmlx.drafters.pairing import is_split_mtp
from specmlx.drafters.written import plain_config
from specmlx.formats.atomic import whole_directory
from specmlx.formats.checkpoint import INDEX, read_config, safetensors, shards_of
from specmlx.formats.scaled_linear import BlockScaledLinear, ScaledLinear
from specmlx.formats.sizes import BITS
from specmlx.loading.resolve import MTP, NGRAM, resolve
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.checkpoint import load_target
from specmlx.targets.config import LINEAR, QWEN3_NEXT
from specmlx.targets.gguf_tokenizer import tokenizer_files
from specmlx.targets.hybrid import Model

# Gigabytes.
SHARD = 5
TOKENIZER = "tokenizer* special_tokens_map.json added_tokens.json vocab.* merges.txt *.jinja *.tiktoken".split()
OTHERS = ("generation_config.json", "chat_template.json", "LICENSE*")
Progress = Callable[[int, int], None]


def convert(
    model: str,
    out: str | Path,
    draft_model: str | None = None,
    bits: int | None = None,
    group_size: int = 64,
    progress: Progress | None = None,
) -> Path:
    """Write a target to a new directory in mlx's layout, with its drafter in draft/.

    Args:
        model, draft_model: directories, Hub ids, a .gguf file, or of the demo; "mtp" is the head in the target's files.
        bits: quantizes the target's matrices in groups of `group_size`, routers of experts to 8 bits as mlx_lm does.
        progress: gets (bytes written, bytes in all).

    The directory appears at once, when all of it is written and synced: a run that is killed leaves none. Raises
    ValueError in one line, with nothing written, for a directory that exists, a pair that does not fit, and a target in
    a format that mlx_lm has not.
    """
    out = Path(out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty directory: name a new one")
    if bits is not None and bits not in BITS:
        raise ValueError(f"can't quantize to {bits} bits: mlx has {', '.join(map(str, BITS))}")
    source = resolve(model)
    target, config = load_target(source, lazy=True)
    drafter = None if draft_model is None else _drafter(draft_model, target, source, config)
    config = _config(target, config)
    module = target.lm if isinstance(target, AnyLM) else target
    if bits is not None:
        config = _quantized(module, config, bits, group_size)
    with whole_directory(out) as partial:
        _write_weights(partial, module, config, progress)
        _write_json(partial / "config.json", config)
        with tokenizer_files(source) as own:
            for folder, patterns in ((source if source.is_dir() else source.parent, OTHERS), (own, TOKENIZER)):
                for file in [file for pattern in patterns for file in folder.glob(pattern)]:
                    shutil.copyfile(file, partial / file.name)
        if drafter is not None:
            (draft := partial / "draft").mkdir()
            weights, draft_config = drafter
            if isinstance(weights, dict):
                with (draft / "model.safetensors").open("wb") as stream:
                    stream.writelines(safetensors(weights, {"format": "mlx"}))
            else:
                for file in [*shards_of(weights), *weights.glob(f"model{INDEX}")]:
                    shutil.copyfile(file, draft / file.name)
            _write_json(draft / "config.json", draft_config)
    return out


def _drafter(
    name: str, target: Model | AnyLM, source: Path, target_config: dict[str, Any]
) -> tuple[Path | dict[str, mx.array], dict[str, Any]]:
    """A drafter's directory, or its weights, and its config to be, once it is known to fit and to load."""
    if name == NGRAM:
        raise ValueError(f"draft_model {name!r} has no files: leave it out, and name it when you generate")
    if name == MTP:
        if not isinstance(target, Model):
            raise ValueError(f"draft_model 'mtp' needs a Qwen3.5-family target, not {target.config.model_type}")
        head = load_mtp(source, target).model
        _refuse_packed(head)
        text = target_config.get("text_config") or target_config
        plain = {"architectures": ["Qwen3_5MTP"], "model_type": "qwen3_5_mtp", "mtp_norms": "w", "text_config": text}
        if "quantization" in target_config:
            plain["quantization"] = target_config["quantization"]
        return dict(tree_flatten(head.parameters())), plain
    path = resolve(name)
    config = read_config(path)
    if is_language_model(config):
        raise ValueError(f"{path} is a language model: it needs no conversion, name it as draft_model")
    load_drafter(path, target)
    return path, config if is_split_mtp(config) else plain_config(DrafterConfig.from_dict(config), config)


def _config(target: Model | AnyLM, config: dict[str, Any]) -> dict[str, Any]:
    """The target's config.json as mlx_lm reads it. Raises ValueError where mlx_lm can't run the model."""
    _refuse_packed(target)
    config = {key: value for key, value in config.items() if key not in ("draft_model", "quantization_config")}
    if isinstance(target, Model):
        config["model_type"] = str(config["model_type"]).removesuffix("_text")
        interval = target.config.full_attention_interval
        for i, kind in enumerate(target.config.layer_types):
            if (kind == LINEAR) != bool((i + 1) % interval):
                raise ValueError(f"layer_types of layer {i} is {kind!r}, which mlx_lm can't load: use it as it is")
    if "quantization" in config:
        config["quantization_config"] = config["quantization"]
    return config


def _refuse_packed(module: nn.Module) -> None:
    packed = [name for name, layer in module.named_modules() if isinstance(layer, (ScaledLinear, BlockScaledLinear))]
    if packed:
        what = "in FP8 or FP4 with a scale of its own"
        raise ValueError(f"{packed[0]} is {what}, which mlx_lm can't load: use it as it is")


def _quantized(module: nn.Module, config: dict[str, Any], bits: int, group_size: int) -> dict[str, Any]:
    from mlx_lm.utils import quantize_model

    if "quantization" in config or any(isinstance(m, nn.QuantizedLinear) for _, m in module.named_modules()):
        raise ValueError("the target is quantized already: leave --quantize out, or name its unquantized source")

    def predicate(path: str, _: nn.Module) -> bool | dict[str, Any]:
        # Routers and gates of shared experts keep 8 bits, as in mlx_lm.
        return {"group_size": 64, "bits": 8} if path.endswith(("mlp.gate", "shared_expert_gate")) else True

    experts = isinstance(module, Model) and module.config.num_experts
    try:
        _, config = quantize_model(module, config, group_size, bits, quant_predicate=predicate if experts else None)
    except ValueError as error:
        raise ValueError(f"can't quantize to {bits} bits in groups of {group_size}: {error}") from None
    return config


def _write_weights(folder: Path, module: nn.Module, config: dict[str, Any], progress: Progress | None) -> None:
    from mlx_lm.utils import make_shards

    prefix = "language_model." if config.get("model_type") == QWEN3_NEXT else ""
    weights = {name.removeprefix(prefix): value for name, value in tree_flatten(module.parameters())}
    # So that a shard's memory is free once it is written.
    module.update(tree_map(lambda _: mx.array([]), module.parameters()))
    total, written, places = sum(value.nbytes for value in weights.values()), 0, {}
    shards = make_shards(weights, SHARD)
    weights.clear()
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        with (folder / file).open("wb") as stream:
            for part in safetensors(shard, {"format": "mlx"}):
                written += stream.write(part)
                if progress:
                    progress(min(written, total), total)
        places |= dict.fromkeys(shard, file)
        shard.clear()
    _write_json(folder / f"model{INDEX}", {"metadata": {"total_size": total}, "weight_map": places})


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
