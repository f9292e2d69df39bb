"""GGUF files that were changed: each is refused in one line, or is what a plain reading of its numbers has."""

import math
import random
import struct

import mlx.core as mx
import numpy as np
import pytest
from gguf_kit import (
    BASE,
    HYBRID,
    TYPES,
    D,
    dequantized,
    hybrid_shapes,
    model_file,
    plain_shapes,
    random_tensor,
    write_gguf,
)
from gguf_models_kit import IDS, KINDS, hugging_faces
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from mutation_kit import little_memory, one_line  # noqa: F401

from specmlx.loading.inspect import inspect_path
from specmlx.targets.checkpoint import load_target

VALUES = [True, False, 0, 1, 2, 3, 4, 1 << 31, (1 << 32) - 1, 0.5, 2.0, -1.0, 1e38, 1e-45, math.nan, math.inf]
VALUES += ["", "linear", "none", "yarn", "4096", "x" * 500, "\n\x1b[2J", [], [1], [2, 1], [0.5], ["a"], [True, False]]
SCALING = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
# Nothing reads these.
UNUSED = {"general.name": "m", "general.file_type": 3, "general.quantization_version": 2, "vocab_size": 64}
# Of a hybrid's keys, those that change what it computes and no shape.
COMPUTED = ("layer_norm_rms_epsilon", "freq_base", "dimension_count", "scaling", "full_attention_interval", "recurrent")


def loaded(path):
    """The model of a file, or None where it is refused; inspect has no more to ask, and the file stays as it is."""
    before = path.read_bytes()
    found = one_line(lambda: load_target(path))
    report = one_line(lambda: inspect_path(path))
    assert found is None or all("has no tokenizer" in line for line in report.questions)
    assert path.read_bytes() == before
    return found and found[0]


def changed(rng: random.Random, metadata: dict) -> dict:
    metadata = dict(metadata)
    for key in rng.sample(sorted(metadata), rng.choice([1, 1, 2])):
        if rng.random() < 0.25:
            del metadata[key]
        elif type(metadata[key]) in (int, float) and rng.random() < 0.3:
            metadata[key] = type(metadata[key])(metadata[key] * rng.choice([2, 0.5]))
        else:
            metadata[key] = rng.choice(VALUES)
    return metadata


