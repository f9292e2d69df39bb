"""Files that were made to break a reader: each loads or ends in one line, and none takes memory that it has not."""

import json
import os
import random
import resource
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import save_config, save_model
from rig import TINY, mlx_lm_twin, small_tokenizer, tiny

from specmlx.loading.inspect import inspect_path
from specmlx.loading.load import load, load_drafter, resolve
from specmlx.targets.checkpoint import load_target
from specmlx.targets.gguf_tokenizer import tokenizer_files

SMALL = TINY | {"num_hidden_layers": 2, "full_attention_interval": 2}
GGUF = Path(__file__).parents[1] / "goldens" / "gguf" / "tokenized.gguf"
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    1 << 31,
    -(1 << 31),
    1 << 62,
    1 << 200,
    0.5,
    -3.0,
    1e308,
    "",
    "x",
    "../../etc/passwd",
]
VALUES += ["a" * 5000, [], [[]], {}, {"a": 1}, [1] * 9, [None], ["full_attention"], [-1, 2], float("nan"), float("inf")]
TOGETHER = 200 << 20


def outcome(path: Path) -> str:
    """The one line that a path is refused with, or "loads"."""
    said = one_line(lambda: inspect_path(path))
    if path.suffix == ".gguf":
        said = one_line(lambda: tokenizer_of(path)) or said
    return one_line(lambda: load_target(path, lazy=True)) or said or "loads"


def tokenizer_of(path: Path) -> None:
    with tokenizer_files(path):
        pass


def one_line(call: Callable[[], Any]) -> str:
    """What a call was refused with, if it was."""
    try:
        call()
    except ValueError as error:
        assert "\n" not in str(error) and 10 < len(str(error)) < 900, str(error)[:300]
        return str(error)
    return ""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    config = json.loads(json.dumps(SMALL))
    save_model(path, mlx_lm_twin(tiny(0, mx.float16, **config), **config))
    save_config(config, path / "config.json")
    return path


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture(autouse=True)
def little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    assert grown < TOGETHER and mx.get_peak_memory() - held < TOGETHER


@pytest.mark.filterwarnings("ignore:.*lm_head is kept")
def test_500_mutated_configs_load_or_are_refused_in_one_line(copy):
    rng = random.Random(0)
    original = json.loads((copy / "config.json").read_text())
    keys, seen = [*original, "text_config", "quantization", "quantization_config", "num_experts", "layer_types"], set()
    for _ in range(500):
        config = json.loads(json.dumps(original))
        if rng.random() < 0.15:
            config = {"model_type": "qwen3_5", "text_config": config}
        part = rng.choice([config, config.get("text_config", config)])
        for key in rng.sample(keys, rng.choice([1, 1, 2])):
            value = rng.choice(VALUES)
            if isinstance(part.get(key), dict) and rng.random() < 0.7:
                part[key] = part[key] | {rng.choice([*part[key], "factor", "bits", "group_size", "mode"]): value}
            else:
                part[key] = value
        (copy / "config.json").write_text(json.dumps(config))
        seen.add(outcome(copy).replace(str(copy), "")[:40])
    assert "loads" in seen and len(seen) > 25


def test_config_files_that_are_no_config_are_refused_in_one_line(copy):
    for text in (
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"1" * 10_000,
        b'"' + b"x" * 99,
    ):
        (copy / "config.json").write_bytes(text)
        assert "config.json" in outcome(copy)
    (copy / "config.json").write_text(json.dumps(SMALL | {"model_file": "../../evil.py", "model_type": "llama"}))
    assert outcome(copy) != "loads"


