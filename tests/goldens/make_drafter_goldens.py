"""Makes drafters/: one tiny random drafter, its configs in several packagings, and what its publishers' code
makes of it.

Run once, with `pip install torch transformers safetensors` and `pip install --no-deps dflash==0.1.0` (z-lab's
torch DFlash and DFlash 2), and a clone of github.com/deepseek-ai/DeepSpec (torch DSpark; afdfa7c was used) on
PYTHONPATH, from the repository root:

    PYTHONPATH=../DeepSpec python tests/goldens/make_drafter_goldens.py

`weights.safetensors` (float16) holds the tensors of all cases: a case's file is a choice of them.
`configs.json` has each case's config.json. `expected.safetensors` holds taps `features` [N, F], `rows`
[rounds] (how many rows are committed before each round), `anchors` [rounds], and for each case logits
[rounds, γ, V] (DFlash 2: the scores on the greedy walk, -inf but at the candidates), tokens [rounds, γ], confidence
[rounds, γ]. Rounds commit 1, 2 and a block of rows, with
contexts below, at and above the window.
"""

import json
from pathlib import Path

import dflash.model
import torch
from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
from dflash.model import DFlash2DraftModel, DFlashDraftModel, _crop_to, _make_cache
from dspark_blocks import draft
from safetensors.torch import save_file
from transformers import Qwen3Config

HIDDEN, VOCAB, MASK, WINDOW = 64, 96, 90, 12
ROWS = [5, 1, 2, 2, 1, 1, 1, 8, 1, 2, 8, 1]
S, F = "sliding_attention", "full_attention"
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=32.0, original_max_position_embeddings=256, beta_fast=16.0)
BASE = dict(
    model_type="qwen3",
    hidden_size=HIDDEN,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    vocab_size=VOCAB,
    max_position_embeddings=512,
    num_target_layers=6,
    hidden_act="silu",
    attention_bias=False,
    use_sliding_window=True,
    sliding_window=WINDOW,
    rope_parameters=dict(rope_type="default", rope_theta=1e4),
)
TAPS = dict(target_layer_ids=[1, 4], mask_token_id=MASK)
DFLASH = dict(BASE, architectures=["DFlashDraftModel"], block_size=8, dflash_config=TAPS)
DEEPSPEC = dict(
    **BASE,
    **TAPS,
    architectures=["Qwen3DSparkModel"],
    block_size=7,
    num_anchors=4,
    markov_rank=8,
    markov_head_type="vanilla",
    enable_confidence_head=True,
    confidence_head_with_markov=True,
    tie_word_embeddings=False,
    layer_types=[F, F],
)
SELECTOR = dict(TAPS, conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=8)
DFLASH2 = dict(DFLASH, architectures=["DFlash2DraftModel"], is_causal=False, dflash_config=SELECTOR)
SCALED = dict(TAPS, input_embedding_scale=1.5, output_multiplier=2.0, final_logit_softcapping=4.0)

CASES = {
    "dflash_full": dict(DFLASH, layer_types=[F, F]),
    "dflash_sliding": {**DFLASH, "layer_types": [S, F], "block_size": None, "dflash_config": dict(TAPS, block_size=8)},
    "dflash_sliding_bidirectional": dict(DFLASH, layer_types=[S, S], is_causal=False),
    "dflash_causal_scaled": dict(DFLASH, layer_types=[F, F], is_causal=True, dflash_config=SCALED),
    "dflash_yarn": dict(DFLASH, layer_types=[S, F], rope_parameters=YARN),
    "dflash2_full": dict(DFLASH2, layer_types=[F, F]),
    "dflash2_sliding": dict(DFLASH2, layer_types=[S, S]),
    "dflash2_causal_scaled": dict(
        DFLASH2,
        layer_types=[S, F],
        is_causal=None,
        dflash_config=dict(SELECTOR, input_embedding_scale=1.5, output_multiplier=2.0, final_logit_softcapping=4.0),
    ),
    "dspark": DEEPSPEC,
    "dspark_yarn": dict(DEEPSPEC, rope_parameters=YARN, confidence_head_with_markov=False),
    "dspark_gated": dict(DEEPSPEC, markov_head_type="gated"),
    "dspark_rnn": dict(DEEPSPEC, markov_head_type="rnn"),
    "dflash_biased": dict(DFLASH, layer_types=[F, F], attention_bias=True),
}


def radixark(config: dict) -> dict:
    """The same drafter as SpecForge packs it: DSpark's own fields inside dflash_config."""
    inside = ("target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type")
    inside += ("enable_confidence_head", "confidence_head_with_markov")
    flat = {k: v for k, v in config.items() if k not in inside and k != "num_anchors"}
    nested = dict(projector_type="dspark", **{k: config[k] for k in inside})
    return dict(flat, architectures=["DSparkDraftModel"], dflash_config=nested)


