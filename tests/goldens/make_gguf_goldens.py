"""Makes gguf/: blocks of every GGUF type with their values, and a tiny Qwen3.5 model, written by the `gguf` package.

Run once, from the repository root, with

    pip install torch transformers gguf safetensors numpy
    python tests/goldens/make_gguf_goldens.py

`blocks.safetensors` holds for each type random blocks uint8 [4, bytes] (4 rows of 256 values, all scales finite) and
what gguf-py makes of them, float32 [4, 256]. `model.gguf` and `experts.gguf` are transformers models as llama.cpp's
converter lays them out (names by gguf's own table; value heads in turns, one of each key head; A as -exp(A_log); norms
with their 1 added; experts by projection), their tensors quantized by gguf-py in five types; `model.safetensors` and
`experts.safetensors` have tokens [N] and the logits [N, V] of transformers on the values that gguf-py reads back.
`tokenized.gguf` has a tokenizer too, in the file only; `tokenized.json` has texts with the ids that transformers' own
tokenizer of Qwen3.5 gives them.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3_5Tokenizer,
)

HERE = Path(__file__).parent / "gguf"
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
# Where a block has its half-precision scales.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2]}
HALVES["Q6_K"] = [208]
HK, HV, DK, DV = 2, 4, 16, 32
CONFIG = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=HK,
    linear_num_value_heads=HV,
    linear_key_head_dim=DK,
    linear_value_head_dim=DV,
    linear_conv_kernel_dim=4,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
    tie_word_embeddings=False,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
QUANTIZED = {
    "attn_qkv": "Q8_0",
    "attn_gate": "Q5_0",
    "ssm_out": "Q4_0",
    "attn_q": "Q4_1",
    "attn_k": "Q8_0",
    "attn_v": "Q5_1",
    "attn_output": "Q8_0",
    "ffn_gate": "Q4_0",
    "ffn_up": "Q5_1",
    "ffn_down": "Q4_1",
    "ffn_gate_exps": "Q8_0",
    "ffn_up_exps": "Q4_0",
    "ffn_down_exps": "Q5_1",
    "ffn_gate_shexp": "Q4_1",
    "ffn_up_shexp": "Q8_0",
    "ffn_down_shexp": "Q5_0",
    "token_embd": "Q8_0",
    "output": "Q5_0",
}


def random_blocks() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {}
    for name in TYPES:
        kind = Type[name]
        values, size = gguf.GGML_QUANT_SIZES[kind]
        if name in HALVES:
            blocks = rng.integers(0, 256, (4 * 256 // values, size), np.uint8)
            for at in HALVES[name]:
                scale = rng.uniform(-0.01, 0.01, len(blocks)).astype(np.float16)
                blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
            blocks = blocks.reshape(4, -1)
        else:
            blocks = gguf.quantize(rng.normal(size=(4, 256)).astype(np.float32), kind).view(np.uint8).reshape(4, -1)
        found[f"{name}.blocks"] = blocks
        found[f"{name}.values"] = gguf.dequantize(blocks, kind).astype(np.float32).reshape(4, 256)
    return found


def random_model(experts: bool, vocab_size: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = CONFIG | {"vocab_size": vocab_size}
    if experts:
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**config, **EXPERTS)).float().eval()
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config)).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim in (2, 3) and "conv1d" not in name:
                p.normal_(0, 0.1)
            elif name.endswith("A_log"):
                p.copy_(torch.linspace(-4, 0, HV))
            elif name.endswith("dt_bias") or (name.endswith("norm.weight") and "linear_attn" not in name):
                p.normal_(0, 0.1)
    return model


def in_turns(x: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Heads [K0 v0, K0 v1, K1 v0, ...] to [K0 v0, K1 v0, K0 v1, ...]."""
    order = [(k * (HV // HK) + r) * size + i for r in range(HV // HK) for k in range(HK) for i in range(size)]
    return np.take(x, order, axis)


def value_heads(name: str, x: np.ndarray) -> np.ndarray:
    part = name.split(".linear_attn.")[-1].split(".")[0]
    if part in ("in_proj_qkv", "conv1d"):
        return np.concatenate([x[: 2 * HK * DK], in_turns(x[2 * HK * DK :], 0, DV)])
    if part in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return in_turns(x, 0, DV if part == "in_proj_z" else 1)
    return in_turns(x, 1, DV) if part == "out_proj" else x


def to_gguf(name: str, x: np.ndarray, arch: gguf.MODEL_ARCH) -> tuple[str, np.ndarray]:
    table = gguf.get_tensor_name_map(arch, CONFIG["num_hidden_layers"])
    if name.endswith("A_log"):
        return name.replace("model.layers", "blk").replace("linear_attn.A_log", "ssm_a"), -np.exp(value_heads(name, x))
    if name.endswith("dt_bias"):
        return name.replace("model.layers", "blk").replace("linear_attn.dt_bias", "ssm_dt.bias"), value_heads(name, x)
    if name.endswith("conv1d.weight"):
        x = x.squeeze(1)
    elif name.endswith("norm.weight") and "linear_attn" not in name:
        x = x + 1
    elif name.endswith("shared_expert_gate.weight"):
        x = x.squeeze(0)
    if "linear_attn" in name:
        x = value_heads(name, x)
    return table.get_name(name, try_suffixes=(".weight",)), x


def separate(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor by its name, or the two of experts whose gate and up projections are one."""
    if not name.endswith("experts.gate_up_proj"):
        return {f"{name}.weight" if name.endswith("experts.down_proj") else name: x}
    gate, up = np.split(x, 2, axis=1)
    stem = name.removesuffix("gate_up_proj")
    return {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}


TEXTS = [
    "The quick brown fox doesn't jump over 1234 lazy dogs; they'LL see.",
    "  two  spaces\n\n\tand a tab, then a line end\r\n",
    "Stra\u00dfe, caf\u00e9 and cafe\u0301, \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u4f60\u597d\uff0c\u4e16\u754c! \U0001f389",
    "<|im_start|>user\nHello<|im_end|>\n<think>\nwell</think> then",
    "def f(x):\n    return x**2  # it's squared",
]
SPECIALS = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4, "</think>": 4}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def trained_tokenizer() -> Qwen3_5Tokenizer:
    """Qwen3.5's own class on merges that were learnt from the texts and this file."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    plain.train_from_iterator([*TEXTS, Path(__file__).read_text()], trainer)
    learnt = json.loads(plain.to_str())["model"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in learnt["merges"]]
    tokenizer = Qwen3_5Tokenizer(vocab=learnt["vocab"], merges=merges)
    special = [token for token, kind in SPECIALS.items() if kind == 3]
    tokenizer.add_tokens([token for token in SPECIALS if token not in special])
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Qwen3_5Tokenizer) -> None:
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types([SPECIALS.get(token, 1) for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_pad_token_id(vocabulary["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    found = [{"text": text, "ids": i, "decoded": tokenizer.decode(i)} for text, i in zip(TEXTS, ids, strict=True)]
    (HERE / "tokenized.json").write_text(json.dumps(found, indent=1) + "\n")


def write_model(title: str, experts: bool, tokenizer: Qwen3_5Tokenizer | None = None) -> None:
    vocab_size = CONFIG["vocab_size"] if tokenizer is None else len(tokenizer)
    model = random_model(experts, vocab_size)
    arch = gguf.MODEL_ARCH.QWEN35MOE if experts else gguf.MODEL_ARCH.QWEN35
    writer = gguf.GGUFWriter(HERE / f"{title}.gguf", gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(4096)
    writer.add_embedding_length(CONFIG["hidden_size"])
    if experts:
        writer.add_expert_count(EXPERTS["num_experts"])
        writer.add_expert_used_count(EXPERTS["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(EXPERTS["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(EXPERTS["shared_expert_intermediate_size"])
    else:
        writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_key_length(CONFIG["head_dim"])
    writer.add_value_length(CONFIG["head_dim"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(CONFIG["head_dim"] // 4)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(DK)
    writer.add_ssm_group_count(HK)
    writer.add_ssm_time_step_rank(HV)
    writer.add_ssm_inner_size(HV * DV)
    writer.add_full_attention_interval(2)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    state = {}
    for whole, p in model.state_dict().items():
        read = []
        for name, part in separate(whole, p.numpy()).items():
            place, x = to_gguf(name, part, arch)
            kind = Type[QUANTIZED.get(place.split(".")[-2] if "." in place else "", "F32")]
            data = gguf.quantize(np.ascontiguousarray(x, np.float32), kind)
            writer.add_tensor(place, data, raw_dtype=kind)
            read.append(gguf.dequantize(data, kind).reshape(x.shape) if kind != Type.F32 else x)
        state[whole] = np.concatenate(read, axis=1) if len(read) > 1 else read[0]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if tokenizer is not None:
        return
    for name, p in model.state_dict().items():
        if not name.endswith(("A_log", "dt_bias", "conv1d.weight", "norm.weight")):
            p.copy_(torch.tensor(np.ascontiguousarray(undone(name, state[name]))).reshape(p.shape))
    tokens = torch.randint(0, CONFIG["vocab_size"], (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens).logits[0].numpy()
    save_file({"tokens": tokens[0].numpy().astype(np.int32), "logits": logits}, HERE / f"{title}.safetensors")


def undone(name: str, x: np.ndarray) -> np.ndarray:
    """A tensor's heads as they were before `value_heads`."""
    for axis in range(x.ndim):
        index = np.moveaxis(np.broadcast_to(np.arange(x.shape[axis]), np.moveaxis(x, axis, -1).shape), -1, axis)
        moved = value_heads(name, index) if "linear_attn" in name else index
        order = np.moveaxis(moved, axis, 0).reshape(x.shape[axis], -1)[:, 0]
        x = np.take(x, np.argsort(order), axis)
    return x


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    save_file(random_blocks(), HERE / "blocks.safetensors")
    write_model("model", experts=False)
    write_model("experts", experts=True)
    write_model("tokenized", experts=False, tokenizer=trained_tokenizer())
