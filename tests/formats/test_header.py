"""Headers of files: what each number may be, and which are refused."""

import json
import os
import struct
from pathlib import Path

import pytest

from specmlx.formats.checkpoint import read_config
from specmlx.formats.gguf import read_gguf
from specmlx.formats.header import entries, header_length, read_header, read_small, regular_size

A = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
B = {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]}


def test_a_header_gives_each_tensors_dtype_shape_and_place():
    found = entries(json.dumps({"b": B, "a": A, "__metadata__": {"format": "pt"}}).encode(), 22)
    assert {name: (e.dtype, e.shape, e.start, e.end, e.nbytes) for name, e in found.items()} == {
        "a": ("F32", (2, 2), 0, 16, 16),
        "b": ("BF16", (3,), 16, 22, 6),
    }
    empty = {"dtype": "I64", "shape": [0, 5], "data_offsets": [16, 16]}
    half = {"dtype": "F4", "shape": [4], "data_offsets": [16, 18]}
    assert len(entries(json.dumps({"a": A, "e": empty, "h": half}).encode(), 18)) == 3


@pytest.mark.parametrize(
    ("header", "size", "word"),
    [
        ({"a": A, "b": B | {"data_offsets": [8, 14]}}, 16, "gap or an overlap before 'b'"),
        ({"a": A, "b": B | {"data_offsets": [20, 26]}}, 26, "gap or an overlap before 'b'"),
        ({"a": A, "b": A}, 16, "gap or an overlap"),
        ({"a": A}, 17, "17 bytes behind its header, which says 16"),
        ({"a": A}, 12, "12 bytes behind its header, which says 16"),
        ({"a": A | {"shape": [2, 3]}}, 16, "says 16 bytes for 'a', a F32 of [2, 3]"),
        ({"a": A | {"shape": [1 << 62, 1 << 62]}}, 16, "says 16 bytes for 'a'"),
        ({"a": A | {"data_offsets": [16, 0]}}, 16, "says -16 bytes"),
        ({"a": A | {"data_offsets": [-16, 0]}}, 16, "none of safetensors'"),
        ({"a": A | {"data_offsets": [0, 1 << 70]}}, 16, "none of safetensors'"),
        ({"a": A | {"data_offsets": [0.0, 16]}}, 16, "none of safetensors'"),
        ({"a": A | {"shape": [True, 4]}}, 16, "none of safetensors'"),
        ({"a": A | {"dtype": "F128"}}, 16, "none of safetensors'"),
        ({"a": A | {"dtype": ["F32"]}}, 16, "none of safetensors'"),
        ({"a": [0, 16]}, 16, "none of safetensors'"),
        ([A], 16, "no object"),
    ],
)
def test_a_header_whose_numbers_can_not_be_is_refused(header, size, word):
    with pytest.raises(ValueError) as error:
        entries(json.dumps(header).encode(), size)
    assert word in str(error.value)


def test_a_name_that_is_there_twice_is_refused():
    with pytest.raises(ValueError, match="a name twice"):
        entries(f'{{"a": {json.dumps(A)}, "a": {json.dumps(A)}}}'.encode(), 16)


LENGTHS = [(b"", 0), (b"\x02" + bytes(7), 9), (b"\x01" + bytes(7), 99), (b"\xff" * 8, 99)]


@pytest.mark.parametrize(("first", "size"), [*LENGTHS, ((10**9).to_bytes(8, "little"), 10**10)])
def test_a_header_longer_than_its_file_is_refused(first, size):
    with pytest.raises(ValueError, match="no safetensors header"):
        header_length(first, size)


def refusal(read, file: Path) -> str:
    with pytest.raises(ValueError) as error:
        read(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def config(file: Path) -> dict:
    return read_config(file.parent, file.name)


@pytest.mark.parametrize("read", [regular_size, read_small, read_header, config])
def test_only_regular_files_are_opened_and_links_are_followed(read, tmp_path):
    text = json.dumps({"a": A}).encode()
    (tmp_path / "whole").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    (tmp_path / "link").symlink_to("whole")
    if read in (regular_size, read_header):
        assert read(tmp_path / "link") == read(tmp_path / "whole")
    # Opening it would wait for a writer for ever.
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "behind").symlink_to("fifo")
    assert "is a FIFO, not a regular file" in refusal(read, tmp_path / "fifo")
    assert "is a FIFO" in refusal(read, tmp_path / "behind")
    (tmp_path / "folder").mkdir()
    assert "is a directory" in refusal(read, tmp_path / "folder")
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert "is a device" in refusal(read, tmp_path / "zero")
    refusal(read, tmp_path / "missing")


def test_a_sparse_file_of_8_gib_is_refused_without_reading_it(tmp_path):
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.write((1 << 33).to_bytes(8, "little"))
        stream.truncate(1 << 33)
    assert "no safetensors header" in refusal(read_header, file)
    assert "bytes" in refusal(read_small, file)
    assert "bytes" in refusal(config, file)


def gguf(path: Path, *tensors: tuple[str, tuple[int, ...], int, int], data: int = 256) -> Path:
    """A file of tensors (name, shape, type, offset)."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0)
    for name, shape, kind, offset in tensors:
        header += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(data))
    return path


def test_a_gguf_header_gives_shapes_with_the_fastest_axis_last(tmp_path):
    file = read_gguf(gguf(tmp_path / "m.gguf", ("a", (4, 2), 0, 0), ("b", (32,), 8, 32)))
    assert file.tensors["a"].shape == (2, 4) and file.tensors["b"].end - file.tensors["b"].start == 34


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ([("a", (8,), 0, 0), ("b", (8,), 0, 0)], "tensors a and b overlap"),
        ([("a", (16,), 0, 0), ("b", (8,), 0, 32)], "tensors a and b overlap"),
        ([("a", (8,), 0, 0), ("a", (8,), 0, 32)], "two tensors named a"),
        ([("a", (8,), 0, 8)], "would lie at"),
        ([("a", (8,), 0, 1 << 40)], "would lie at"),
        ([("a", (512,), 0, 0)], "would lie at"),
        ([("a", (33,), 8, 0)], "Q8_0 comes in rows of 32"),
        ([("a", (1 << 40, 1 << 40), 0, 0)], "can't hold"),
        ([("a", (0,), 0, 0)], "can't hold"),
        ([("a", (1, 1, 1, 1, 1), 0, 0)], "has 5 axes"),
    ],
)
def test_a_gguf_header_whose_numbers_can_not_be_is_refused(tensors, word, tmp_path):
    with pytest.raises(ValueError) as error:
        read_gguf(gguf(tmp_path / "m.gguf", *tensors))
    assert word in str(error.value) and "\n" not in str(error.value)
