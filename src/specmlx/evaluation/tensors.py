"""The tensors of a target and a drafter in groups, by one set of rules for arrays in memory and for shapes."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import mlx.nn as nn
from mlx.utils import tree_flatten

from specmlx.drafters.block import BlockTrunk
from specmlx.drafters.config import DFLASH2, DSPARK, DrafterConfig
from specmlx.drafters.dflash2 import DFlash2Trunk
from specmlx.drafters.dspark import DSparkTrunk
from specmlx.formats.sizes import FORMATS, Format, affine, format_named
from specmlx.targets.config import HybridConfig
from specmlx.targets.hybrid import Model

BF16, FP32 = FORMATS["bf16"], FORMATS["fp32"]
MODELOPT = "modelopt-nvfp4"
Tensor = tuple[tuple[int, ...], Format]


class Rule(NamedTuple):
    """A group of the tensors whose path a regular expression finds.

    name: in a generation's account. label, kind: in a roofline; the label is the name without one.
    format: the field of `Scheme`; bfloat16 without one. rows, reads: see `Group`.
    """

    pattern: str
    name: str
    label: str = ""
    kind: str = "draft"
    format: str = ""
    rows: str = ""
    reads: int = 1


EMBEDDING, HEAD, EXPERTS = "token embedding", "LM head", "experts, at most"
_GDN, _FULL, _MLP = "GDN projections", "attention projections", "MLP gate/up/down"
_IN = "attention in-projection q, gate, k, v"
_TABLE = r"(embed_tokens|wte|word_embeddings|tok_embeddings)\."
# In the order in which tables show them.
TARGET = (
    Rule(r"linear_attn\.in_proj_", "GDN in-projection", "", _GDN, "mixer", "verify"),
    Rule(r"linear_attn\.out_proj\.", "GDN out-projection", "", _GDN, "mixer", "verify"),
    Rule(r"self_attn\.[qkv]_proj\.", "attention in-projection", _IN, _FULL, "mixer", "verify"),
    Rule(r"self_attn\.o_proj\.", "attention out-projection", "", _FULL, "mixer", "verify"),
    Rule(r"\.mlp\.(?!switch_mlp|shared_expert|gate\.)", "MLP", "SwiGLU gate, up, down", _MLP, "mlp", "verify"),
    Rule(r"\.switch_mlp\.", EXPERTS, "experts", "experts", "mlp", "verify"),
    Rule(r"\.shared_expert\.", "MLP", "shared expert gate, up, down", _MLP, "mlp", "verify"),
    Rule(r"\.mlp\.", "MLP", "router and shared gate", "router", "router", "verify"),
    Rule(rf"^(?!.*(lm_head\.|{_TABLE}))", "norms, conv taps, others", "norms, conv taps, decays, time biases", "small"),
    Rule(r"lm_head\.", HEAD, "", "vocabulary head", "head", "verify"),
    Rule(_TABLE, EMBEDDING, "token embedding (a gather)", "token embedding", "embedding", reads=0),
)
_TIED = Rule(_TABLE, HEAD, "LM head and token embedding, tied", "vocabulary head", "head", "verify")

TABLES, MARKOV, GATES, HEADS = "gathered tables", "Markov W2", "Markov gates", "draft head"
CONTEXT, KEYS, LAYERS = "draft context projection", "draft keys and values", "draft layers"
DRAFTER = (
    Rule(r"self_attn\.[kv]_proj\.", KEYS, LAYERS, format="drafter", rows="block"),
    Rule(r"layers\.\d+\.(?!.*(norm|base_kernel))", LAYERS, format="drafter", rows="block"),
    Rule(r"(^|\.)fc\.", CONTEXT, format="drafter", rows="verify"),
    Rule(r"_codebook", TABLES, "selector codebooks, bf16"),
    Rule(r"hidden_projection\.", LAYERS, "selector projection", format="drafter", rows="block"),
    Rule(r"markov_w2\.", MARKOV, format="drafter", rows="slots"),
    Rule(r"markov_w1\.", TABLES, "Markov W1, bf16 (a gather)", reads=0),
    Rule(r"markov_head\.", GATES, format="drafter", rows="slots"),
    Rule(r"confidence_head\.", LAYERS, "confidence head", rows="block"),
    Rule(r"lm_head\.", HEADS),
    Rule(r"embed_tokens\.", TABLES),
    Rule(r"", LAYERS, "draft norms and kernels"),
)


@dataclass(frozen=True)
class Part:
    """`count` times the same tensors."""

    tensors: tuple[Tensor, ...]
    count: int = 1
    label: str = ""

    @property
    def parameters(self) -> int:
        """Of one."""
        return sum(prod(shape) for shape, _ in self.tensors)

    @property
    def nbytes(self) -> int:
        """Of one."""
        return sum(fmt.nbytes(shape) for shape, fmt in self.tensors)


@dataclass(frozen=True)
class Group:
    """Tensors of one kind.

    reads: how often a round reads them; 0 where single rows are gathered.
    rows: which rows they are multiplied with: the verify pass's ("verify"), the drafter's block ("block"), the drafted
        slots ("slots"), or none ("").
    share: the part that one row chooses of a mixture's experts, 1 for all other tensors.
    """

    label: str
    shape: str
    parts: tuple[Part, ...]
    kind: str
    reads: int = 1
    rows: str = "verify"
    share: float = 1.0

    @property
    def parameters(self) -> int:
        return sum(part.parameters * part.count for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes * part.count for part in self.parts)

    def read(self, rows: int = 1) -> int:
        """Bytes that a round reads; of a mixture's experts as many as so many rows can choose, at most."""
        return round(self.nbytes * self.reads * min(1.0, rows * self.share))


