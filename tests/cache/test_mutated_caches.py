"""Files of conversations that were changed: each ends in one line, or goes on as an independent reading has it."""

import json
import os
import random

import mlx.core as mx
import pytest
from click.testing import CliRunner
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.cache import load_prompt_cache as stock_load
from mutation_kit import mutated, one_line
from rig import SMALL, mlx_lm_twin, small_tokenizer, tiny

from specmlx import PromptCache
from specmlx.cache.files import CONVERSATION, PROMPTS
from specmlx.cli import main
from specmlx.formats.checkpoint import safetensors
from specmlx.formats.sealed import load_sealed, save_sealed
from specmlx.generation.generate import stream_generate
from specmlx.generation.prompt_cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from specmlx.loading.load import load

IDS = [*range(3, 74)]


@pytest.fixture(scope="module")
def model():
    return tiny(3, **SMALL)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    """A whole file of each kind."""
    path = tmp_path_factory.mktemp("whole")
    for kind, options in (("conversation", {}), ("int8", {"kv_bits": "int8", "quantized_kv_start": 0})):
        talk = make_prompt_cache(model)
        list(stream_generate(model, tokenizer, IDS, 2, prompt_cache=talk, **options))
        save_prompt_cache(path / kind, talk)
    cache = PromptCache(keep_answers=True)
    list(stream_generate(model, tokenizer, IDS, 2, draft_model="ngram", prompt_cache=cache))
    cache.save(path / "prompts")
    stock = model.make_cache()
    list(stream_generate(model, tokenizer, IDS, 2, prompt_cache=stock))
    save_prompt_cache(str(path / "stock.safetensors"), stock, {"model": "demo"})
    return path


def mutated_arrays(rng: random.Random, arrays: dict) -> dict:
    """The arrays with one of them of another shape, dtype, value or name, or gone."""
    changed, name = dict(arrays), rng.choice(sorted(arrays))
    x, how = mx.atleast_1d(changed[name]), rng.randrange(7)
    if how == 0:
        del changed[name]
    elif how == 1:
        changed[rng.choice(["x", "9.S", name + "0"])] = changed.pop(name)
    elif how == 2:
        changed[name] = x.reshape(-1)
    elif how == 3:
        changed[name] = mx.concatenate([x, x], axis=rng.randrange(x.ndim))
    elif how == 4:
        changed[name] = x.astype(rng.choice([mx.int32, mx.float16, mx.uint8, mx.float32]))
    elif how == 5:
        changed[name] = x[:0]
    else:
        changed[name] = x + 1
    return changed


def resealed(rng, source, target, format):
    """A changed file with the right checksum; some of its metadata or one of its arrays are not as they were."""
    arrays, header = load_sealed(source, format)
    header.pop("format")
    if rng.random() < 0.5:
        name = rng.choice(sorted(header))
        value = mutated(rng, json.loads(header[name]))
        header[name] = rng.choice([json.dumps(value)] * 9 + ["{", "[" * 9000])
    else:
        arrays = mutated_arrays(rng, arrays)
    save_sealed(target, arrays, header, format)


@pytest.mark.parametrize("kind", ["conversation", "int8"])
def test_a_changed_conversation_is_refused_or_goes_on(kind, model, tokenizer, folder, tmp_path):
    rng, outcomes = random.Random(0), set()
    for _ in range(60):
        resealed(rng, folder / kind, tmp_path / "a", CONVERSATION)

        def goes_on():
            talk, metadata = load_prompt_cache(tmp_path / "a", return_metadata=True)
            arrays, header = mx.load(str(tmp_path / "a"), format="safetensors", return_metadata=True)
            assert metadata == json.loads(header["metadata"]) and talk.processed == json.loads(header["processed"])
            held = [x for layer in talk.states.layers if layer is not None for x in layer.arrays()]
            assert sum(x.nbytes for x in held) == sum(x.nbytes for x in arrays.values())
            return [r.token for r in stream_generate(model, tokenizer, [5], 2, prompt_cache=talk)]

        outcomes.add(one_line(goes_on) is None)
    assert outcomes == {True, False}


def test_a_changed_file_of_prompts_is_refused_or_serves(model, tokenizer, folder, tmp_path):
    rng, outcomes = random.Random(1), set()
    cold = [r.token for r in stream_generate(model, tokenizer, [*IDS, 5, 6], 2)]
    for _ in range(75):
        resealed(rng, folder / "prompts", tmp_path / "a", PROMPTS)

        def serves():
            cache = PromptCache()
            cache.load(tmp_path / "a")
            found = [*stream_generate(model, tokenizer, [*IDS, 5, 6], 2, draft_model="ngram", prompt_cache=cache)]
            # What was not found is run again.
            if not found[-1].cached_tokens:
                assert [r.token for r in found] == cold
            return found

        outcomes.add(one_line(serves) is None)
    assert outcomes == {True, False}


