"""Makes mtp/: an MTP head for the target_tied checkpoint, and what transformers' layers make of it.

Run once, after make_target_goldens.py, with `pip install torch transformers safetensors`, from the repository root:

    python tests/goldens/make_mtp_goldens.py

transformers has no MTP head: it is put together from its Qwen3_5DecoderLayer and Qwen3_5RMSNorm, and run over the whole
text for every drafted token, without a cache. `model-mtp.safetensors` (float16) holds `mtp.*` as the published models
do, norms without the + 1. `expected.safetensors` holds `rows` [rounds] (how many of the target's rows are known before
each round) and, for each round of greedy drafts, the head's normed rows `hidden` [rounds, 4, H], logits [rounds, 4, V]
and tokens [rounds, 4]. The target's rows and tokens are target_tied's.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import embedding, linear
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

HERE = Path(__file__).parent
ROWS, DEPTH = [1, 2, 3, 5, 13, 14, 22, 40], 4


def random_head(config: Qwen3_5TextConfig) -> torch.nn.ModuleDict:
    torch.manual_seed(7)
    H, eps = config.hidden_size, config.rms_norm_eps
    head = torch.nn.ModuleDict(
        dict(
            pre_fc_norm_embedding=Qwen3_5RMSNorm(H, eps),
            pre_fc_norm_hidden=Qwen3_5RMSNorm(H, eps),
            fc=torch.nn.Linear(2 * H, H, bias=False),
            layers=torch.nn.ModuleList([Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))]),
            norm=Qwen3_5RMSNorm(H, eps),
        )
    )
    with torch.no_grad():
        for name, p in head.named_parameters():
            p.copy_(0.2 * torch.randn(p.shape) if "norm" in name else 1.5 * torch.randn(p.shape) / p.shape[-1] ** 0.5)
            p.copy_(p.half())
    return head.float().eval()


def run(head, rotary, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The head's normed rows [T, H], each from the token after it and the row of the target or of the head."""
    x = torch.cat([head["pre_fc_norm_embedding"](embeddings), head["pre_fc_norm_hidden"](hidden)], dim=-1)
    x = head["fc"](x)[None]
    T = x.shape[1]
    positions = torch.arange(T)[None]
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
    y = head["layers"][0](x, position_embeddings=rotary(x, positions), attention_mask=mask, position_ids=positions)
    return head["norm"](y[0] if isinstance(y, tuple) else y)[0]


def main():
    checkpoint = HERE / "target_tied" / "checkpoint"
    settings = json.loads((checkpoint / "config.json").read_text())
    config = Qwen3_5TextConfig(**settings, attn_implementation="sdpa")
    weights = load_file(checkpoint / "model.safetensors")
    table = next(w for name, w in weights.items() if name.endswith("embed_tokens.weight")).float()
    last = next(w for name, w in weights.items() if name in ("model.norm.weight", "model.language_model.norm.weight"))
    norm = Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
    norm.weight.data = last.float()
    target = load_file(HERE / "target_tied" / "expected.safetensors")
    text = target["tokens"].long()
    head, rotary = random_head(config), Qwen3_5TextRotaryEmbedding(config)
    expected = {"rows": torch.tensor(ROWS).int(), "hidden": [], "logits": [], "tokens": []}
    with torch.no_grad():
        known = norm(target[f"tap.{config.num_hidden_layers - 1}"].float())
        for rows in ROWS:
            ids, hidden, logits, drafts = text[1 : rows + 1], known[:rows], [], []
            for _ in range(DEPTH):
                out = run(head, rotary, embedding(ids, table), hidden)[-1:]
                logits.append(linear(out, table))
                drafts.append(logits[-1].argmax(-1))
                ids, hidden = torch.cat([ids, drafts[-1]]), torch.cat([hidden, out])
            expected["hidden"].append(hidden[rows:])
            expected["logits"].append(torch.cat(logits))
            expected["tokens"].append(torch.cat(drafts).int())
    expected = {name: x if torch.is_tensor(x) else torch.stack(x).contiguous() for name, x in expected.items()}
    (HERE / "mtp").mkdir(exist_ok=True)
    save_file({f"mtp.{k}": v.half() for k, v in head.state_dict().items()}, HERE / "mtp" / "model-mtp.safetensors")
    save_file(expected, HERE / "mtp" / "expected.safetensors")


if __name__ == "__main__":
    main()
