"""GGUF targets: every block format's values to the last bit, llama.cpp's order of heads, what can't be read."""

import json
import shutil
import struct
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from rig import small_tokenizer

import specmlx
from specmlx.formats.gguf import TYPES, read_gguf
from specmlx.formats.gguf_blocks import BITS, DENSE, to_mlx
from specmlx.loading.convert import convert
from specmlx.targets.checkpoint import load_target

GOLDENS = Path(__file__).parents[1] / "goldens" / "gguf"
SIZES = {kind: size for kind, _, size in TYPES.values()}


@pytest.mark.parametrize("kind", [*BITS, *DENSE])
def test_every_value_of_a_type_is_the_one_that_ggufs_own_package_reads(kind):
    goldens = mx.load(str(GOLDENS / "blocks.safetensors"))
    blocks = np.array(goldens[f"{kind}.blocks"]).reshape(-1, SIZES[kind])
    layer = to_mlx(kind, blocks, (4, 256))
    assert ("scales" in layer) == (kind in BITS)
    if kind in BITS:
        values = mx.dequantize(*layer.values(), group_size=32, bits=BITS[kind])
    else:
        values = layer["weight"].astype(mx.float32)
    assert mx.array_equal(values, goldens[f"{kind}.values"]).item()


@pytest.mark.parametrize("kind", [*BITS, "Q6_K"])
def test_a_scale_that_is_not_finite_is_refused(kind):
    blocks = np.array(mx.load(str(GOLDENS / "blocks.safetensors"))[f"{kind}.blocks"]).reshape(-1, SIZES[kind]).copy()
    at = 208 if kind == "Q6_K" else 0
    for bits in (0x7C00, 0x7E00):
        blocks[1, at : at + 2] = np.frombuffer(struct.pack("<H", bits), np.uint8)
        with pytest.raises(ValueError, match="not finite, so the file is corrupt"):
            to_mlx(kind, blocks, (4, 256))


@pytest.mark.parametrize("name", ["model", "experts"])
def test_a_file_gives_the_logits_of_transformers_on_the_values_that_it_holds(name):
    expected = mx.load(str(GOLDENS / f"{name}.safetensors"))
    with pytest.raises(ValueError, match="model_config can't change"):
        load_target(GOLDENS / f"{name}.gguf", model_config={"hidden_size": 8})
    model, config = load_target(GOLDENS / f"{name}.gguf")
    assert config["num_hidden_layers"] == 2 and model.layers[0].linear_attn.in_proj_qkv.bits == 8
    logits = model.verify(model.new_states(), expected["tokens"][None]).logits[0]
    assert mx.allclose(logits, expected["logits"], rtol=0, atol=2e-5).item()


def write_gguf(path: Path, tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> Path:
    """A file without metadata of tensors (type, shape, data), whose data's sizes are multiples of 32 bytes."""
    header, offset = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0), 0
    for name, (kind, shape, data) in tensors.items():
        header += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", kind, offset)
        offset += len(data)
    header += bytes(-len(header) % 32)
    path.write_bytes(header + b"".join(data for _, _, data in tensors.values()))
    return path


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_packed_tensor_is_that_of_mlxs_own_reader_where_it_has_one(kind, tmp_path):
    blocks = np.array(mx.load(str(GOLDENS / "blocks.safetensors"))[f"{kind}.blocks"])
    code = next(code for code, (name, _, _) in TYPES.items() if name == kind)
    path = write_gguf(tmp_path / "one.gguf", {"t.weight": (code, (4, 256), blocks.tobytes())})
    file, theirs = read_gguf(path), mx.load(str(path))
    ours = to_mlx(kind, file.blocks("t.weight"), file.tensors["t.weight"].shape)
    assert {f"t.{key}" for key in ours} == theirs.keys()
    for key, value in ours.items():
        assert mx.array_equal(value, theirs[f"t.{key}"].astype(value.dtype)).item(), key