def test_300_mutated_safetensors_headers_are_refused_in_one_line_or_change_nothing(copy):
    rng = random.Random(1)
    file = copy / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body, seen = json.loads(data[8 : 8 + length]), data[8 + length :], set()
    names = [name for name in header if name != "__metadata__"]
    for _ in range(300):
        new = json.loads(json.dumps(header))
        name = rng.choice(names)
        kind = rng.randrange(7)
        if kind == 0:
            new[name][rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(VALUES)
        elif kind == 1:
            new[name]["data_offsets"] = [rng.choice([-8, 0, 64, 1 << 40]), rng.choice([-1, 0, 128, 1 << 62])]
        elif kind == 2:
            new[name]["shape"] = [rng.choice([-1, 0, 1 << 31, 1 << 62, 3]) for _ in range(rng.randrange(6))]
        elif kind == 3:
            new[rng.choice(["../../etc/passwd", "", "x" * 9000, "language_model.model.norm.weight"])] = new.pop(name)
        elif kind == 4:
            new[name] = rng.choice(VALUES)
        elif kind == 5:
            other = rng.choice(names)
            new[name]["data_offsets"] = new[other]["data_offsets"]
        text = json.dumps(new).encode()
        size = len(text)
        if kind == 6:
            spoilt = bytearray(text)
            for _ in range(rng.randint(1, 6)):
                spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
            text, size = bytes(spoilt), rng.choice([size, size, size + 1, 0, 1, 1 << 40, (1 << 64) - 1])
        file.write_bytes(size.to_bytes(8, "little") + text + body)
        seen.add(outcome(copy).replace(str(copy), "")[:60])
    assert len(seen) > 10
    for text in (b"[" * 100_000, b"{}" + b" " * 100, b'{"a": {"dtype": "F64", "shape": [0], "data_offsets": [0, 0]}}'):
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        assert outcome(copy) != "loads"


def test_200_mutated_gguf_headers_are_refused_in_one_line_or_load(tmp_path):
    rng = random.Random(2)
    data, seen = GGUF.read_bytes(), set()
    # Places of lengths, counts and types, and of the tokenizer's strings, are in the first 16,000 bytes.
    for i in range(200):
        spoilt = bytearray(data)
        if i % 4 == 0:
            at = rng.choice([8, 16, 24, rng.randrange(24, 16000)])
            spoilt[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1]))
        elif i % 4 == 1:
            spoilt = spoilt[: rng.randrange(len(spoilt))]
        else:
            for _ in range(rng.randint(1, 4)):
                spoilt[rng.randrange(4, 16000)] = rng.choice([0, 1, 8, 9, 255, rng.randrange(256)])
        file = tmp_path / "m.gguf"
        file.write_bytes(spoilt)
        seen.add(outcome(file).replace(str(file), "")[:50])
    assert len(seen) > 15


def test_arrays_in_arrays_of_a_gguf_end_at_a_depth(tmp_path):
    value = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0)
    key = struct.pack("<Q", 1) + b"k" + value
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + bytes(64))
    assert "at depth 4" in outcome(tmp_path / "m.gguf")


FILES = ["config.json", "generation_config.json", "hf_quant_config.json", "model.safetensors.index.json"]
FILES += ["model-extra.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json"]


@pytest.mark.parametrize("kind", ["fifo", "link", "sparse"])
def test_a_file_that_is_none_or_endless_is_refused_wherever_a_model_has_files(kind, copy):
    small_tokenizer(copy)
    # The index that mlx-lm wrote: without it all files count.
    (copy / "model.safetensors.index.json").unlink()
    for name in FILES:
        file, kept = copy / name, copy.parent / "kept"
        if file.exists():
            file.rename(kept)
        if kind == "fifo":
            os.mkfifo(file)
        elif kind == "link":
            file.symlink_to("/dev/zero")
        else:
            with file.open("wb") as stream:
                stream.truncate(1 << 33)
        said = one_line(lambda: load(str(copy), draft_model=None))
        assert name in said, (name, said)
        file.unlink()
        if kept.exists():
            kept.rename(file)
    os.mkfifo(copy.parent / "m.gguf")
    assert "is a FIFO" in one_line(lambda: inspect_path(copy.parent / "m.gguf"))


@pytest.mark.parametrize("value", [(9, 0, 1 << 33), (9, 8, 1 << 28), (8, 1 << 33)])
def test_a_gguf_header_is_bounded_by_what_a_model_needs_and_not_by_the_files_size(value, tmp_path):
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<I", value[0])
    key += struct.pack("<IQ", *value[1:]) if len(value) == 3 else struct.pack("<Q", value[1])
    with (tmp_path / "m.gguf").open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 40) + key)
        # Sparse: it takes no room on the disk.
        file.truncate(9 << 30)
    assert "no model" in outcome(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_100_mutated_drafter_configs_load_or_are_refused_in_one_line(kind, tmp_path):
    rng = random.Random(3)
    path = tmp_path / "copy"
    shutil.copytree(resolve(f"demo/{kind}"), path)
    target, _ = load("demo", draft_model=None)
    original, seen = json.loads((path / "config.json").read_text()), set()
    for _ in range(100):
        config = json.loads(json.dumps(original))
        part = rng.choice([config, config, config.get("dflash_config") or config])
        for key in rng.sample(sorted(part), rng.choice([1, 1, 2])):
            part[key] = rng.choice(VALUES)
        (path / "config.json").write_text(json.dumps(config))
        one_line(lambda: inspect_path(path))
        seen.add(one_line(lambda: load_drafter(str(path), target)).replace(str(path), "")[:60])
    assert len(seen) > 10