def config_of(arch: str, metadata: dict, values: dict) -> dict:
    """What a file's keys mean to mlx-lm; it is asked only of files that were accepted."""
    rope, heads = metadata.get("rope.scaling.type", "linear"), metadata["attention.head_count"]
    factor = metadata.get("rope.scaling.factor", 1.0)
    return dict(
        model_type=arch,
        hidden_size=metadata["embedding_length"],
        num_hidden_layers=metadata["block_count"],
        intermediate_size=metadata["feed_forward_length"],
        num_attention_heads=heads,
        num_key_value_heads=metadata.get("attention.head_count_kv", heads),
        head_dim=metadata.get("attention.key_length", metadata["embedding_length"] // heads),
        rms_norm_eps=metadata["attention.layer_norm_rms_epsilon"],
        vocab_size=len(values["token_embd.weight"]),
        max_position_embeddings=metadata["context_length"],
        rope_theta=metadata.get("rope.freq_base", 1e4),
        rope_scaling={"rope_type": "linear", "factor": factor} if rope == "linear" and factor else None,
        tie_word_embeddings="output.weight" not in values,
    )


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_changed_keys_of_a_plain_file_are_refused_or_give_mlx_lms_logits_on_its_values(arch, tmp_path):
    rng, whole = random.Random(20), BASE | {"block_count": 2} | SCALING | UNUSED
    whole |= {"attention.key_length": D, "attention.value_length": D} if arch == "qwen3" else {}
    shapes, count = plain_shapes(arch, arch == "llama"), 0
    for _ in range(60):
        metadata = changed(rng, whole)
        file, values = model_file(tmp_path / "m.gguf", arch, shapes, metadata)
        if (model := loaded(file)) is None:
            continue
        count += 1
        # What yarn means is compared with ggml in test_gguf_models.
        if metadata.get("rope.scaling.type") == "yarn":
            continue
        config = config_of(arch, metadata, values)
        model_class, args = _get_classes(config)
        theirs = model_class(args.from_dict(config))
        theirs.load_weights([*hugging_faces(values, arch == "llama").items()])
        assert mx.allclose(model.lm(IDS), theirs(IDS), 1e-4, 1e-4, equal_nan=True).item(), metadata
    assert 10 < count < 50


def test_changed_keys_of_a_hybrids_file_are_refused_or_change_only_what_they_mean(tmp_path):
    rng, whole = random.Random(21), HYBRID | {"block_count": 2} | SCALING | UNUSED
    file, _ = model_file(tmp_path / "m.gguf", "qwen35", hybrid_shapes(), whole)
    before, count = loaded(file)(IDS), 0
    for _ in range(60):
        metadata = changed(rng, whole)
        model_file(file, "qwen35", hybrid_shapes(), metadata)
        if (model := loaded(file)) is None:
            continue
        count += 1
        keys = {key for key in whole if metadata.get(key) != whole[key]}
        if not any(name in key for key in keys for name in COMPUTED):
            assert mx.array_equal(model(IDS), before).item(), metadata
        if "context_length" in metadata:
            assert model.config.max_position_embeddings == metadata["context_length"]
        assert model.config.rms_norm_eps == np.float32(metadata["attention.layer_norm_rms_epsilon"])
        assert model.config.rope_parameters["rope_theta"] == np.float32(metadata.get("rope.freq_base", 1e4))
    assert 8 < count < 55


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_changed_tensors_are_refused_or_have_the_values_that_numpy_reads(arch, tmp_path):
    rng, whole = random.Random(22), BASE | {"block_count": 1}
    whole |= {"attention.key_length": D} if arch == "qwen3" else {}
    file, numbers = tmp_path / "m.gguf", np.random.default_rng(0)
    metadata = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in whole.items()}
    tensors = {}
    for name, shape in plain_shapes(arch, False, layers=1).items():
        kind = KINDS[arch].get(name.removesuffix(".weight").rpartition(".")[2], "F32")
        tensors[name] = (kind, shape, random_tensor(numbers, kind, shape))
    values = {name: dequantized(kind, body, shape) for name, (kind, shape, body) in tensors.items()}
    outcomes = set()
    for _ in range(25):
        name, other = rng.sample(sorted(tensors), 2)
        kind, shape, body = tensors[name]
        spoilt, how = dict(tensors), rng.randrange(8)
        if how < 4:
            raw = bytearray(body)
            for _ in range(rng.randint(1, 4)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            start = rng.randrange(len(raw))
            if how == 2:
                raw[start : start + 40] = bytes(len(raw[start : start + 40]))
            elif how == 3:
                raw[start:] = raw[: len(raw) - start]
            spoilt[name] = (kind, shape, bytes(raw))
        elif how == 4:
            spoilt[name], spoilt[other] = tensors[other], tensors[name]
        elif how == 5:
            spoilt[name] = (rng.choice([*TYPES]), shape, body)
        elif how == 6:
            spoilt[name] = (kind, rng.choice([shape[::-1], (*shape, 1), shape[:1], (2, *shape)]), body)
        else:
            spoilt[rng.choice([name + "x", "blk.9." + name, "v.blk.0.x.weight"])] = spoilt.pop(name)
        write_gguf(file, metadata, spoilt)
        model = loaded(file)
        outcomes.add(model is None)
        if model is None:
            continue
        new = dict(values)
        for other, (kind, shape, body) in spoilt.items():
            if spoilt[other] != tensors[other]:
                _, count, size, _ = TYPES[kind]
                new[other] = dequantized(kind, body[: math.prod(shape) // count * size], shape)
        held = dict(tree_flatten(model.lm.parameters()))
        for place, want in hugging_faces(new, arch == "llama").items():
            got, stem = held[place], place.removesuffix(".weight")
            if scales := [held[f"{stem}.{key}"] for key in ("scales", "biases") if f"{stem}.scales" in held]:
                got = mx.dequantize(got, *scales, 32, got.shape[-1] // scales[0].shape[-1])
            assert mx.allclose(got, want.reshape(got.shape), 1e-5, 1e-6, equal_nan=True).item(), (name, how)
    assert outcomes == {True, False}


def test_changed_bytes_of_a_file_are_refused_or_read_as_mlxs_own_reader_has_them(tmp_path):
    rng, outcomes = random.Random(23), set()
    shapes, metadata = plain_shapes("llama", True, 1), BASE | {"block_count": 1} | SCALING | UNUSED
    file, _ = model_file(tmp_path / "m.gguf", "llama", shapes, metadata)
    data = file.read_bytes()
    head = len(data) - 4 * sum(map(math.prod, shapes.values()))
    for n in range(75):
        spoilt = bytearray(data)
        at = rng.randrange(8, head)
        if n % 5 == 0:
            spoilt[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 31, 1 << 31, 1 << 40, (1 << 64) - 1]))
        elif n % 5 == 1:
            spoilt = spoilt[:at] if n % 2 else spoilt + spoilt[:at]
        elif n % 5 == 2:
            spoilt[at : at + 20] = spoilt[at + 20 : at + 40]
        else:
            spoilt[at] ^= 1 << rng.randrange(8)
        file.write_bytes(spoilt)
        model = loaded(file)
        outcomes.add(model is None)
        if model is not None:
            arrays = mx.load(str(file))
            theirs = arrays["blk.0.ffn_down.weight"]
            assert mx.array_equal(model.layers[0].mlp.down_proj.weight, theirs, equal_nan=True).item()
            assert mx.array_equal(model.lm.model.norm.weight, arrays["output_norm.weight"], equal_nan=True).item()
    assert outcomes == {True, False}


@pytest.mark.parametrize("name", ["a\nb", "x" * 201, "\x1b[2J"])
def test_a_name_that_no_message_can_show_is_none_of_a_tensor_or_a_key(name, tmp_path):
    for key, tensor in ((name, "a"), ("a", name)):
        write_gguf(tmp_path / "m.gguf", {key: 1}, {tensor: ("F32", (1,), bytes(4))})
        with pytest.raises(ValueError, match=r"^.+ is no name of a tensor or a key$"):
            load_target(tmp_path / "m.gguf")