@dataclass(frozen=True)
class Scheme:
    """Which format each kind of tensor is in.

    small: the GDN's a and b projections. gated_norm: of the GDN's output. drafter: its matrices.
    """

    name: str
    mlp: Format
    mixer: Format
    small: Format
    head: Format
    embedding: Format
    drafter: Format
    gated_norm: Format = BF16

    @property
    def router(self) -> Format:
        """Of a mixture's router and shared gate, which are kept finer: mlx-lm leaves them 8 bits."""
        return affine(8) if self.mlp.name.startswith("affine") else self.small

    @property
    def mixed(self) -> bool:
        return len({fmt.name for fmt in (self.mlp, self.mixer, self.small, self.head, self.embedding)}) > 1

    def format_of(self, rule: Rule, path: str, shape: Sequence[int]) -> Format:
        """The format of a tensor that a rule has found."""
        if path.endswith(("A_log", "dt_bias")):
            return FP32
        if "linear_attn.norm" in path:
            return self.gated_norm
        if re.search(r"in_proj_(a|b|ba)\.", path):
            return self.small
        return getattr(self, rule.format) if rule.format and len(shape) > 1 else BF16


def scheme_named(name: str) -> Scheme:
    """One format for all matrices, or ModelOpt's mix: MLP and head NVFP4, projections FP8, the rest bfloat16.

    Qwen publishes the gated norms in float32 (3.5), and ModelOpt leaves them. Raises ValueError for an unknown name.
    """
    if name == MODELOPT:
        nvfp4, fp8 = FORMATS["nvfp4"], FORMATS["fp8"]
        return Scheme(name, nvfp4, fp8, BF16, nvfp4, BF16, nvfp4, gated_norm=FP32)
    fmt = format_named(name, [MODELOPT])
    return Scheme(fmt.name, *6 * [fmt])


def rule_of(path: str, rules: Sequence[Rule]) -> Rule:
    """The first rule that finds a path."""
    return next(rule for rule in rules if re.search(rule.pattern, path))


