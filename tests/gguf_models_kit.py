"""GGUF files of models that are not hybrids."""

import mlx.core as mx
from gguf_kit import (
    D,
)

IDS = mx.array([[5, 9, 30, 40, 7, 8, 11, 63, 0, 5, 5, 9]])


NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


KINDS = {
    "llama": {"token_embd": "Q8_0", "attn_q": "Q4_1", "attn_k": "Q4_0", "attn_output": "Q5_0", "ffn_down": "Q4_K"},
    "qwen2": {"token_embd": "Q4_0", "attn_q": "Q8_0", "attn_k": "Q5_1", "ffn_up": "F16", "ffn_down": "Q5_K"},
    "qwen3": {"output": "Q5_1", "attn_v": "Q4_1", "attn_q": "Q5_0", "ffn_gate": "Q8_0", "ffn_down": "Q6_K"},
}


def hugging_faces(values: dict, permuted: bool) -> dict[str, mx.array]:
    """A file's values by Hugging Face's names; with llama's q and k rows from one at a time back into halves."""
    found = {}
    for name, x in values.items():
        part, _, kind = name.rpartition(".")
        if permuted and part.endswith(("attn_q", "attn_k")):
            # Row 2 j + half of a head in the file is row j + half D/2 of the head.
            x = x[[h * D + 2 * (r % (D // 2)) + r // (D // 2) for h in range(len(x) // D) for r in range(D)]]
        if part.startswith("blk."):
            _, i, stem = part.split(".")
            found[f"model.layers.{i}.{NAMES[stem]}.{kind}"] = mx.array(x)
        elif part in (tops := {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}):
            found[f"{tops[part]}.{kind}"] = mx.array(x)
    return found