def test_a_files_own_tokenizer_gives_the_ids_of_transformers(tmp_path):
    shutil.copy(GOLDENS / "tokenized.gguf", tmp_path)
    for name in (tmp_path, tmp_path / "tokenized.gguf"):
        model, tokenizer = specmlx.load(str(name))
        for text in json.loads((GOLDENS / "tokenized.json").read_text()):
            assert tokenizer.encode(text["text"], add_special_tokens=False) == text["ids"]
            assert tokenizer.decode(text["ids"]) == text["decoded"]
    (end,) = tokenizer.eos_token_ids
    assert tokenizer.decode([end]) == "<|im_end|>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert chat == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant"
    streamed = [r.text for r in specmlx.stream_generate(model, tokenizer, "Hello", 8)]
    assert len(streamed) >= 1
    converted = convert(str(tmp_path / "tokenized.gguf"), tmp_path / "out")
    assert mlx_lm.load(str(converted))[1].encode("Hello fox") == tokenizer.encode("Hello fox")


def test_a_directory_with_a_tokenizer_generates_and_one_without_says_so(tmp_path):
    shutil.copy(GOLDENS / "model.gguf", tmp_path)
    with pytest.raises(ValueError, match="model.gguf has no tokenizer that can be used .*: put the model's"):
        specmlx.load(str(tmp_path / "model.gguf"))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match="can't load the tokenizer of "):
        specmlx.load(str(tmp_path / "model.gguf"))
    small_tokenizer(tmp_path)
    for name in (tmp_path, tmp_path / "model.gguf"):
        model, tokenizer = specmlx.load(str(name), dtype="float16")
        assert model.dtype == mx.float16
        assert specmlx.generate(model, tokenizer, [1, 2, 3], max_tokens=4) is not None


def edited(path: Path, change) -> Path:
    """A copy of the model's file with other bytes."""
    file = path / "other.gguf"
    file.write_bytes(change((GOLDENS / "model.gguf").read_bytes()))
    return file


def typed(data: bytes, name: bytes, kind: int) -> bytes:
    """The same file with another type for a tensor `[64, 64]`."""
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 16
    return data[:at] + struct.pack("<I", kind) + data[at + 4 :]


WRONG = {
    "another architecture": (lambda data: data.replace(b"qwen35", b"llama3", 1), "'llama3': of GGUF files"),
    "a missing key": (lambda data: data.replace(b"qwen35.ssm.state_size", b"qwen35.ssm.state_syze"), "ssm.state_size"),
    "a stranger": (
        lambda data: data.replace(b"blk.0.ssm_out", b"blk.0.ssm_oot"),
        "ssm_oot.weight: a qwen3_5 model has no such tensor",
    ),
    "cut": (lambda data: data[:-5000], "it may be cut"),
    "cut in the header": (lambda data: data[:1000], "in the middle of its header"),
    "empty": (lambda data: b"", "no whole GGUF file"),
    "something else": (lambda data: b"PK" + data[2:], "does not begin with GGUF"),
    "version 1": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version is 1"),
    "no such type": (lambda data: typed(data, b"output.weight", 99), "type 99"),
    "a type without a layout": (
        lambda data: typed(data, b"output.weight", 20),
        "output.weight: IQ4_NL has no exact layout",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_can_not_be_read_is_refused_in_one_line(case, tmp_path):
    change, word = WRONG[case]
    file = edited(tmp_path, change)
    with pytest.raises(ValueError) as error:
        load_target(file)
    assert word in str(error.value) and "\n" not in str(error.value) and str(file) in str(error.value)


def test_a_directory_of_several_models_is_refused(tmp_path):
    shutil.copy(GOLDENS / "model.gguf", tmp_path / "b-00001-of-00001.gguf")
    assert load_target(tmp_path)[1]["num_hidden_layers"] == 2
    shutil.copy(GOLDENS / "model.gguf", tmp_path / "c.gguf")
    with pytest.raises(ValueError, match="has several models"):
        load_target(tmp_path)
    assert load_target(tmp_path / "b-00001-of-00001.gguf")[1]["num_hidden_layers"] == 2
    (tmp_path / "b-00001-of-00001.gguf").rename(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=r"has several models \(a.gguf, c.gguf …\): name one file"):
        load_target(tmp_path)


def test_a_missing_part_of_a_split_file_is_named(tmp_path):
    shutil.copy(GOLDENS / "model.gguf", tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(ValueError, match="m-00002-of-00002.gguf is missing"):
        load_target(tmp_path)
