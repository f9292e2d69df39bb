"""What a checkpoint is, by its config.json and the headers of its files: no weight is read."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specmlx.drafters.config import DrafterConfig
from specmlx.drafters.pairing import is_split_mtp
from specmlx.formats.checkpoint import read_config, shards_of
from specmlx.formats.gguf import read_gguf
from specmlx.formats.header import Entry
from specmlx.formats.quantization import check_quantization
from specmlx.formats.scaled import is_scaled
from specmlx.targets.config import MODEL_TYPES, HybridConfig
from specmlx.targets.gguf import gguf_files, planned, read_parts
from specmlx.targets.gguf_config import blocks
from specmlx.targets.gguf_tokenizer import tokenizer_files

TARGET, DRAFTER, MTP_HEAD = "target", "drafter", "MTP head"
EMBEDDING, EXPERTS, VISION, MTP = "embedding", "experts", "vision", "MTP head"
# The first pattern that a name has is its group.
GROUPS = {
    VISION: r"(^|\.)(visual|vision_tower|vision_model)\.",
    MTP: r"(^|\.)mtp\.",
    EXPERTS: r"\.experts\.|switch_mlp|_exps\.",
    EMBEDDING: r"embed_tokens|token_embd|(^|\.)wte\.",
    "head": r"(^|\.)lm_head\.|^output\.",
    "Gated DeltaNet": r"linear_attn|ssm_|attn_qkv|attn_gate",
    "attention": r"self_attn|\.attn_(q|k|v|output)",
    "MLP": r"\.mlp\.|feed_forward|\.ffn_",
    "fusion of taps": r"(^|\.)fc\.",
    "Markov head": r"markov_head",
    "confidence head": r"confidence_head",
    "candidate selector": r"candidate_selector",
    "convolutions": r"_conv\.",
}
OTHERS = "norms and others"
# What values of other types than a config should have may raise.
_UNFIT = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)


@dataclass(frozen=True)
class Group:
    """Tensors that serve the same end, and their bytes."""

    tensors: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """A checkpoint by its headers.

    Args:
        what: "target", "drafter" or "MTP head".
        kind: the model type, or the kind of drafter.
        packaging: who wrote the weights, and how.
        geometry: the sizes that the config names.
        bytes_per_pass: what one pass over one row reads of them; of experts the share that a token is sent to.
        groups: tensors and bytes by what they are for.
        questions: what the files leave open, or why specmlx refuses them, a line each.
    """

    path: str
    what: str
    kind: str
    packaging: str
    files: int
    bytes_per_pass: int
    groups: dict[str, Group]
    geometry: dict[str, Any] = field(default_factory=dict)
    questions: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> int:
        return sum(group.tensors for group in self.groups.values())

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups.values())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tensors": self.tensors, "bytes": self.bytes}


def inspect_path(path: Path) -> Inspection:
    """What a directory or a GGUF file is. Raises ValueError in one line where its headers can't be read."""
    if files := gguf_files(path):
        return _inspect_gguf(path, files)
    if not path.is_dir():
        raise ValueError(f"{path} is neither a directory nor a .gguf file")
    config, shards = read_config(path), shards_of(path).values()
    tensors = {name: entry for entries in shards for name, entry in entries.items()}
    return inspect_tensors(str(path), config, tensors, len(shards))


def inspect_tensors(name: str, config: dict[str, Any], tensors: dict[str, Entry], files: int) -> Inspection:
    """The same from a config.json and the headers' tensors, wherever they are from."""
    try:
        what, kind, geometry, questions = _read(config, tensors)
    except _UNFIT as error:
        what, kind, geometry, questions = TARGET, "unknown", {}, [_one_line(error)]
    groups = _groups({name: entry.nbytes for name, entry in tensors.items()})
    form, nbytes = packaging(config, tensors), _per_pass(groups, config, what)
    return Inspection(name, what, kind, form, files, nbytes, groups, geometry, questions)


def packaging(config: dict[str, Any], tensors: dict[str, Entry]) -> str:
    """Who wrote the weights and in which format, in a few words."""
    if "speculators_model_type" in config or "speculators_config" in config:
        return "speculators"
    if quantization := config.get("quantization"):
        if isinstance(quantization, dict):
            mode, bits, size = (quantization.get(k) for k in ("mode", "bits", "group_size"))
            return f"mlx, {mode or 'affine'} {bits} bits, groups of {size}"
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    other = config.get("quantization_config") or text.get("quantization_config")
    if isinstance(other, dict):
        parts = [other.get(key) for key in ("quant_method", "quant_algo", "format", "weight_block_size")]
        return ", ".join(str(part) for part in parts if part)
    if is_scaled(tensors):
        return "scaled codes without a quantization_config"
    kinds = sorted({entry.dtype for entry in tensors.values()})
    raw = any(name.endswith("conv1d.weight") and entry.shape[-1] != 1 for name, entry in tensors.items())
    return f"{'Hugging Face, ' if raw else ''}{' and '.join(kinds)}"