def test_a_changed_cache_of_mlx_lms_is_refused_or_goes_on_as_mlx_lm_has_it(model, tokenizer, folder, tmp_path):
    rng, outcomes, file = random.Random(2), set(), str(tmp_path / "a.safetensors")
    twin = mlx_lm_twin(model, **SMALL)
    arrays, header = mx.load(str(folder / "stock.safetensors"), return_metadata=True)
    for _ in range(75):
        changed, metadata = arrays, header
        if rng.random() < 0.5:
            name = rng.choice(sorted(header))
            metadata = dict(header)
            metadata.pop(name)
            if rng.random() < 0.7:
                other = rng.choice([name, "1.0", "1.9", "2.1.1", "x"])
                metadata[other] = rng.choice(["KVCache", "ArraysCache", "mx", "scalar", "none", "string", ""])
        else:
            changed = mutated_arrays(rng, arrays)
        (tmp_path / "a.safetensors").write_bytes(b"".join(map(bytes, safetensors(changed, metadata))))

        def goes_on():
            caches = load_prompt_cache(file)
            given = [r.token for r in stream_generate(model, tokenizer, [5], 3, prompt_cache=caches)]
            steps = generate_step(mx.array([5]), twin, max_tokens=3, prompt_cache=stock_load(file))
            assert given == [int(token) for token, _ in steps]
            return given

        outcomes.add(one_line(goes_on) is None)
    assert outcomes == {True, False}


@pytest.mark.parametrize("kind", ["conversation", "prompts", "stock.safetensors"])
def test_bytes_that_are_changed_cut_or_added_are_noticed(kind, folder, tmp_path):
    rng, data, file = random.Random(3), (folder / kind).read_bytes(), tmp_path / kind
    length = int.from_bytes(data[:8], "little")

    def read():
        return load_prompt_cache(str(file)) if kind != "prompts" else PromptCache().load(file)

    spoilt = [
        data + b"\0",
        data + data,
        data[:-1],
        data[: 8 + length],
        data[:7],
        (1 << 62).to_bytes(8, "little") + data,
    ]
    for _ in range(25):
        other = bytearray(data)
        other[rng.randrange(8, 8 + length)] ^= 1 << rng.randrange(8)
        spoilt.append(bytes(other))
    for other in spoilt:
        file.write_bytes(other)
        found = one_line(read)
        # What mlx-lm writes has no checksum.
        assert found is None or kind == "stock.safetensors"
    with file.open("wb") as sparse:
        sparse.write((8 << 30).to_bytes(8, "little"))
        sparse.truncate(9 << 30)
    assert one_line(read) is None
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match="is a FIFO, not a regular file"):
        read()


def test_a_file_that_can_not_be_used_is_left_as_it_is_by_every_command(folder, tmp_path):
    model, tokenizer = load(draft_model=None)
    cache, file = PromptCache(keep_answers=True), tmp_path / "a"
    list(stream_generate(model, tokenizer, IDS, 2, prompt_cache=cache))
    cache.save(file, {"model": "demo"})
    arrays, header = load_sealed(file, PROMPTS)
    header.pop("format")
    whole = file.read_bytes()
    save_sealed(file, {name: x for name, x in arrays.items() if not name.endswith(".kv.1")}, header, PROMPTS)
    for data, says in ((file.read_bytes(), "in 1 arrays"), (whole + b"x", "damaged"), (b"", "no specmlx-prompts")):
        file.write_bytes(data)
        for args in (["chat", "--prompt-cache-file"], ["cache", "list"], ["generate", "--prompt-cache-file"]):
            result = CliRunner().invoke(main, [*args, str(file)], input="Hello\n")
            assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1, result.output
            assert says in result.stderr or not data
        assert file.read_bytes() == data


def test_states_of_other_sizes_under_the_models_own_name_are_refused(model, tokenizer, tmp_path):
    other = tiny(3, **SMALL | {"num_key_value_heads": 1})
    talk, cache = make_prompt_cache(other), PromptCache(keep_answers=True)
    for held in (talk, cache):
        list(stream_generate(other, tokenizer, IDS, 2, prompt_cache=held))
    talk.model = model.fingerprint
    save_prompt_cache(tmp_path / "a", talk)
    cache.save(tmp_path / "b")
    arrays, header = load_sealed(tmp_path / "b", PROMPTS)
    header.pop("format")
    header["snapshots"] = header["snapshots"].replace(other.fingerprint, model.fingerprint)
    save_sealed(tmp_path / "b", arrays, header, PROMPTS)
    loaded = PromptCache()
    loaded.load(tmp_path / "b", model.fingerprint)
    for held in (load_prompt_cache(tmp_path / "a"), loaded):
        with pytest.raises(ValueError, match="layer 1 is another model's"):
            list(stream_generate(model, tokenizer, [*IDS, 5, 6], 2, prompt_cache=held))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_cache_of_mlx_lms_whose_state_is_not_two_arrays_is_refused(count, model, tokenizer):
    caches = model.make_cache()
    caches[0] = ArraysCache(count)
    with pytest.raises(ValueError, match=f"layer 0 has {count} arrays, not the 2 of a state"):
        list(stream_generate(model, tokenizer, IDS, 1, prompt_cache=caches))


@pytest.mark.parametrize("change", [{"left_padding": [3]}, {"lengths": [9]}, {"lengths": "x"}])
def test_a_cache_of_a_padded_batch_of_mlx_lms_is_refused(change, model, tokenizer):
    caches = model.make_cache()
    for name, value in change.items():
        setattr(caches[0], name, value if isinstance(value, str) else mx.array(value))
    with pytest.raises(ValueError, match="layer 0 is of a batch with padding"):
        list(stream_generate(model, tokenizer, IDS, 1, prompt_cache=caches))
