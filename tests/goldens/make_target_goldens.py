"""Makes target_untied/ and target_tied/: tiny random Qwen3.5 checkpoints and what transformers makes of them.

Run once, with `pip install torch transformers safetensors numpy`, from the repository root:

    python tests/goldens/make_target_goldens.py

`checkpoint/` is as Hugging Face stores it (fp32, conv [C, 1, K], norm weights without the + 1). The untied
one is in the nested form of the published models, with a vision and an MTP tensor beside the text model; the
tied one in the flat form, with `layer_types` that no interval describes. `expected.safetensors` holds tokens
[N], logits [N, V] and each tapped decoder layer's output before the final norm, `tap.{layer}` [N, H]: one
causal pass over all rows.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

ROWS = 150 + 3 + 8 + 65
SHARED = dict(vocab_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_conv_kernel_dim=4)
L, F = "linear_attention", "full_attention"

UNTIED = dict(
    hidden_size=48,
    intermediate_size=48,
    num_hidden_layers=8,
    layer_types=[L, L, L, F] * 2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
    tie_word_embeddings=False,
)
TIED = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=4,
    layer_types=[F, L, L, F],
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    rope_parameters=dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.5),
    tie_word_embeddings=True,
)


def random_model(settings: dict, seed: int) -> Qwen3_5ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHARED, **LINEAR, **settings)).float().eval()
    # softplus(0) = ln 2, so that a head's decay is about the number given here.
    decays = torch.tensor([0.9, 0.99, 0.999, 0.9999])
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.log(-torch.log(decays) / torch.log(torch.tensor(2.0))))
            elif name.endswith("dt_bias"):
                p.normal_(0, 0.1)
            elif name.endswith("linear_attn.norm.weight"):
                p.normal_(1, 0.1)
            elif p.ndim == 1:
                p.normal_(0, 0.1)
            elif "conv1d" in name:
                p.normal_(0, 0.5)
            elif "embed_tokens" in name:
                p.normal_(0, 1)
            else:
                p.normal_(0, p.shape[-1] ** -0.5)
    return model


@torch.no_grad()
def run(model, tokens, tap_ids) -> dict:
    outputs = {}

    def keep(i):
        def hook(_, __, out):
            outputs[f"tap.{i}"] = (out[0] if isinstance(out, tuple) else out)[0].contiguous()

        return hook

    handles = [model.model.layers[i].register_forward_hook(keep(i)) for i in tap_ids]
    logits = model(tokens[None]).logits[0]
    for handle in handles:
        handle.remove()
    top = logits.topk(2).values
    margin = (top[:, 0] - top[:, 1]).min().item()
    assert margin > 1.2e-3, f"smallest top-2 margin {margin}: take another seed, or the argmax is no test"
    return {"tokens": tokens.int(), "logits": logits.contiguous(), **outputs}


def write(folder: Path, model, nested: bool, tap_ids, seed: int) -> None:
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    tokens = torch.randint(0, SHARED["vocab_size"], (ROWS,), generator=torch.Generator().manual_seed(seed))
    save_file(run(model, tokens, tap_ids), folder / "expected.safetensors")

    text = model.config.to_diff_dict() | {"layer_types": model.config.layer_types}
    text.pop("transformers_version", None)
    weights = {k: v.contiguous() for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    config = text | {"architectures": ["Qwen3_5ForCausalLM"]}
    if nested:
        weights = {k.replace("model.", "model.language_model.", 1): v for k, v in weights.items()}
        weights["model.visual.patch_embed.proj.weight"] = torch.zeros(2, 2)
        weights["mtp.fc.weight"] = torch.zeros(2, 2)
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "tie_word_embeddings": False,
            "text_config": text,
        }
    save_file(weights, folder / "checkpoint" / "model.safetensors", metadata={"format": "pt"})
    (folder / "checkpoint" / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    here = Path(__file__).parent
    write(here / "target_untied", random_model(UNTIED, seed=0), True, (0, 3, 5, 7), seed=1)
    write(here / "target_tied", random_model(TIED, seed=2), False, (0, 1, 3), seed=3)
