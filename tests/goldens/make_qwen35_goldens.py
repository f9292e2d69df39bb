"""Makes qwen35/: a tiny random DSpark drafter of Qwen 3.5's layers (Qwen35DSparkModel), and mlx-dspark's logits.

Run once, with `pip install mlx-dspark==0.20.3`, from the repository root:

    python tests/goldens/make_qwen35_goldens.py

model.safetensors (float16) and config.json are files by the published keys: norms as w - 1, queries with their gates,
a table and a head of its own. `expected.safetensors` holds taps `features` [N, F], `rows` [rounds], `anchors` [rounds],
logits [rounds, block, V] after the Markov head, and tokens [rounds, block].
"""

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_dspark.config import DSparkConfig
from mlx_dspark.load import load_drafter
from mlx_dspark.model import DSparkDrafter

HERE = Path(__file__).parent / "qwen35"
HIDDEN, VOCAB, MASK = 32, 64, 60
ROWS, ANCHORS = [5, 1, 2, 7], [3, 17, 40, 9]
CONFIG = dict(
    architectures=["Qwen35DSparkModel"],
    model_type="qwen3_5",
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    vocab_size=VOCAB,
    max_position_embeddings=512,
    hidden_act="silu",
    attention_bias=False,
    layer_types=["full_attention"] * 2,
    rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.25),
    enable_qwen35_gated_q_proj=True,
    num_target_layers=6,
    target_layer_ids=[1, 4],
    mask_token_id=MASK,
    block_size=7,
    num_anchors=4,
    markov_rank=8,
    markov_head_type="vanilla",
    enable_confidence_head=True,
    confidence_head_with_markov=True,
    confidence_temperatures=[0.5, 1, 2, 1, 4, 1, 0.25],
    tie_word_embeddings=False,
)


def main() -> None:
    HERE.mkdir(exist_ok=True)
    (HERE / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    # mlx-dspark takes every safetensors file for the drafter's.
    (HERE / "expected.safetensors").unlink(missing_ok=True)
    mx.random.seed(0)
    weights = {}
    for name, value in tree_flatten(DSparkDrafter(DSparkConfig.from_json(HERE / "config.json")).parameters()):
        normal = mx.random.normal(value.shape)
        if "norm" in name:
            # mlx-dspark adds 1 in float16: that is exact for these.
            normal = mx.round(0.2 * normal * 128) / 128
        elif name.startswith("markov") or name.endswith("bias"):
            normal = 0.7 * normal
        elif not name.startswith("embed"):
            normal = 1.5 * normal / value.shape[-1] ** 0.5
        weights[name] = normal.astype(mx.float16)
    mx.save_safetensors(str(HERE / "model.safetensors"), weights)
    drafter = load_drafter(str(HERE), quantize=False)[0]
    drafter.set_dtype(mx.float32)
    features = mx.random.normal((sum(ROWS), 2 * HIDDEN)).astype(mx.float16)
    caches, start, logits, tokens = drafter.make_ctx_cache(), 0, [], []
    for count, anchor in zip(ROWS, ANCHORS, strict=True):
        end = start + count
        drafter.update_context(features[None, start:end].astype(mx.float32), start, caches)
        start = end
        block = drafter.embed(mx.array([[anchor] + [MASK] * (CONFIG["block_size"] - 1)]))
        base = drafter.compute_logits(drafter.backbone(block, end, caches))[0]
        drawn = drafter.sample_block(base, anchor)
        previous = mx.concatenate([mx.array([anchor]), drawn[:-1]])
        logits.append(base + drafter.markov_head.step_bias(previous))
        tokens.append(drawn.astype(mx.int32))
    expected = {"features": features, "rows": mx.array(ROWS), "anchors": mx.array(ANCHORS)}
    expected |= {"logits": mx.stack(logits), "tokens": mx.stack(tokens)}
    mx.save_safetensors(str(HERE / "expected.safetensors"), expected)


if __name__ == "__main__":
    main()
