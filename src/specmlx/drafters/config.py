"""What a drafter's config.json says, whichever publisher wrote it."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from specmlx.drafters.packaging import GEMMA4_DSPARK, SELECTOR, gemma4_words, unpacked
from specmlx.formats.config import MOST, read, read_field, shown
from specmlx.formats.rope import max_positions, rope_parameters, rotary_dims

DFLASH, DFLASH2, DSPARK = "dflash", "dflash2", "dspark"
QWEN3, QWEN35, GEMMA4 = "qwen3", "qwen3_5", "gemma4"
QWEN35_DSPARK = ["Qwen35DSparkModel"]
SLIDING, FULL = "sliding_attention", "full_attention"
DSPARK_NAMES = (["Qwen3DSparkModel"], QWEN35_DSPARK, GEMMA4_DSPARK, ["DSparkDraftModel"], ["Lfm2DSparkDraftModel"])
# How mlx names its own; the others are told by the tensors (see `formats.scaled`).
QUANTIZATIONS = ("modelopt", "compressed-tensors", "fp8", "nvfp4")


def _given(default: Any = MISSING, **bounds: float | None) -> Any:
    """A field that a config.json has as it is, a number within `bounds` (see `formats.config.read`)."""
    return field(default=default, metadata=bounds or {"least": None})


def _size(default: Any = MISSING, most: int = MOST) -> Any:
    return _given(default, above=0, most=most)


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash (arXiv 2602.06036), DFlash 2 or DSpark (arXiv 2607.05147) drafter, with the publishers' names.

    target_layer_ids: 0-based layers of the target whose OUTPUT is tapped (hidden_states[i + 1] elsewhere).
    block_size: rows that the drafter runs.
    sample_from_anchor: whether a row proposes the token after it (DSpark), or, but for the anchor's, its own (DFlash).
    windows: each layer's sliding window, None where it attends to everything.
    family: whose layers it has: Qwen 3's, Qwen 3.5's (norms in its files are w - 1) or Gemma 4's.
    gated_attention: whether queries come with a gate of the attention's output, head by head (Qwen 3.5).
    rope_dims: how much of a head the rope turns, None for all of it (Qwen 3.5).
    attention_k_eq_v: whether values are the keys' projection (Gemma 4).
    draft_vocab_size: rows of the drafter's own head, where it has one: fewer than vocab_size for a reduced vocabulary.
    frozen_copies: whether the tables in its files are the target's own (deepseek-ai).
    own_embedding, own_head: whether it has these tables itself; its embedding is then the head too, where it has none.
    confidence_temperatures: what each slot's confidence logit is divided by.
    """

    kind: str
    hidden_size: int = _size()
    intermediate_size: int = _size()
    num_hidden_layers: int = _size(most=1_000)
    num_attention_heads: int = _size()
    num_key_value_heads: int = _size()
    head_dim: int = _size()
    vocab_size: int = _size()
    block_size: int = _size()
    mask_token_id: int = _given()
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    rope_theta: float
    sample_from_anchor: bool = _given()
    rms_norm_eps: float = _given(1e-6, above=0)
    num_target_layers: int | None = _given(None, above=0)
    is_causal: bool | None = _given(None)
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    max_position_embeddings: int | None = None
    rope_is_neox_style: bool = _given(True)
    attention_bias: bool = _given(False)
    family: str = QWEN3
    gated_attention: bool = False
    rope_dims: int | None = None
    attention_k_eq_v: bool = False
    draft_vocab_size: int | None = _size(None)
    frozen_copies: bool = False
    own_embedding: bool = False
    own_head: bool = False
    input_embedding_scale: float = _given(1.0)
    output_multiplier: float = _given(1.0)
    final_logit_softcapping: float | None = _given(None, least=0)
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    markov_rank: int = 0
    markov_head_type: str = _given("vanilla")
    enable_confidence_head: bool | None = _given(None)
    confidence_head_with_markov: bool = _given(True)
    confidence_temperatures: tuple[float, ...] | None = None
    quantization: dict[str, Any] | None = _given(None)

    @property
    def max_width(self) -> int:
        """γ, the tokens of a whole proposal: DFlash block - 1, DSpark block."""
        return self.block_size - self.first_row

    @property
    def first_row(self) -> int:
        """The first row of the block that proposes a token."""
        return 0 if self.sample_from_anchor else 1

    def causal(self, window: int | None) -> bool:
        """Whether the block's rows see only the rows before them, in layers with this window.

        A config's own word (top-level is_causal, else dflash_config.causal) stands for all layers; without
        one, sliding layers are causal and full ones bidirectional, as z-lab's code and vLLM have it.
        """
        return window is not None if self.is_causal is None else self.is_causal

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "DrafterConfig":
        """Read a config.json. Raises ValueError, one line, for what is incomplete or not supported."""
        config = gemma4_words(unpacked(config))
        kind, names = kind_of(config), config.get("architectures")
        family = QWEN35 if names == QWEN35_DSPARK else GEMMA4 if names == GEMMA4_DSPARK else QWEN3
        nested = read(config, "dflash_config", dict, {}) or read(config, "dspark_config", dict, {})
        both = {name: value for part in (config, nested) for name, value in part.items() if value is not None}
        _refuse_variations(both, family)
        hidden, heads = (read(both, name, int, above=0) for name in ("hidden_size", "num_attention_heads"))
        defaults = {
            "num_key_value_heads": heads,
            "head_dim": hidden // heads,
            "draft_vocab_size": both.get("vocab_size"),
            "block_size": None if kind == DSPARK else 16,
            "sample_from_anchor": kind == DSPARK,
            "is_causal": nested.get("causal"),
            "enable_confidence_head": None if kind == DSPARK else False,
        }
        both = defaults | both
        found = {each.name: read_field(both, each, **each.metadata) for each in fields(cls) if each.metadata}
        needed = {DFLASH2: SELECTOR, DSPARK: ("markov_rank",)}.get(kind, ())
        found |= {name: read(both, name, int, above=0, most=MOST) for name in needed}
        found |= {name: float(found[name]) for name in ("input_embedding_scale", "output_multiplier")}
        layers, vocab, block = (found[name] for name in ("num_hidden_layers", "vocab_size", "block_size"))
        if heads % (kv_heads := found["num_key_value_heads"]):
            raise ValueError(f"num_attention_heads ({heads}) is no multiple of num_key_value_heads ({kv_heads})")
        if kind == DFLASH2 and hidden % (group := found["conv_group_size"]):
            raise ValueError(f"conv_group_size is {group}: it must divide hidden_size {hidden}")
        if kind == DFLASH2 and (k := found["selector_top_k"]) > vocab:
            raise ValueError(f"selector_top_k is {k}: the vocabulary has {vocab}")
        if (slots := block if found["sample_from_anchor"] else block - 1) < 1:
            raise ValueError(f"block_size {block} is too small: it proposes block_size - 1 tokens")
        if (head := found["markov_head_type"]) not in ("vanilla", "gated", "rnn"):
            raise ValueError(f"markov_head_type is {shown(head)}: specmlx knows vanilla, gated, rnn")
        temperatures = read(both, "confidence_temperatures", [float], None, above=0)
        if temperatures is not None and len(temperatures) < slots:
            raise ValueError(f"confidence_temperatures has {len(temperatures)} numbers: there are {slots} slots")
        rope, head_dim = rope_parameters(config), found["head_dim"]
        # Only Qwen 3.5's own kind turns a part of a head: copies of its target's config say it too.
        dims = rotary_dims(rope, head_dim) if family == QWEN35 else head_dim
        return cls(
            **found | {"final_logit_softcapping": found["final_logit_softcapping"] or None},
            kind=kind,
            family=family,
            target_layer_ids=_taps(both, kind, found["num_target_layers"], layers),
            windows=_windows(config, layers),
            rope_theta=float(rope["rope_theta"]),
            rope_scaling=rope,
            max_position_embeddings=max_positions(config),
            frozen_copies=names in (["Qwen3DSparkModel"], GEMMA4_DSPARK),
            gated_attention=read(both, "enable_qwen35_gated_q_proj", bool, False),
            rope_dims=None if dims == head_dim else dims,
            attention_k_eq_v=family == GEMMA4 and read(config, "attention_k_eq_v", bool, False),
            confidence_temperatures=temperatures and tuple(map(float, temperatures[:slots])),
        )


