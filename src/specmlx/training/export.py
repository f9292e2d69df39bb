"""A trained drafter in the packaging that another engine reads: its config.json, bfloat16 tensors by its names."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.config import DFLASH, DFLASH2, DSPARK, FULL, SLIDING, DrafterConfig
from specmlx.drafters.packaging import ARCHITECTURES, HEADS, SCALES, SELECTOR
from specmlx.drafters.vocabulary import logits_of
from specmlx.formats.atomic import write_atomically
from specmlx.formats.checkpoint import read_config, save_atomically
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.hybrid import Model

ZLAB, DEEPSPEC, SPECULATORS = "zlab", "deepspec", "speculators"
PACKAGINGS = {ZLAB: (DFLASH, DFLASH2), DEEPSPEC: (DSPARK,), SPECULATORS: (DFLASH, DFLASH2, DSPARK)}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SIZES += ("head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings", "attention_bias")


def check_export(config: DrafterConfig, packaging: str) -> None:
    """Raise ValueError, one line, where a packaging has no place for such a drafter."""
    kinds, sliding = PACKAGINGS[packaging], any(config.windows)
    problems = {
        f"holds {' and '.join(kinds)} drafters": config.kind not in kinds,
        "holds no tables of the drafter's own": config.own_embedding or config.own_head,
        "has no word for interleaved rope": not config.rope_is_neox_style,
        "fixes which row of a block proposes first": config.sample_from_anchor != (config.kind == DSPARK),
        "has no word for causal blocks": packaging != ZLAB and config.is_causal,
        "has no word for windows": packaging == DEEPSPEC and sliding,
        "has no word for windows of several sizes": len({w for w in config.windows if w}) > 1,
        "has no word for scaled embeddings or logits": packaging != ZLAB
        and any(getattr(config, name) != DrafterConfig.__dataclass_fields__[name].default for name in SCALES),
        "has no word for confidence temperatures": packaging != SPECULATORS and config.confidence_temperatures,
    }
    if wrong := [what for what, found in problems.items() if found]:
        raise ValueError(f"--export {packaging} {wrong[0]}: leave it out for this {config.kind} drafter")


def export(
    drafter: BlockDrafter, target: Model | AnyLM, packaging: str, out: Path, *, anchors: int = 0, verifier: str = ""
) -> None:
    """Write config.json and model.safetensors to `out`, each atomically.

    zlab: dflash 0.1.0's form. deepspec: DeepSpec's, with bfloat16 copies of the target's tables; `anchors` is its
    num_anchors. speculators: the package's, whose tap ids count the embedding; `verifier` is the target's name.
    Raises ValueError as `check_export`.
    """
    check_export(drafter.config, packaging)
    weights = dict(tree_flatten(drafter.model.parameters()))
    if packaging == ZLAB:
        config = zlab_config(drafter.config)
    elif packaging == DEEPSPEC:
        config = _deepspec(drafter.config, anchors)
        weights |= _tables(target)
    else:
        config = _speculators(drafter.config, target, verifier)
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: x.astype(mx.bfloat16) for name, x in weights.items()}
    # "pt": transformers refuses files that don't say so or "mlx".
    save_atomically(out / "model.safetensors", weights, {"format": "pt"})
    write_atomically(out / "config.json", [(json.dumps(config, indent=2) + "\n").encode()])


def layers(config: DrafterConfig) -> dict[str, Any]:
    """The fields of transformers' Qwen3Config."""
    window = next((window for window in config.windows if window), None)
    rope = {"rope_type": "default", **config.rope_scaling, "rope_theta": config.rope_theta}
    return {
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in _SIZES if getattr(config, name) is not None},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_parameters": rope,
        "layer_types": [SLIDING if window else FULL for window in config.windows],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "tie_word_embeddings": False,
    }


def zlab_config(config: DrafterConfig) -> dict[str, Any]:
    """A config.json for a DFlash or DFlash 2 drafter as z-lab writes it."""
    nested = {"target_layer_ids": list(config.target_layer_ids), "mask_token_id": config.mask_token_id}
    nested |= {name: getattr(config, name) for name in SCALES if getattr(config, name) is not None}
    if config.kind == DFLASH2:
        nested |= {name: getattr(config, name) for name in SELECTOR}
    return {
        "architectures": [ARCHITECTURES[config.kind]],
        "dtype": "bfloat16",
        **layers(config),
        "rope_theta": config.rope_theta,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "is_causal": config.is_causal,
        "dflash_config": nested,
    }


def _deepspec(config: DrafterConfig, anchors: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        "dtype": "bfloat16",
        **layers(config),
        "rope_theta": config.rope_theta,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "num_anchors": anchors,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        **{name: getattr(config, name) for name in HEADS},
    }


def _speculators(config: DrafterConfig, target: Model | AnyLM, verifier: str) -> dict[str, Any]:
    names = {DFLASH: (), DFLASH2: SELECTOR, DSPARK: HEADS}[config.kind]
    temperatures = config.confidence_temperatures
    method = {"proposal_type": "greedy", "speculative_tokens": config.max_width, "verifier_accept_k": 1}
    architectures = [] if target.directory is None else read_config(target.directory).get("architectures", [])
    return {
        "architectures": [ARCHITECTURES[config.kind]],
        "dtype": "bfloat16",
        "speculators_model_type": config.kind,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": None,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": config.is_causal is False,
        **{name: getattr(config, name) for name in names},
        **({"confidence_temperatures": list(temperatures)} if temperatures else {}),
        "tie_word_embeddings": False,
        "transformer_layer_config": layers(config),
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**method, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }


def _tables(target: Model | AnyLM) -> dict[str, mx.array]:
    """The target's embedding and head `[V, D]`, dense whatever they are packed in."""
    ids = mx.arange(target.config.vocab_size)
    rows = mx.eye(target.config.hidden_size, dtype=target.dtype)
    return {"embed_tokens.weight": target.embed_tokens(ids), "lm_head.weight": logits_of(target.head, rows).T}
