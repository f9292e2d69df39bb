"""Makes training/: losses of drafters and their gradients, by torch's autograd through the publishers' own code.

Run once, with what make_drafter_goldens.py needs, from the repository root:

    PYTHONPATH=../DeepSpec python tests/goldens/make_training_goldens.py

One block after the other, without a mask: every block is given the rows before its anchor. DFlash and DFlash 2 run by
z-lab's classes, DSpark by DeepSpec's class and DeepSpec's own loss; the other losses are written here from the papers.
The MTP head is put together from transformers' layers. `inputs.safetensors` holds what the target makes of the texts
(its tables, normed rows and taps), tokens [B, L + 1], weights [B, L], anchors [B, N], and each drafter's own weights.
`losses.json` has the terms and the loss of each case, `gradients.safetensors` the gradients, `case/tensor`.
"""

import json
import math
from pathlib import Path

import torch
import torch.distributed as dist
from deepspec.modeling.dspark.common import DSparkForwardOutput
from deepspec.modeling.dspark.loss import compute_dspark_loss
from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
from dflash.model import DFlash2DraftModel, DFlashDraftModel, _make_cache
from make_mtp_goldens import random_head, run
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, embedding, linear
from transformers import Qwen3_5TextConfig, Qwen3Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

OUT = Path(__file__).parent / "training"
HIDDEN, VOCAB, MASK, BLOCK, LENGTH, MTP_WIDTH = 32, 48, 45, 5, 22, 4
BASE = dict(
    model_type="qwen3",
    hidden_size=HIDDEN,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    rms_norm_eps=1e-6,
    vocab_size=VOCAB,
    max_position_embeddings=512,
    num_target_layers=6,
    hidden_act="silu",
    attention_bias=False,
    layer_types=["full_attention"],
    rope_parameters=dict(rope_type="default", rope_theta=1e4),
    block_size=BLOCK,
)
TAPS = dict(target_layer_ids=[1, 4], mask_token_id=MASK)
SELECTOR = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=6)
CONFIGS = {
    "dflash": dict(BASE, architectures=["DFlashDraftModel"], dflash_config=TAPS, is_causal=False),
    "dflash2": dict(BASE, architectures=["DFlash2DraftModel"], dflash_config=TAPS | SELECTOR, is_causal=False),
    "dspark": dict(
        **BASE,
        **TAPS,
        architectures=["Qwen3DSparkModel"],
        num_anchors=4,
        markov_rank=8,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    ),
    "mtp": dict(
        model_type="qwen3_5",
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rms_norm_eps=1e-6,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        full_attention_interval=4,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
}
# Drafter, and the terms of its loss by DraftLoss's names.
CASES = {
    "dflash_token": ("dflash", dict(token=1.0, decay=7.0)),
    "dflash_soft": ("dflash", dict(soft=1.0)),
    "dflash_l1": ("dflash", dict(l1=1.0)),
    "dflash2_selector": ("dflash2", dict(selector=1.0)),
    "dspark_paper": ("dspark", dict(token=0.1, l1=0.9, confidence=1.0)),
    "dspark_confidence": ("dspark", dict(confidence=1.0)),
    "mtp": ("mtp", dict(soft=0.5, l1=0.5)),
}


def made(kind: str) -> torch.nn.Module:
    if kind == "mtp":
        return random_head(Qwen3_5TextConfig(**CONFIGS[kind], attn_implementation="sdpa"))
    cls = {"dflash": DFlashDraftModel, "dflash2": DFlash2DraftModel, "dspark": Qwen3DSparkModel}[kind]
    torch.manual_seed(len(kind))
    model = cls(Qwen3Config(**CONFIGS[kind], attn_implementation="sdpa")).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(1 + 0.2 * torch.randn(p.shape))
            elif "codebook" in name or "markov" in name or p.ndim == 1 or "base_kernel" in name:
                p.copy_(0.7 * torch.randn(p.shape))
            else:
                p.copy_(1.5 * torch.randn(p.shape) / p.shape[-1] ** 0.5)
    return model


def learned(kind: str, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """What is trained: not the copies of the target's tables. By the files' names."""
    found = {k: p for k, p in model.named_parameters() if not k.startswith(("embed_tokens", "lm_head"))}
    return {f"mtp.{k}" if kind == "mtp" else k.replace("codebook.weight", "codebook"): p for k, p in found.items()}


def blocks():
    """Row of the batch and anchor of every block."""
    for b, row in enumerate(GIVEN["anchors"].tolist()):
        for a in row:
            if a >= 0:
                yield b, a


def supervised(b: int, a: int, width: int) -> int:
    count = 0
    while count < width and a + count < LENGTH and GIVEN["weights"][b, a + count] == 1:
        count += 1
    return count


def block_hidden(kind: str, model, b: int, a: int) -> torch.Tensor:
    """Normed rows [BLOCK, D] of the block at an anchor."""
    ids = torch.tensor([[GIVEN["tokens"][b, a]] + [MASK] * (BLOCK - 1)])
    features, noise = GIVEN["features"][b : b + 1, :a], embedding(ids, GIVEN["embed"])
    positions = torch.arange(a + BLOCK)[None]
    if kind == "dspark":
        return model._forward_backbone(
            target_hidden_states=features,
            noise_embedding=noise,
            position_ids=positions,
            attention_mask=None,
            is_causal=False,
        )[0]
    return model(
        target_hidden=features,
        noise_embedding=noise,
        position_ids=positions,
        past_key_values=_make_cache(model.config),
        use_cache=True,
    )[0]


def of_slot(terms: dict, logits: torch.Tensor, target_logits: torch.Tensor, label: int) -> torch.Tensor:
    p, log_q = target_logits.softmax(-1), logits.log_softmax(-1)
    value = terms.get("l1", 0) * (log_q.exp() - p).abs().sum() - terms.get("token", 0) * log_q[label]
    return value - terms.get("soft", 0) * (p * log_q).sum()


def dflash_loss(kind: str, model, terms: dict) -> torch.Tensor:
    above, below, decay = 0.0, 0.0, terms.get("decay", 4.0)
    for b, a in blocks():
        h = block_hidden(kind, model, b, a)[1:]
        for k in range(supervised(b, a, BLOCK - 1)):
            logits, target_logits = linear(h[k], GIVEN["head"]), linear(GIVEN["hidden"][b, a + k], GIVEN["head"])
            value = of_slot(terms, logits, target_logits, GIVEN["tokens"][b, a + k + 1])
            if "selector" in terms:
                value = value + terms["selector"] * selector_loss(model, h[k], logits, target_logits, b, a + k)
            weight = math.exp(-k / decay)
            above, below = above + weight * value, below + weight
    return above / below


def selector_loss(model, h, logits, target_logits, b: int, at: int) -> torch.Tensor:
    """Cross-entropy with the target's argmax, which takes the weakest candidate's place, after the data's token."""
    selector, label = model.candidate_selector, target_logits.argmax()
    candidates = logits.topk(SELECTOR["selector_top_k"]).indices
    if label not in candidates:
        candidates = torch.cat([candidates[:-1], label[None]])
    before = selector.predecessor_codebook.weight[GIVEN["tokens"][b, at]]
    z = selector.hidden_projection(h)
    scores = logits[candidates] + (before * z * selector.successor_codebook.weight[candidates]).sum(-1)
    return cross_entropy(scores[None], (candidates == label).nonzero()[0])


def dspark_loss(kind: str, model, terms: dict) -> torch.Tensor:
    rows = {
        name: [] for name in ("draft_logits", "target_ids", "eval_mask", "confidence_pred", "aligned_target_logits")
    }
    for b, a in blocks():
        h, n = block_hidden(kind, model, b, a), supervised(b, a, BLOCK)
        at = torch.arange(a, a + BLOCK).clamp(max=LENGTH - 1)
        previous = GIVEN["tokens"][b, at][None]
        base = linear(h, GIVEN["head"])[None, None]
        rows["draft_logits"].append(
            model.markov_head.apply_block_logits(base, token_ids=previous[None], hidden_states=h[None, None])[0]
        )
        rows["target_ids"].append(GIVEN["tokens"][b, at + 1][None])
        rows["eval_mask"].append((torch.arange(BLOCK) < n)[None])
        rows["confidence_pred"].append(
            model.predict_confidence_step(h[None], prev_token_ids=previous).reshape(1, BLOCK)
        )
        rows["aligned_target_logits"].append(linear(GIVEN["hidden"][b, at], GIVEN["head"])[None])
    stacked = {name: torch.stack(values, dim=1) for name, values in rows.items()}
    outputs = DSparkForwardOutput(
        **stacked, block_keep_mask=torch.ones(stacked["eval_mask"].shape[:2], dtype=torch.bool)
    )
    return compute_dspark_loss(
        outputs=outputs,
        loss_decay_gamma=4.0,
        ce_loss_alpha=terms.get("token", 0.0),
        l1_loss_alpha=terms.get("l1", 0.0),
        confidence_head_alpha=terms["confidence"],
    )


def mtp_loss(kind: str, head, terms: dict) -> torch.Tensor:
    rotary = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(**CONFIGS["mtp"]))
    above, below = 0.0, 0.0
    for b, a in blocks():
        ids, hidden = GIVEN["tokens"][b, 1 : a + 1], GIVEN["hidden"][b, :a]
        for k in range(supervised(b, a, MTP_WIDTH)):
            out = run(head, rotary, embedding(ids, GIVEN["embed"]), hidden)[-1]
            target_logits = linear(GIVEN["hidden"][b, a + k], GIVEN["head"])
            value = of_slot(terms, linear(out, GIVEN["head"]), target_logits, GIVEN["tokens"][b, a + k + 1])
            weight = math.exp(-k / 4.0)
            above, below = above + weight * value, below + weight
            ids, hidden = torch.cat([ids, GIVEN["tokens"][b, a + k + 1][None]]), torch.cat([hidden, out[None]])
    return above / below


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    weights = torch.zeros(2, LENGTH)
    # An answer to the end, one with a gap in it, one that ends inside a block.
    weights[0, 4:13] = weights[0, 16:22] = weights[1, 7:9] = weights[1, 10:17] = 1
    return {
        "embed": 0.7 * torch.randn(VOCAB, HIDDEN),
        "head": 1.5 * torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5,
        "hidden": torch.randn(2, LENGTH, HIDDEN),
        "features": torch.randn(2, LENGTH, 2 * HIDDEN),
        "tokens": torch.randint(0, MASK, (2, LENGTH + 1)),
        "weights": weights,
        "anchors": torch.tensor([[4, 10, 16, 20], [7, 12, 15, -1]]),
    }


def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    OUT.mkdir(exist_ok=True)
    losses, gradients, weights = {}, {}, {}
    for case, (kind, terms) in CASES.items():
        model = made(kind)
        parameters = learned(kind, model)
        loss = {"dspark": dspark_loss, "mtp": mtp_loss}.get(kind, dflash_loss)(kind, model, terms)
        loss.backward()
        losses[case] = {"drafter": kind, "terms": terms, "loss": loss.item()}
        weights |= {f"{kind}/{name}": p.detach().clone() for name, p in parameters.items()}
        gradients |= {f"{case}/{name}": p.grad for name, p in parameters.items() if p.grad is not None}
    ints = {name: x.int() if x.dtype == torch.int64 else x for name, x in GIVEN.items()}
    save_file(ints | weights, OUT / "inputs.safetensors")
    save_file({name: x.contiguous() for name, x in gradients.items()}, OUT / "gradients.safetensors")
    (OUT / "losses.json").write_text(json.dumps({"configs": CONFIGS, "cases": losses}, indent=1) + "\n")


if __name__ == "__main__":
    GIVEN = inputs()
    main()
