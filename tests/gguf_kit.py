"""GGUF files made in a test, and their values by plain numpy (ggml-quants' formulas, one block after the other)."""

import struct
from pathlib import Path

import numpy as np

# Number of a type, values and bytes of a block, where its half-precision scales are.
TYPES = {
    "F32": (0, 1, 4, []),
    "F16": (1, 1, 2, []),
    "Q4_0": (2, 32, 18, [0]),
    "Q4_1": (3, 32, 20, [0, 2]),
    "Q5_0": (6, 32, 22, [0]),
    "Q5_1": (7, 32, 24, [0, 2]),
    "Q8_0": (8, 32, 34, [0]),
    "Q4_K": (12, 256, 144, [0, 2]),
    "Q5_K": (13, 256, 176, [0, 2]),
    "Q6_K": (14, 256, 210, [208]),
}
NUMBERS = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}


def dequantized(kind: str, data: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's values, float32."""
    if kind in ("F32", "F16"):
        return np.frombuffer(data, np.float32 if kind == "F32" else np.float16).astype(np.float32).reshape(shape)
    size = TYPES[kind][2]
    blocks = [data[i : i + size] for i in range(0, len(data), size)]
    return np.concatenate([_block(kind, block) for block in blocks]).astype(np.float32).reshape(shape)


def _block(kind: str, block: bytes) -> np.ndarray:
    def half(at: int) -> np.float32:
        return np.float32(np.frombuffer(block[at : at + 2], np.float16)[0])

    if kind == "Q8_0":
        return half(0) * np.frombuffer(block[2:], np.int8).astype(np.float32)
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        nibbles = np.frombuffer(block[-16:], np.uint8)
        q = np.concatenate([nibbles & 15, nibbles >> 4]).astype(np.float32)
        if kind[1] == "5":
            fifth = int.from_bytes(block[-20:-16], "little")
            q += 16 * np.array([fifth >> i & 1 for i in range(32)], np.float32)
        if kind.endswith("1"):
            return half(0) * q + half(2)
        return half(0) * (q - (16 if kind[1] == "5" else 8))
    if kind == "Q6_K":
        out = []
        for i in range(256):
            part, j, place = i // 128, i % 32, i % 128 // 32
            low = block[64 * part + 32 * (place % 2) + j] >> 4 * (place // 2) & 15
            high = block[128 + 32 * part + j] >> 2 * place & 3
            scale = np.frombuffer(block[192 + i // 16 : 193 + i // 16], np.int8)[0]
            out.append(half(208) * np.float32(scale) * np.float32((low | high << 4) - 32))
        return np.array(out, np.float32)
    packed, out = block[4:16], []
    for i in range(256):
        group, j = i // 32, i % 32
        if group < 4:
            s, m = packed[group] & 63, packed[group + 4] & 63
        else:
            s = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            m = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        q = block[-128 + 32 * (group // 2) + j] >> 4 * (group % 2) & 15
        if kind == "Q5_K":
            q |= (block[16 + j] >> group & 1) << 4
        out.append(half(0) * np.float32(s) * np.float32(q) - half(2) * np.float32(m))
    return np.array(out, np.float32)


def random_tensor(rng: np.random.Generator, kind: str, shape: tuple[int, ...], scale: float = 0.1) -> bytes:
    """Random blocks of values about as large as `scale`; of one axis, about 1."""
    if kind in ("F32", "F16"):
        x = rng.normal(float(len(shape) == 1), scale, shape)
        return x.astype(np.float32 if kind == "F32" else np.float16).tobytes()
    _, values, size, halves = TYPES[kind]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // values, size), np.uint8)
    # Of codes as large as 4 to 8 bits and of the scales of K types, 6 or 8 bits.
    most = {"Q8_0": 128, "Q6_K": 128 * 32}.get(kind, 16) * (64 if kind in ("Q4_K", "Q5_K") else 1)
    for at in halves:
        sizes = rng.uniform(0.5, 1, len(blocks)) * scale / most * (-8 if at == 2 and kind[2:] == "_1" else 1)
        blocks[:, at : at + 2] = sizes.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.tobytes()


def _value(value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value.encode())) + value.encode()
    if isinstance(value, list):
        items = [_value(item) for item in value]
        kind = items[0][:4] if items else struct.pack("<I", 4)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)
    kind, form = NUMBERS[type(value)]
    return struct.pack("<I", kind) + struct.pack(form, value)


def write_gguf(path: Path, metadata: dict, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """A file with metadata and tensors (type, shape with the fastest axis last, data)."""
    head, body = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)), b""
    for key, value in metadata.items():
        head += struct.pack("<Q", len(key)) + key.encode() + _value(value)
    for name, (kind, shape, data) in tensors.items():
        head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}QIQ", *shape[::-1], TYPES[kind][0], len(body))
        body += data + bytes(-len(data) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


H, FF, V, HEADS, KV, D = 64, 256, 64, 4, 2, 16
HK, HV, DK, DV = 2, 4, 16, 32
BASE = {
    "context_length": 4096,
    "embedding_length": H,
    "feed_forward_length": FF,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e4,
}
HYBRID = BASE | {
    "attention.key_length": D,
    "attention.value_length": D,
    "rope.dimension_count": 8,
    "ssm.conv_kernel": 4,
    "ssm.state_size": DK,
    "ssm.group_count": HK,
    "ssm.time_step_rank": HV,
    "ssm.inner_size": HV * DV,
    "full_attention_interval": 2,
}


def attention_shapes(i: int, gated: bool = False) -> dict[str, tuple[int, ...]]:
    shapes = {"q": ((1 + gated) * HEADS * D, H), "k": (KV * D, H), "v": (KV * D, H), "output": (H, HEADS * D)}
    return {f"blk.{i}.attn_{name}.weight": shape for name, shape in shapes.items()}


def mlp_shapes(i: int, norm: str = "ffn_norm") -> dict[str, tuple[int, ...]]:
    shapes = {"attn_norm": (H,), norm: (H,), "ffn_gate": (FF, H), "ffn_up": (FF, H), "ffn_down": (H, FF)}
    return {f"blk.{i}.{name}.weight": shape for name, shape in shapes.items()}


def head_norms(i: int) -> dict[str, tuple[int, ...]]:
    return {f"blk.{i}.attn_{name}_norm.weight": (D,) for name in "qk"}


def hybrid_shapes() -> dict[str, tuple[int, ...]]:
    """Of two layers: a recurrent one and one of attention."""
    rows = 2 * HK * DK + HV * DV
    recurrent = {
        "attn_qkv.weight": (rows, H),
        "attn_gate.weight": (HV * DV, H),
        "ssm_beta.weight": (HV, H),
        "ssm_alpha.weight": (HV, H),
        "ssm_a": (HV,),
        "ssm_dt.bias": (HV,),
        "ssm_conv1d.weight": (rows, 4),
        "ssm_norm.weight": (DV,),
        "ssm_out.weight": (H, HV * DV),
    }
    norm = "post_attention_norm"
    shapes = {"token_embd.weight": (V, H), "output_norm.weight": (H,), "output.weight": (V, H)}
    shapes |= {f"blk.0.{name}": shape for name, shape in recurrent.items()}
    return shapes | mlp_shapes(0, norm) | attention_shapes(1, True) | head_norms(1) | mlp_shapes(1, norm)


def mtp_shapes(i: int = 2) -> dict[str, tuple[int, ...]]:
    own = {"eh_proj": (H, 2 * H), "enorm": (H,), "hnorm": (H,), "shared_head_norm": (H,)}
    found = {f"blk.{i}.nextn.{name}.weight": shape for name, shape in own.items()}
    return found | attention_shapes(i, True) | head_norms(i) | mlp_shapes(i, "post_attention_norm")


def plain_shapes(arch: str, tied: bool, layers: int = 2) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (V, H), "output_norm.weight": (H,)}
    shapes |= {} if tied else {"output.weight": (V, H)}
    for i in range(layers):
        shapes |= attention_shapes(i) | mlp_shapes(i) | (head_norms(i) if arch == "qwen3" else {})
        if arch == "qwen2":
            shapes |= {
                f"blk.{i}.attn_{n}.bias": (size,) for n, size in (("q", HEADS * D), ("k", KV * D), ("v", KV * D))
            }
    return shapes


def model_file(
    path: Path, arch: str, shapes: dict, metadata: dict, kinds: dict | None = None, extra: dict | None = None
):
    """A model of random tensors, F32 where `kinds` (by the part of the name behind the block) says nothing.

    `metadata` are behind the architecture's name unless they begin with tokenizer, general or split; `extra` are
    tensors with their values. Returns the path and each tensor's values.
    """
    rng, tensors, values = np.random.default_rng(0), {}, {}
    for name, shape in shapes.items():
        part = name.removesuffix(".weight").rpartition(".")[2]
        kind = (kinds or {}).get(part, "F32")
        data = random_tensor(rng, kind, shape)
        if name.endswith("ssm_a"):
            data = (-np.abs(np.frombuffer(data, np.float32)) - 0.1).tobytes()
        tensors[name], values[name] = (kind, shape, data), dequantized(kind, data, shape)
    for name, x in (extra or {}).items():
        x = np.asarray(x, np.float32)
        tensors[name], values[name] = ("F32", x.shape, x.tobytes()), x
    top = ("tokenizer.", "general.", "split.")
    named = {key if key.startswith(top) else f"{arch}.{key}": value for key, value in metadata.items()}
    return write_gguf(path, {"general.architecture": arch} | named, tensors), values