def kind_of(config: dict[str, Any]) -> str:
    """The drafter's kind: DFLASH, DFLASH2 or DSPARK. Raises ValueError, one line, naming what it is instead."""
    nested = read(config, "dflash_config", dict, {})
    names = read(config, "architectures", [str], [])
    if names == ["DFlash2DraftModel"] or (not names and "selector_rank" in nested):
        return DFLASH2
    if "block_size" not in config and any(key.startswith("dspark_") for key in config):
        raise ValueError("this is a language model with a DSpark head inside, no drafter: not supported yet")
    projector = read(nested, "projector_type", str, None)
    if projector == "dspark" or "dspark_config" in config or (projector is None and names in DSPARK_NAMES):
        return DSPARK
    if names == ["DFlashDraftModel"] and ("selector_rank" in nested or "conv_kernel_size" in nested):
        raise ValueError("architectures is DFlashDraftModel but dflash_config has DFlash 2's keys: which is it?")
    if projector is None and (names == ["DFlashDraftModel"] or (not names and "target_layer_ids" in nested)):
        return DFLASH
    if is_language_model(config):
        what = names[0] if names else config.get("model_type")
        raise ValueError(f"{str(what)[:60]} is a language model: it drafts by tokens alone, not by the target's layers")
    what = f"projector_type {shown(projector)}" if projector else f"architectures {shown(names)}"
    raise ValueError(f"unknown kind of drafter ({what}): specmlx loads DFlash, DFlash 2 and DSpark")


