"""Makes speculators/: tiny random drafters as the speculators package writes them, and what its code makes of them.

Run once, with `pip install speculators==0.9.0`, from the repository root:

    python tests/goldens/make_speculators_goldens.py

A folder a case, written by save_pretrained (float16), and expected.safetensors: the target's table `embed_tokens` and
`lm_head` [V, H], tokens [N], taps `features` [N, F], the anchors' positions [A], and for each case logits [A, γ, Vd]
and confidence [A, γ] of the slots behind each anchor, where every slot is given the text's token before it. They come
from the package's own forward pass of training, all in float32.
"""

import shutil
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dflash2.config import DFlash2SpeculatorConfig
from speculators.models.dflash2.core import DFlash2DraftModel
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

OUT = Path(__file__).parent / "speculators"
HIDDEN, VOCAB, REDUCED, MASK, BLOCK, LENGTH = 32, 96, 40, 90, 5, 40
# None so late that a row of its block would look back further than the window: the package counts it from the anchor,
# vLLM, z-lab and specmlx from each row.
ANCHORS, WINDOW = [1, 4, 11, 19], 24
S, F = "sliding_attention", "full_attention"
KINDS = {
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
    "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
}
SELECTOR = dict(conv_group_size=8, selector_rank=8, selector_top_k=8)
CASES = {
    "dflash": dict(layers=[S, F]),
    "dflash_reduced": dict(layers=[F, F], vocab=REDUCED, sliding_window_non_causal=True),
    "dflash2": dict(layers=[S, S], **SELECTOR),
    "dspark": dict(layers=[S, F], vocab=REDUCED, markov_rank=8),
    "dspark_bidirectional": dict(
        layers=[S, S], markov_rank=8, sample_from_anchor=False, sliding_window_non_causal=True, markov_head_type="gated"
    ),
    "dspark_rnn": dict(layers=[F, F], markov_rank=8, markov_head_type="rnn", confidence_head_with_markov=False),
}


def configured(kind: str, layers: list[str], vocab: int = VOCAB, **fields):
    config_class, model_class = KINDS[kind]
    anchored = fields.get("sample_from_anchor", kind == "dspark")
    config = config_class(
        transformer_layer_config=Qwen3Config(
            hidden_size=HIDDEN,
            intermediate_size=32,
            num_hidden_layers=len(layers),
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            vocab_size=VOCAB,
            max_position_embeddings=512,
            layer_types=layers,
            sliding_window=WINDOW,
            use_sliding_window=S in layers,
            max_window_layers=0,
            attn_implementation="eager",
        ),
        draft_vocab_size=vocab,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[2, 5],
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - (not anchored))],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="tiny", architectures=["Qwen3_5ForCausalLM"]),
        ),
        **fields,
    )
    return model_class(config)


def fill(model, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                value = 1 + 0.2 * torch.randn(p.shape)
            elif name.startswith("embed_tokens"):
                value = TABLE
            elif "lm_head" in name:
                value = HEAD[: len(p)] if len(p) == VOCAB else torch.randn(p.shape) / HIDDEN**0.5
            elif "codebook" in name or "markov_w" in name or name.endswith("bias"):
                value = 0.7 * torch.randn(p.shape)
            elif "base_kernel" in name:
                value = 0.5 + 0.5 * torch.randn(p.shape)
            else:
                value = 1.5 * torch.randn(p.shape) / p.shape[-1] ** 0.5
            p.copy_(value.half())
    if model.use_draft_vocab:
        ids = torch.randperm(VOCAB)[:REDUCED].sort().values
        marked = torch.zeros(VOCAB, dtype=torch.bool)
        marked[ids] = True
        model.load_vocab_mappings(marked, ids - torch.arange(REDUCED))


def run(model, anchor: int) -> dict[str, torch.Tensor]:
    mask = torch.zeros(1, LENGTH)
    mask[0, anchor] = 1
    hidden, logits, *_ = model._backbone_forward(
        FEATURES[None], TOKENS[None], mask, torch.zeros(1, LENGTH, HIDDEN), torch.ones(1, LENGTH, dtype=torch.long),
        max_anchors=1,
    )  # fmt: skip
    first = 0 if model.config.sample_from_anchor else 1
    previous = TOKENS[anchor : anchor + BLOCK - first][None]
    hidden, logits = hidden[:, first:], logits[:, first:]
    if isinstance(model, DFlash2DraftModel):
        selector = model.candidate_selector
        candidates = logits.topk(selector.top_k, dim=-1).indices
        scores = selector.score_candidates(logits, hidden, previous, candidates)
        return {"logits": torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)[0]}
    if not isinstance(model, DSparkDraftModel):
        return {"logits": logits[0]}
    x = model.markov_head.prev_embeddings(previous)
    bias = model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden, prev_emb=x)
    seen = torch.cat([hidden, x], dim=-1) if model.config.confidence_head_with_markov else hidden
    return {"logits": (logits + bias)[0], "confidence": model.confidence_head(seen)[0].sigmoid()}


def main():
    expected = {"embed_tokens": TABLE, "lm_head": HEAD, "features": FEATURES, "tokens": TOKENS.int()}
    expected["anchors"] = torch.tensor(ANCHORS).int()
    for seed, (case, settings) in enumerate(CASES.items()):
        model = configured(case.split("_")[0], **settings)
        fill(model, seed)
        shutil.rmtree(OUT / case, ignore_errors=True)
        # A copy, since half() rounds the rope's frequencies as well.
        deepcopy(model).half().save_pretrained(OUT / case)
        (OUT / case / "config.py").unlink()
        model.eval()
        with torch.no_grad():
            results = [run(model, anchor) for anchor in ANCHORS]
        for what in results[0]:
            expected[f"{case}.{what}"] = torch.stack([result[what] for result in results]).contiguous()
    save_file(expected, OUT / "expected.safetensors")


if __name__ == "__main__":
    torch.manual_seed(11)
    TABLE, HEAD = torch.randn(VOCAB, HIDDEN).half().float(), (torch.randn(VOCAB, HIDDEN) / 4).half().float()
    FEATURES, TOKENS = torch.randn(LENGTH, 2 * HIDDEN).half().float(), torch.randint(0, MASK, (LENGTH,))
    main()
