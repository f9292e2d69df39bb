"""Makes gemma4/: two tiny random DSpark drafters for Gemma 4 targets, and what DeepSpec's code makes of them.

Run once, with `pip install torch transformers==5.8.0 safetensors` (DeepSpec's code does not run with
later ones) and a clone of github.com/deepseek-ai/DeepSpec (afdfa7c was used) on PYTHONPATH, from the repository root:

    PYTHONPATH=../DeepSpec python tests/goldens/make_gemma4_goldens.py

NAME/config.json and NAME/model.safetensors (float16) are files as DeepSpec saves them, frozen copies of the target's
embedding and head included. `expected.safetensors` holds taps `features` [N, F], `rows` [rounds], `anchors` [rounds],
and for each drafter logits [rounds, block, V], tokens [rounds, block] and confidence [rounds, block].
"""

import json
from pathlib import Path

import torch
from deepspec.modeling.dspark.gemma4.modeling import Gemma4DSparkModel
from dspark_blocks import draft
from safetensors.torch import save_file
from transformers import Gemma4TextConfig

HIDDEN, VOCAB, MASK, TAPS = 32, 64, 60, [1, 4]
ROWS = [5, 1, 2, 7]
S, F = "sliding_attention", "full_attention"
CONFIG = dict(
    architectures=["Gemma4DSparkModel"],
    model_type="gemma4_text",
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    global_head_dim=16,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    attention_bias=False,
    num_kv_shared_layers=0,
    use_double_wide_mlp=False,
    enable_moe_block=False,
    hidden_size_per_layer_input=0,
    hidden_activation="gelu_pytorch_tanh",
    final_logit_softcapping=4.0,
    rms_norm_eps=1e-6,
    vocab_size=VOCAB,
    max_position_embeddings=512,
    sliding_window=16,
    layer_types=[F, F],
    rope_parameters={
        F: dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=100.0),
        S: dict(rope_type="default", rope_theta=1e4),
    },
    tie_word_embeddings=False,
    target_model_type="gemma4",
    num_target_layers=6,
    target_layer_ids=TAPS,
    mask_token_id=MASK,
    block_size=7,
    num_anchors=4,
    markov_rank=8,
    markov_head_type="vanilla",
    enable_confidence_head=True,
    confidence_head_with_markov=True,
)
CASES = {
    "shared": CONFIG,
    "values": dict(CONFIG, attention_k_eq_v=False, attention_bias=True, final_logit_softcapping=None),
}


def random_model(config: dict) -> Gemma4DSparkModel:
    """With weights that float16 holds, large enough that every one of them matters."""
    model = Gemma4DSparkModel(Gemma4TextConfig(**config, attn_implementation="sdpa"))
    weights = {}
    for name, value in sorted(model.state_dict().items()):
        normal = torch.randn(value.shape)
        if "norm" in name or "scalar" in name:
            value = 1 + 0.2 * normal
        elif name.startswith("markov") or name.endswith("bias"):
            value = 0.7 * normal
        elif name.startswith("embed"):
            value = 0.2 * normal
        else:
            value = 1.5 * normal / value.shape[-1] ** 0.5
        weights[name] = value.half().float()
    model.load_state_dict(weights)
    return model.float().eval()


def main():
    out = Path(__file__).parent / "gemma4"
    expected = {"features": FEATURES, "rows": torch.tensor(ROWS).int(), "anchors": ANCHORS.int()}
    for name, config in CASES.items():
        model = random_model(config)
        found = draft(model, FEATURES, ROWS, ANCHORS.tolist(), MASK)
        expected |= {f"{name}.{what}": value for what, value in found.items()}
        (out / name).mkdir(parents=True, exist_ok=True)
        weights = {key: value.half().contiguous() for key, value in model.state_dict().items()}
        save_file(weights, out / name / "model.safetensors")
        (out / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(expected, out / "expected.safetensors")


if __name__ == "__main__":
    torch.manual_seed(0)
    FEATURES = torch.randn(sum(ROWS), len(TAPS) * HIDDEN).half()
    ANCHORS = torch.randint(0, MASK, (len(ROWS),))
    with torch.no_grad():
        main()