def is_language_model(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a whole language model."""
    names = config.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    whole = any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration")) for name in names)
    bare = not names and "dflash_config" not in config and "num_hidden_layers" in config
    return whole or bare or "text_config" in config


def default_taps(num_target_layers: int, count: int) -> list[int]:
    """The taps of a DFlash config that names none: evenly spaced, from layer 1 on (z-lab)."""
    if count == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]


def _taps(config: dict[str, Any], kind: str, depth: int | None, layers: int) -> tuple[int, ...]:
    taps = default_taps(depth, layers) if kind != DSPARK and depth is not None else []
    if not (taps := read(config, "target_layer_ids", [int], taps)):
        raise ValueError(f"target_layer_ids is {taps}: it must be a list of layers, which the target's features are of")
    return tuple(taps)


def _windows(config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    window, sliding = read(config, "sliding_window", int, None, least=0), read(config, "use_sliding_window", bool, None)
    if (types := read(config, "layer_types", [str], None)) is None:
        # transformers' Qwen3Config: layers from max_window_layers on slide, if sliding is on at all.
        first = read(config, "max_window_layers", int, 28, least=0) if sliding and window else layers
        types = [SLIDING if i >= first else FULL for i in range(layers)]
    if len(types) != layers:
        raise ValueError(f"layer_types names {len(types)} layers but num_hidden_layers is {layers}")
    if unknown := sorted(set(types) - {SLIDING, FULL}):
        raise ValueError(f"layer_types has {shown(unknown)}: a drafter's layers are {SLIDING!r} or {FULL!r}")
    if SLIDING in types and (not window or window < 2 or sliding is False):
        found = f"sliding_window {window!r}, use_sliding_window {sliding!r}"
        raise ValueError(f"layer_types has {SLIDING!r} but config.json turns no window on ({found})")
    return tuple(window if kind == SLIDING else None for kind in types)


def _refuse_variations(config: dict[str, Any], family: str) -> None:
    # Maths that we don't compute must not be passed over: the text would stay right, only acceptance falls.
    scale, act = read(config, "attention_value_scale", float, 1), read(config, "hidden_act", str, "silu")
    other = {} if "quantization" in config else read(config, "quantization_config", dict, {})
    method = read(other, "quant_method", str) if other else None
    variations = {
        "attention_sink_bias": config.get("attention_sink_bias"),
        f"attention_value_scale {scale}": scale != 1,
        "dflash_config.use_swa": config.get("use_swa"),
        "gated attention (enable_qwen35_gated_q_proj)": family != QWEN35 and config.get("enable_qwen35_gated_q_proj"),
        "log_snr_conditioning": config.get("log_snr_conditioning"),
        f"hidden_act {shown(act)}": act != "silu",
        f"quantization_config {shown(method)}": other and method.lower() not in QUANTIZATIONS,
    }
    if refused := [what for what, found in variations.items() if found]:
        raise ValueError(f"this drafter uses {', '.join(refused)}: not supported yet")