def _read(config: dict[str, Any], tensors: dict[str, Entry]) -> tuple[str, str, dict[str, Any], list[str]]:
    if is_split_mtp(config):
        return MTP_HEAD, "mtp", {}, []
    names = " ".join(map(str, config.get("architectures") or []))
    nested = config.get("dflash_config") or config.get("dspark_config") or config.get("speculators_config")
    if nested or re.search("DFlash|DSpark|Speculator", names) or "speculators_model_type" in config:
        return _read_drafter(config, names)
    model_type, questions, geometry = str(config.get("model_type")), [], {}
    if model_type in MODEL_TYPES:
        geometry, questions = _tried(lambda: _sizes(HybridConfig.from_dict(config)))
    else:
        geometry = _plain({**config, **(config.get("text_config") or {})})
    if any(re.search(GROUPS[MTP], name) for name in tensors):
        geometry["mtp"] = True
    _, unread = _tried(lambda: check_quantization(config, model_type in MODEL_TYPES) or {})
    questions += unread
    return TARGET, model_type, geometry, questions


def _read_drafter(config: dict[str, Any], names: str) -> tuple[str, str, dict[str, Any], list[str]]:
    geometry, questions = _tried(lambda: _drafter_sizes(DrafterConfig.from_dict(config)))
    return DRAFTER, geometry.pop("kind", names or "unknown"), geometry, questions


def _tried(read: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    try:
        return read(), []
    except _UNFIT as error:
        return {}, [_one_line(error)]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__


def _sizes(config: HybridConfig) -> dict[str, Any]:
    linear = config.layer_types.count("linear_attention")
    names = ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["linear_num_key_heads", "linear_num_value_heads", "tie_word_embeddings"]
    names += ["num_experts", "num_experts_per_tok"] if config.num_experts else ["intermediate_size"]
    return {name: getattr(config, name) for name in names} | {"linear_layers": linear}


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if type(v) is int and k.endswith(("_size", "_layers", "_heads"))}


def _drafter_sizes(config: DrafterConfig) -> dict[str, Any]:
    names = ["kind", "hidden_size", "num_hidden_layers", "vocab_size", "block_size", "max_width", "mask_token_id"]
    names += ["target_layer_ids", "windows", "num_target_layers", "draft_vocab_size"]
    return {name: getattr(config, name) for name in names}


def _groups(sizes: dict[str, int]) -> dict[str, Group]:
    found: dict[str, list[int]] = {}
    for name, nbytes in sizes.items():
        group = next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), OTHERS)
        found.setdefault(group, []).append(nbytes)
    order = [*GROUPS, OTHERS]
    return {group: Group(len(found[group]), sum(found[group])) for group in order if group in found}


def _per_pass(groups: dict[str, Group], config: dict[str, Any], what: str) -> int:
    """Of the embedding only rows are read, unless it is the head too; vision and MTP weights are not."""
    text = {**config, **(config.get("text_config") if isinstance(config.get("text_config"), dict) else {})}
    tied = what == TARGET and "head" not in groups
    total = 0
    for name, group in groups.items():
        if name in (VISION, MTP) or (name == EMBEDDING and not tied):
            continue
        share = 1.0
        if name == EXPERTS:
            experts, used = text.get("num_experts"), text.get("num_experts_per_tok")
            share = used / experts if type(experts) is int and type(used) is int and experts > 0 else 1.0
        total += round(group.bytes * share)
    return total


def _inspect_gguf(path: Path, files: list[Path]) -> Inspection:
    parts, questions = [read_gguf(file) for file in files if file.exists()], []
    tensors = {name: info for part in parts for name, info in part.tensors.items()}
    heads = tuple(f"blk.{i}." for i in blocks(tensors)[1])
    groups = _groups(
        {f"{'mtp.' * name.startswith(heads)}{name}": info.end - info.start for name, info in tensors.items()}
    )
    config, geometry = {}, {}
    try:
        _, config = planned(read_parts(files))
        geometry = _sizes(HybridConfig.from_dict(config)) if config["model_type"] in MODEL_TYPES else _plain(config)
        geometry |= {"mtp": True} if heads else {}
        with tokenizer_files(path):
            pass
    except ValueError as error:
        questions.append(_one_line(error))
    kinds = sorted({info.kind for info in tensors.values()})
    kind = str(parts[0].metadata.get("general.architecture")) if parts else "unknown"
    form, nbytes = f"GGUF, {', '.join(kinds)}", _per_pass(groups, config, TARGET)
    return Inspection(str(path), TARGET, kind, form, len(files), nbytes, groups, geometry, questions)
