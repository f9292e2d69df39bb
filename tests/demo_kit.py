"""The demo pair's geometry and tokenizer with random weights, as a model directory."""

import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

import specmlx.demo
from specmlx.drafters.checkpoint import build
from specmlx.drafters.config import DrafterConfig

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from make_demo.pair import TARGET_CONFIG, new_target  # noqa: E402

TOKENIZER = Path(specmlx.demo.__file__).parent / "target"
DRAFTER = {
    "hidden_size": TARGET_CONFIG["hidden_size"],
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": TARGET_CONFIG["vocab_size"],
    "num_target_layers": TARGET_CONFIG["num_hidden_layers"],
    "rope_theta": 10000.0,
    "block_size": 4,
}
TAPS = {"mask_token_id": 3, "target_layer_ids": [1, 5]}
DFLASH = DRAFTER | {"architectures": ["DFlashDraftModel"], "dflash_config": TAPS}
DSPARK = DRAFTER | {
    "architectures": ["Qwen3DSparkModel"],
    "markov_rank": 8,
    "enable_confidence_head": True,
    "dflash_config": TAPS | {"projector_type": "dspark"},
}

# Five tokens and the end: a random target and a random drafter then agree often, yet not always.
BIAS = json.dumps({50: 30, 60: 30, 70: 30, 80: 30, 90: 30, 2: 27})
OFTEN = ["--temp", "1", "--seed", "3", "--logit-bias", BIAS]


def write_model(directory: Path, **changes) -> Path:
    """A target in float32 with its drafters in dflash/ and dspark/, of which the config names the latter."""
    target = new_target()
    config = TARGET_CONFIG | {"draft_model": "dspark"} | changes
    write(directory, config, target)
    for file in TOKENIZER.glob("*.json"):
        if file.name != "config.json":
            shutil.copy(file, directory)
    for name, drafter in (("dflash", DFLASH), ("dspark", DSPARK)):
        mx.random.seed(7)
        write(directory / name, drafter, build(DrafterConfig.from_dict(drafter), target).model)
    return directory


def write(directory: Path, config: dict, model) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
