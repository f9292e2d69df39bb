"""config.json files that were changed: each is refused in one line, or read as mlx-lm and transformers read it."""

import json
import random
from pathlib import Path

import mlx.core as mx
import pytest
from drafter_kit import case_weights, golden_config, golden_drafter, golden_target, propose, write_drafter
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5
from mlx_lm.utils import save_config, save_model
from mutation_kit import little_memory, mutated  # noqa: F401
from rig import SMALL, TINY, mlx_lm_twin, tiny, tokens

from specmlx.drafters.checkpoint import load_drafter
from specmlx.targets.checkpoint import load_target

IDS = tokens(1, 12)
ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings")
# Nothing reads these, nor, in what a drafter proposes, the others of UNREAD.
UNUSED = {"dtype": "float32", "bos_token_id": 1, "use_cache": True, "initializer_range": 0.02, "pad_token_id": None}
UNREAD = {*UNUSED, "model_type", "max_position_embeddings", "num_target_layers"}
ODD = ["4096", [1], {"a": 1}, True, -1, 0, 1.5, float("nan"), float("inf"), 10**400, None, "x" * 500, [[]]]
ROPES = [
    {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope_theta": 5000.0, "partial_rotary_factor": 0.25, "rope_parameters": None},
]


def changed(rng: random.Random, config: dict) -> dict:
    """A config with one or two of its fields changed, some in the rope's other places."""
    config = json.loads(json.dumps(config | (rng.choice(ROPES) if rng.random() < 0.4 else {})))
    rope = [key for key in config if key in ROPE]
    for key in rng.sample(sorted(config), rng.choice([1, 1, 2])) if rng.random() < 0.6 else [rng.choice(rope)]:
        config[key] = rng.choice(ODD) if rng.random() < 0.5 else mutated(rng, config[key])
    return config


def loaded(load, path: Path):
    """What is loaded, or None where it is refused in one line; lists of tensors may be longer than words of a field."""
    try:
        return load(path)
    except ValueError as error:
        text = str(error).replace(str(path), "")
        assert "\n" not in text and 10 < len(text) <= (450 if "the weights" in text else 200), text
        return None


def rope_of(config_class, config: dict) -> dict:
    """What transformers reads of the rope; it has no defaults for null."""
    fields = {name: value for name, value in config.items() if name in ROPE and value is not None}
    for name, value in fields.items():
        if isinstance(value, dict):
            fields[name] = {key: part for key, part in value.items() if part is not None or key == "factor"}
    read = config_class(head_dim=config.get("head_dim") or 16, **json.loads(json.dumps(fields)))
    read.standardize_rope_params()
    return {name: value for name, value in read.rope_parameters.items() if value is not None}


def test_150_changed_targets_are_refused_or_have_mlx_lms_logits_by_transformers_rope(tmp_path):
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    rng, original = random.Random(14), TINY | SMALL | UNUSED
    whole = mlx_lm_twin(tiny(0, **SMALL), **SMALL)
    save_model(tmp_path, whole)
    weights = [(k.removeprefix("language_model."), v) for k, v in tree_flatten(whole.parameters())]
    count = 0
    for _ in range(150):
        config = changed(rng, original)
        flat = rng.random() < 0.7
        save_config(config if flat else {"model_type": "qwen3_5", "text_config": config}, tmp_path / "config.json")
        if (found := loaded(load_target, tmp_path)) is None:
            continue
        target, _ = found
        count += 1
        rope = rope_of(Qwen3_5TextConfig, config)
        assert rope.items() <= target.config.rope_parameters.items(), config
        # mlx-lm takes null for a value, and a head for tied whatever the file has.
        plain = {name: value for name, value in config.items() if value is not None}
        args = qwen3_5.TextModelArgs.from_dict(plain | {"rope_parameters": rope, "tie_word_embeddings": False})
        twin = qwen3_5.TextModel(args)
        twin.load_weights(weights)
        assert mx.abs(target(IDS) - twin(IDS)).max().item() < 1e-4, config
    assert 20 < count < 130


@pytest.mark.parametrize("case", ["dflash_full", "dflash2_full", "dspark"])
def test_50_changed_drafters_are_refused_or_propose_as_before_where_nothing_reads_the_change(case, tmp_path):
    from transformers import Qwen3Config

    rng, original = random.Random(15), golden_config(case) | UNUSED
    path = write_drafter(tmp_path, original, case_weights(case))
    before, count = propose(golden_drafter(case)), 0
    for _ in range(50):
        config = changed(rng, original)
        (path / "config.json").write_text(json.dumps(config))
        if (found := loaded(lambda path: load_drafter(path, golden_target(), mx.float32), path)) is None:
            continue
        count += 1
        assert rope_of(Qwen3Config, config).items() <= found.config.rope_scaling.items(), config
        different = {name for name in {*config, *original} if config.get(name) != original.get(name)}
        if different <= UNREAD:
            assert mx.array_equal(propose(found), before).item(), config
    assert count >= 5


def test_75_changed_stop_tokens_are_refused_or_the_union_of_what_the_files_name(tmp_path):
    rng, outcomes = random.Random(16), set()
    original = TINY | SMALL
    save_model(tmp_path, mlx_lm_twin(tiny(0, **SMALL), **SMALL))
    for _ in range(75):
        named = [rng.choice([*range(9), [1, 7], [], [2, 2], None, *ODD]) for _ in range(3)]
        named = [value if rng.random() < 0.5 else rng.choice([3, [4, 5], None]) for value in named]
        top, text, generation = ({"eos_token_id": value} for value in named)
        save_config({"model_type": "qwen3_5", "text_config": original | text} | top, tmp_path / "config.json")
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        found = loaded(lambda path: load_target(path, lazy=True), tmp_path)
        outcomes.add(found is None)
        if found is not None:
            lists = [value if isinstance(value, list) else [value] for value in named if value is not None]
            ids = found[1].get("eos_token_id") or []
            assert {*(ids if isinstance(ids, list) else [ids])} == {i for ids in lists for i in ids}, named
            assert all(type(i) is int and i >= 0 for ids in lists for i in ids), named
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "a\nb" * 2000},
        {"model_file": "a\nb" * 2000},
        {"eos_token_id": "a\nb" * 2000},
        {"eos_token_id": ["\n"]},
    ],
)
def test_a_value_is_shown_in_one_line_however_long_it_is(changes, tmp_path):
    save_config(TINY | SMALL | changes, tmp_path / "config.json")
    assert loaded(load_target, tmp_path) is None


def test_the_tensors_of_a_drafter_that_do_not_fit_are_named_four_at_most(tmp_path):
    path = write_drafter(tmp_path, golden_config("dflash2_full") | {"head_dim": 4}, case_weights("dflash2_full"))
    with pytest.raises(ValueError, match=r"should be \[4\]; .+; and \d+ more$") as error:
        load_drafter(path, golden_target(), mx.float32)
    assert len(str(error.value).replace(str(path), "")) < 400
