"""Makes rope/expected.json: the frequencies that transformers reads from config.json in many forms.

Run once, with `pip install torch transformers`, from the repository root:

    python tests/goldens/make_rope_goldens.py

Each entry holds the fields of config.json, `rope_parameters` after transformers has completed them, `inv_freq` and
`attention_scaling` of Qwen3.5's rotary embedding (heads of 32), `null` where transformers refuses to make one.
"""

import json
from pathlib import Path

from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextConfig, Qwen3_5TextRotaryEmbedding

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 4096}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN = DEFAULT | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = YARN | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def without(rope, *names):
    return {name: value for name, value in rope.items() if name not in names}


FORMS = {
    "nothing": {},
    "rope_parameters": {"rope_parameters": DEFAULT},
    "null and empty": {"rope_parameters": None, "rope_scaling": {}},
    "at the top": {"rope_theta": 2e4, "partial_rotary_factor": 0.5},
    "at the top, null beside": {"rope_theta": 2e4, "partial_rotary_factor": 0.5, "rope_parameters": None},
    "theta only": {"rope_parameters": {"rope_theta": 5e5}},
    "share only": {"rope_parameters": {"partial_rotary_factor": 0.75}},
    "share beside": {"rope_parameters": without(DEFAULT, "partial_rotary_factor"), "partial_rotary_factor": 0.5},
    "theta beside": {"rope_parameters": without(YARN, "rope_theta"), "rope_theta": 3e4},
    "inner counts first": {"rope_parameters": DEFAULT, "rope_theta": 7.0, "partial_rotary_factor": 1.0},
    "type": {"rope_parameters": without(YARN, "rope_type") | {"type": "yarn"}},
    "type beside rope_type": {"rope_parameters": YARN | {"type": "default"}},
    "rope_scaling": {"rope_scaling": YARN},
    "rope_scaling of old": {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    },
    "rope_scaling beside rope_parameters": {"rope_parameters": DEFAULT, "rope_scaling": YARN},
    "rope_scaling stands alone": {
        "rope_parameters": DEFAULT | {"rope_theta": 9e4},
        "rope_scaling": {"type": "default"},
    },
    "mrope's sections": {"rope_parameters": DEFAULT | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}},
    "linear": {"rope_parameters": DEFAULT | {"rope_type": "linear", "factor": 3.0}},
    "dynamic": {"rope_parameters": DEFAULT | {"rope_type": "dynamic", "factor": 2.0}},
    "proportional": {"rope_parameters": DEFAULT | {"rope_type": "proportional"}},
    "proportional, slower": {"rope_parameters": DEFAULT | {"rope_type": "proportional", "factor": 2.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "llama3, original at the top": {"rope_parameters": LLAMA3, "original_max_position_embeddings": 128},
    "yarn": {"rope_parameters": YARN},
    "yarn, whole head": {"rope_parameters": YARN | {"partial_rotary_factor": 1.0}},
    "yarn, original at the top": {"rope_parameters": YARN, "original_max_position_embeddings": 1024},
    "yarn, no original": {"rope_parameters": without(YARN, "original_max_position_embeddings")},
    "yarn, factor by positions": {"rope_parameters": YARN | {"factor": None}},
    "yarn, attention_factor": {"rope_parameters": YARN | {"attention_factor": 1.5}},
    "yarn, mscales": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    "yarn, mscale alone": {"rope_parameters": YARN | {"mscale": 0.7}},
    "yarn, mscale_all_dim 0": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0}},
    "yarn, attention_factor first": {
        "rope_parameters": YARN | {"attention_factor": 1.1, "mscale": 0.7, "mscale_all_dim": 1.2}
    },
    "yarn, betas": {"rope_parameters": YARN | {"beta_fast": 16, "beta_slow": 2}},
    "yarn, betas null": {"rope_parameters": YARN | {"beta_fast": None, "beta_slow": None}},
    "yarn, betas equal": {"rope_parameters": YARN | {"beta_fast": 4, "beta_slow": 4, "truncate": False}},
    "yarn, not truncated": {"rope_parameters": YARN | {"truncate": False}},
    "yarn, factor 1": {"rope_parameters": YARN | {"factor": 1.0}},
}


def read(form: dict) -> dict:
    config = Qwen3_5TextConfig(**SIZES, **json.loads(json.dumps(form)))
    rotary = Qwen3_5TextRotaryEmbedding(config)
    return {
        "config": form,
        "rope_parameters": config.rope_parameters,
        "inv_freq": rotary.inv_freq.tolist(),
        "attention_scaling": rotary.attention_scaling,
    }


if __name__ == "__main__":
    lines = [f"  {json.dumps(name)}: {json.dumps(read(form))}" for name, form in FORMS.items()]
    Path("tests/goldens/rope/expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
