"""What a checkpoint is, by its config.json and the headers of its files: no weight is read."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
_HYBRID_SIZES = (
    "hidden_size num_hidden_layers vocab_size num_attention_heads num_key_value_heads head_dim linear_num_key_heads "
    "linear_num_value_heads tie_word_embeddings"
).split()
_DRAFTER_SIZES = (
    "kind hidden_size num_hidden_layers vocab_size block_size max_width mask_token_id target_layer_ids windows "
    "num_target_layers draft_vocab_size"
).split()


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
    questions: list[str] = []
    what, kind, geometry = TARGET, "unknown", {}
    with _asked(questions):
        what, kind, geometry = _read(config, tensors, questions)
    sizes = {name: entry.nbytes for name, entry in tensors.items()}
    groups, nbytes = _groups(sizes, config, what)
    return Inspection(name, what, kind, packaging(config, tensors), files, nbytes, groups, geometry, questions)


def packaging(config: dict[str, Any], tensors: dict[str, Entry]) -> str:
    """Who wrote the weights and in which format, in a few words."""
    if "speculators_model_type" in config or "speculators_config" in config:
        return "speculators"
    if isinstance(own := config.get("quantization"), dict) and own:
        return f"mlx, {own.get('mode') or 'affine'} {own.get('bits')} bits, groups of {own.get('group_size')}"
    other = config.get("quantization_config") or _text(config).get("quantization_config")
    if isinstance(other, dict):
        parts = [other.get(key) for key in ("quant_method", "quant_algo", "format", "weight_block_size")]
        return ", ".join(str(part) for part in parts if part)
    if is_scaled(tensors):
        return "scaled codes without a quantization_config"
    kinds = sorted({entry.dtype for entry in tensors.values()})
    raw = any(name.endswith("conv1d.weight") and entry.shape[-1] != 1 for name, entry in tensors.items())
    return f"{'Hugging Face, ' if raw else ''}{' and '.join(kinds)}"


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """A config's text_config where it is an object."""
    return text if isinstance(text := config.get("text_config"), dict) else {}


def _read(config: dict[str, Any], tensors: dict[str, Entry], questions: list[str]) -> tuple[str, str, dict[str, Any]]:
    """What a checkpoint is, its kind and its sizes; what its files leave open is added to `questions`."""
    if is_split_mtp(config):
        return MTP_HEAD, "mtp", {}
    geometry: dict[str, Any] = {}
    names = " ".join(map(str, config.get("architectures") or []))
    nested = config.get("dflash_config") or config.get("dspark_config") or config.get("speculators_config")
    if nested or re.search("DFlash|DSpark|Speculator", names) or "speculators_model_type" in config:
        with _asked(questions):
            geometry = _picked(DrafterConfig.from_dict(config), _DRAFTER_SIZES)
        return DRAFTER, geometry.pop("kind", names or "unknown"), geometry
    model_type = str(config.get("model_type"))
    hybrid = model_type in MODEL_TYPES
    with _asked(questions):
        geometry = _sizes({**config, **(config.get("text_config") or {})} if not hybrid else config, hybrid)
    if any(re.search(GROUPS[MTP], name) for name in tensors):
        geometry["mtp"] = True
    with _asked(questions):
        check_quantization(config, hybrid)
    return TARGET, model_type, geometry


@contextmanager
def _asked(questions: list[str]) -> Iterator[None]:
    """Add what a config's values raise to `questions`, in one line."""
    try:
        yield
    # Values of other types than a config should have.
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        questions.append(" ".join(str(error).split())[:400] or type(error).__name__)


def _sizes(config: dict[str, Any], hybrid: bool) -> dict[str, Any]:
    if not hybrid:
        return {k: v for k, v in config.items() if type(v) is int and k.endswith(("_size", "_layers", "_heads"))}
    parsed = HybridConfig.from_dict(config)
    names = ["num_experts", "num_experts_per_tok"] if parsed.num_experts else ["intermediate_size"]
    return _picked(parsed, _HYBRID_SIZES + names) | {"linear_layers": parsed.layer_types.count("linear_attention")}


def _picked(config: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


def _groups(sizes: dict[str, int], config: dict[str, Any], what: str) -> tuple[dict[str, Group], int]:
    """Tensors by what they are for, from their bytes by name; and the bytes that a pass over one row reads of them.

    Of the embedding only rows are read, unless it is the head too; vision and MTP weights are not.
    """
    found: dict[str, list[int]] = {group: [] for group in (*GROUPS, OTHERS)}
    for name, nbytes in sizes.items():
        found[next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), OTHERS)].append(nbytes)
    groups = {group: Group(len(each), sum(each)) for group, each in found.items() if each}
    experts, used = ({**config, **_text(config)}.get(name) for name in ("num_experts", "num_experts_per_tok"))
    share = used / experts if type(experts) is int and type(used) is int and experts > 0 else 1.0
    unread = {VISION, MTP} | (set() if what == TARGET and "head" not in groups else {EMBEDDING})
    read = {name: group.bytes for name, group in groups.items() if name not in unread}
    return groups, sum(round(nbytes * share) if name == EXPERTS else nbytes for name, nbytes in read.items())


def _inspect_gguf(path: Path, files: list[Path]) -> Inspection:
    parts, questions = [read_gguf(file) for file in files if file.exists()], []
    tensors = {name: info for part in parts for name, info in part.tensors.items()}
    heads = tuple(f"blk.{i}." for i in blocks(tensors)[1])
    sizes = {f"{'mtp.' * name.startswith(heads)}{name}": info.end - info.start for name, info in tensors.items()}
    config, geometry = {}, {}
    with _asked(questions):
        _, config = planned(read_parts(files))
        geometry = _sizes(config, config["model_type"] in MODEL_TYPES) | ({"mtp": True} if heads else {})
        with tokenizer_files(path):
            pass
    kind = str(parts[0].metadata.get("general.architecture")) if parts else "unknown"
    form = f"GGUF, {', '.join(sorted({info.kind for info in tensors.values()}))}"
    groups, nbytes = _groups(sizes, config, TARGET)
    return Inspection(str(path), TARGET, kind, form, len(files), nbytes, groups, geometry, questions)
