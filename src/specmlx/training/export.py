"""A trained drafter in the packaging that another engine reads: its config.json, bfloat16 tensors by its names."""

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from specmlx.drafters.base import logits_of
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.config import DFLASH, DFLASH2, DSPARK, DrafterConfig
from specmlx.drafters.packaging import SCALES
from specmlx.drafters.written import publishers_config, speculators_config
from specmlx.formats.atomic import write_atomically
from specmlx.formats.checkpoint import read_config, safetensors
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.hybrid import Model

ZLAB, DEEPSPEC, SPECULATORS = "zlab", "deepspec", "speculators"
PACKAGINGS = {ZLAB: (DFLASH, DFLASH2), DEEPSPEC: (DSPARK,), SPECULATORS: (DFLASH, DFLASH2, DSPARK)}


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
    config = publishers_config(drafter.config, anchors)
    if packaging == DEEPSPEC:
        # Dense, whatever they are packed in.
        eye = mx.eye(target.config.hidden_size, dtype=target.dtype)
        weights["embed_tokens.weight"] = target.embed_tokens(mx.arange(target.config.vocab_size))
        weights["lm_head.weight"] = logits_of(target.head, eye).T
    elif packaging == SPECULATORS:
        architectures = [] if target.directory is None else read_config(target.directory).get("architectures", [])
        config = speculators_config(drafter.config, verifier, architectures)
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: x.astype(mx.bfloat16) for name, x in weights.items()}
    # "pt": transformers refuses files that don't say so or "mlx".
    write_atomically(out / "model.safetensors", safetensors(weights, {"format": "pt"}))
    write_atomically(out / "config.json", json.dumps(config, indent=2) + "\n")