def random_weights() -> dict[str, torch.Tensor]:
    """The tensors of all cases, as float16 holds them; large enough that every one of them matters."""
    torch.manual_seed(0)
    shapes = {name: p.shape for name, p in Qwen3DSparkModel(qwen3_config(DEEPSPEC)).named_parameters()}
    shapes["confidence_head.plain.weight"] = (1, HIDDEN)
    weights = {}
    for name, shape in sorted(shapes.items()):
        normal = torch.randn(shape)
        if "norm" in name:
            value = 1 + 0.2 * normal
        elif name.startswith(("embed", "markov")) or name.endswith("bias"):
            value = 0.7 * normal
        else:
            value = 1.5 * normal / shape[-1] ** 0.5
        weights[name] = value.half()
    torch.manual_seed(2)
    selective = DFlash2DraftModel(qwen3_config(DFLASH2)).named_parameters()
    for name, shape in sorted((name, p.shape) for name, p in selective if name not in weights):
        if "base_kernel" in name:
            value = 0.5 + 0.5 * torch.randn(shape)
        else:
            value = torch.randn(shape) / (1 if "codebook" in name else shape[-1] ** 0.5)
        # The files' names; z-lab's from_pretrained adds the .weight.
        weights[name.replace("codebook.weight", "codebook")] = value.half()
    torch.manual_seed(3)
    for case in ("dspark_gated", "dspark_rnn"):
        parameters = Qwen3DSparkModel(qwen3_config(CASES[case])).named_parameters()
        for name, shape in sorted((name, p.shape) for name, p in parameters if name not in weights):
            weights[name] = (1.5 * torch.randn(shape) / (shape[-1] ** 0.5 if len(shape) > 1 else 2)).half()
    torch.manual_seed(4)
    biased = DFlashDraftModel(qwen3_config(CASES["dflash_biased"])).named_parameters()
    for name, shape in sorted((name, p.shape) for name, p in biased if name not in weights):
        weights[name] = (0.5 * torch.randn(shape)).half()
    return weights


def qwen3_config(config: dict) -> Qwen3Config:
    return Qwen3Config(**{k: v for k, v in config.items() if v is not None}, attn_implementation="sdpa")


def loaded(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    names = dict(model.named_parameters())
    chosen = {name: weights[name.replace("codebook.weight", "codebook")].float() for name in names}
    if "confidence_head.proj.weight" in names and names["confidence_head.proj.weight"].shape[1] == HIDDEN:
        chosen["confidence_head.proj.weight"] = weights["confidence_head.plain.weight"].float()
    model.load_state_dict(chosen, strict=True)
    return model.float().eval()


def rounds():
    start = 0
    for count, anchor in zip(ROWS, ANCHORS, strict=True):
        yield start, start + count, int(anchor)
        start += count


def run_dflash(config: dict, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    selective = "selector_rank" in config["dflash_config"]
    model = loaded((DFlash2DraftModel if selective else DFlashDraftModel)(qwen3_config(config)), weights)
    embed, head = weights["embed_tokens.weight"].float(), weights["lm_head.weight"].float()
    cache = _make_cache(model.config)
    scale = config["dflash_config"].get("input_embedding_scale", 1.0)
    result = {"logits": [], "tokens": []}
    for start, end, anchor in rounds():
        ids = torch.tensor([[anchor] + [MASK] * (model.block_size - 1)])
        hidden = model(
            target_hidden=FEATURES[None, start:end].float(),
            noise_embedding=torch.nn.functional.embedding(ids, embed) * scale,
            position_ids=torch.arange(start, end + model.block_size)[None],
            past_key_values=cache,
            use_cache=True,
        )
        _crop_to(cache, end)
        if selective:
            tokens, logits = walk(model, hidden[:, 1:], torch.tensor([anchor]), head)
        else:
            logits = model.compute_logits(hidden[:, 1:], lambda h: torch.nn.functional.linear(h, head))
            tokens = logits.argmax(-1)
        result["logits"].append(logits[0])
        result["tokens"].append(tokens[0].int())
    return {what: torch.stack(values).contiguous() for what, values in result.items()}


def walk(model, hidden, anchor, head):
    """DFlash 2's greedy walk. Its scores leave z-lab's code only as what a sampler is given, so one that takes the
    largest writes them down."""
    seen = []
    sampling = dflash.model._sampling_probs, dflash.model._sample_probs
    dflash.model._sampling_probs = lambda scores, temperature: seen.append(scores) or scores.softmax(-1)
    dflash.model._sample_probs = lambda q: q.argmax(-1)
    tokens, candidates, _ = model.propose(hidden, anchor, lambda h: torch.nn.functional.linear(h, head), 1.0)
    dflash.model._sampling_probs, dflash.model._sample_probs = sampling
    everywhere = torch.full((*candidates.shape[:2], VOCAB), -torch.inf)
    return tokens, everywhere.scatter(-1, candidates, torch.cat(seen, dim=1))


def run_dspark(config: dict, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = loaded(Qwen3DSparkModel(qwen3_config(config)), weights)
    return draft(model, FEATURES, ROWS, ANCHORS.tolist(), MASK)


def main():
    out = Path(__file__).parent / "drafters"
    weights = random_weights()
    expected = {"features": FEATURES, "rows": torch.tensor(ROWS).int(), "anchors": ANCHORS.int()}
    for name, config in CASES.items():
        run = run_dspark if "markov_rank" in config else run_dflash
        expected |= {f"{name}.{what}": values for what, values in run(config, weights).items()}
    save_file(weights, out / "weights.safetensors")
    save_file(expected, out / "expected.safetensors")
    configs = {name: {k: v for k, v in config.items() if v is not None} for name, config in CASES.items()}
    configs["dspark_yarn"] = radixark(configs["dspark_yarn"])
    (out / "configs.json").write_text(json.dumps(configs, indent=1) + "\n")


if __name__ == "__main__":
    torch.manual_seed(1)
    FEATURES = torch.randn(sum(ROWS), len(TAPS["target_layer_ids"]) * HIDDEN).half()
    ANCHORS = torch.randint(0, MASK, (len(ROWS),))
    with torch.no_grad():
        main()