def target_groups(config: HybridConfig, scheme: Scheme, pad_rows: int = 1) -> list[Group]:
    """A hybrid's tensors; `pad_rows`: a GDN layer's packed input rows are padded to a multiple of it."""
    rules = (*TARGET[:-2], _TIED) if config.tie_word_embeddings else TARGET
    groups = _groups(Model(config), rules, scheme)
    for i, group in enumerate(groups):
        if group.kind == "experts":
            chosen, experts = config.num_experts_per_tok, config.num_experts
            groups[i] = replace(group, label=f"experts, {chosen} of {experts} a row", share=chosen / experts)
    inputs, (part,) = groups[0], groups[0].parts
    rows, columns = sum(shape[0] for shape, _ in part.tensors), config.hidden_size
    if padding := -rows % pad_rows:
        label = f"{inputs.label} ({rows:,} rows padded to {rows + padding:,})"
        tensors = (*part.tensors, ((padding, columns), scheme.mixer))
        shape = f"{rows + padding} × {columns}"
        groups[0] = replace(inputs, label=label, shape=shape, parts=(replace(part, tensors=tensors),))
    return groups


def draft_groups(config: DrafterConfig, fmt: Format) -> list[Group]:
    """A block drafter's own tensors without an embedding or a head: it runs the target's.

    Codebooks, vectors and the Markov head's gathered table are bfloat16, as published.
    """
    config = replace(config, own_embedding=False, own_head=False, quantization=None)
    trunk = {DFLASH2: DFlash2Trunk, DSPARK: DSparkTrunk}.get(config.kind, BlockTrunk)(config)
    name = {DFLASH2: "DFlash 2", DSPARK: "DSpark"}.get(config.kind, "DFlash")
    heads, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    two = config.kind == DFLASH2
    dynamic = f"dynamic {2 * config.conv_kernel_size * config.hidden_size // config.conv_group_size}, " if two else ""
    layers, *others = _groups(trunk, DRAFTER, Scheme("", *6 * [fmt]))
    label = f"{name} draft, {config.num_hidden_layers} layers"
    shape = f"qkv {heads + 2 * kv}, {dynamic}attention {heads}, SwiGLU {config.intermediate_size}"
    slots = [replace(group, reads=config.max_width) if group.rows == "slots" else group for group in others]
    return [replace(layers, label=label, shape=shape), *slots]


def _groups(module: nn.Module, rules: Sequence[Rule], scheme: Scheme) -> list[Group]:
    """The groups of a module's tensors in the order of the rules. mlx is lazy: no array is evaluated."""
    found: dict[str, dict[str, list[tuple[str, Tensor]]]] = defaultdict(lambda: defaultdict(list))
    for path, array in tree_flatten(module.parameters()):
        rule, layer = rule_of(path, rules), re.search(r"layers\.\d+", path)
        tensor = tuple(array.shape), scheme.format_of(rule, path, array.shape)
        found[rule.label or rule.name][layer[0] if layer else path].append((path, tensor))
    groups = []
    for label, rule in {rule.label or rule.name: rule for rule in reversed(rules)}.items():
        if label not in found:
            continue
        units = found[label].values()
        counts = Counter((tuple(tensor for _, tensor in unit), _mixer(unit)) for unit in units)
        parts = tuple(Part(tensors, count, mixer) for (tensors, mixer), count in counts.most_common())
        # Equal tensors outside the layers stand side by side.
        layered = any("layers." in path for unit in units for path, _ in unit)
        shapes = [shape for shape, _ in parts[0].tensors if len(shape) > 1] * (1 if layered else parts[0].count)
        groups.append(Group(label, _shape(label, shapes), parts, rule.kind, rule.reads, rule.rows))
    return groups[::-1]


def _mixer(unit: Sequence[tuple[str, Tensor]]) -> str:
    paths = "".join(path for path, _ in unit)
    return "GDN" if "linear_attn" in paths else "attention" if "self_attn" in paths else ""


def _shape(label: str, shapes: Sequence[tuple[int, ...]]) -> str:
    """Like "2 × (17408 × 5120), 5120 × 17408"; of projections that are packed to one, that one's."""
    if "norms" in label:
        return "vectors"
    if "in-projection" in label:
        return f"{sum(shape[0] for shape in shapes)} × {shapes[0][-1]}"
    texts = []
    for shape in dict.fromkeys(shapes):
        one, n = f"{shape[-2]} × {shape[-1]}", shapes.count(shape)
        texts.append(one if n == 1 else f"{n} × ({one})")
    text = ", ".join(texts)
    return f"{shapes[0][0]} × ({text})" if len(shapes[0]) > 2 else text
