"""Ropes: every form of config.json that transformers reads, for targets and drafters; how many positions they have."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from any_lm_kit import SIZES, random_lm
from click.testing import CliRunner
from demo_kit import write_model
from drafter_kit import golden_config
from mlx_lm.utils import save_config, save_model
from rig import SMALL, TINY, tiny, tokens

from specmlx.cli import main
from specmlx.drafters.block import Rotary
from specmlx.drafters.config import DrafterConfig
from specmlx.formats.rope import rotary_dims
from specmlx.generation.context_limits import context_limit
from specmlx.targets.attention import Attention
from specmlx.targets.checkpoint import load_target
from specmlx.targets.config import HybridConfig, check_target

# See make_rope_goldens.py: heads of 32, 4096 positions, as TINY has.
EXPECTED = json.loads((Path(__file__).parents[1] / "goldens" / "rope" / "expected.json").read_text())
BARE = {name: value for name, value in TINY.items() if name != "rope_parameters"}
DEFAULT = TINY["rope_parameters"]
YARN = DEFAULT | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DFLASH = {name: value for name, value in golden_config("dflash_full").items() if not name.startswith("rope_")}


def said(rope: dict) -> dict:
    return {name: value for name, value in rope.items() if value is not None}


def turned(rows: np.ndarray, golden: dict, positions: np.ndarray) -> np.ndarray:
    """Rows `[T, D]` turned by transformers' frequencies, half against half."""
    angles = positions[:, None] * np.array(golden["inv_freq"])
    cos, sin = np.cos(angles) * golden["attention_scaling"], np.sin(angles) * golden["attention_scaling"]
    n = angles.shape[1]
    a, b = rows[:, :n], rows[:, n : 2 * n]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rows[:, 2 * n :]], axis=1)


@pytest.mark.parametrize("name", EXPECTED)
def test_rows_are_turned_as_transformers_reads_the_config(name):
    golden = EXPECTED[name]
    config = HybridConfig.from_dict(BARE | golden["config"])
    rope = config.rope_parameters
    assert said(golden["rope_parameters"]).items() <= rope.items()
    x = mx.random.normal((1, 1, 40, 32), key=mx.random.key(1))
    for start in (0, 900):
        right = turned(np.array(x)[0, 0], golden, np.arange(start, start + 40))
        found = Attention(config).rope(x, offset=start)
        assert np.abs(np.array(found)[0, 0] - right).max() < 3e-4
        positions = mx.arange(start, start + 40, dtype=mx.int32)[None]
        rotary = Rotary(rotary_dims(rope, 32), rope)
        drafted = np.array(rotary(x.transpose(0, 2, 1, 3), positions))[0, :, 0]
        drafted[:, : rotary.dims] *= rotary.factor
        assert np.abs(drafted - right).max() < 3e-4


@pytest.mark.parametrize("name", EXPECTED)
def test_other_models_configs_and_drafters_are_read_by_the_same_rules(name):
    from transformers import Qwen3Config, Qwen3NextConfig

    form = EXPECTED[name]["config"]

    def theirs(config_class) -> dict:
        config = config_class(max_position_embeddings=4096, head_dim=32, **json.loads(json.dumps(form)))
        # As the models' own code does before it uses them.
        config.standardize_rope_params()
        return said(config.rope_parameters)

    composite = {"model_type": "qwen3_5", "rope_theta": 7.0, "rope_scaling": YARN, "text_config": BARE | form}
    assert HybridConfig.from_dict(composite).rope_parameters == HybridConfig.from_dict(BARE | form).rope_parameters
    other = HybridConfig.from_dict(BARE | form | {"model_type": "qwen3_next"})
    assert theirs(Qwen3NextConfig).items() <= other.rope_parameters.items()
    drafter = DrafterConfig.from_dict(DFLASH | {"max_position_embeddings": 4096} | form)
    assert theirs(Qwen3Config).items() <= drafter.rope_scaling.items()
    assert drafter.rope_theta == drafter.rope_scaling["rope_theta"]


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        ({"rope_parameters": [1]}, "rope_parameters is [1]: it must be an object"),
        ({"rope_parameters": DEFAULT | {"rope_theta": [1]}}, "rope_theta is [1]: it must be a number"),
        ({"rope_theta": float("nan")}, "rope_theta is nan: it must be a number"),
        ({"rope_theta": True}, "rope_theta is True: it must be a number"),
        ({"partial_rotary_factor": "1"}, "partial_rotary_factor is '1': it must be a number"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor is 0.1: it must be a share of head_dim 32"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5: it must be a positive number at most 1"),
        ({"rope_scaling": DEFAULT | {"rope_type": "longrope"}}, "config.json lacks short_factor"),
        (
            {"rope_scaling": DEFAULT | {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "rope_type is longrope with a short_factor that is not its long_factor",
        ),
        ({"rope_parameters": {"type": "su"}}, "rope_type is 'su': not supported"),
        ({"rope_parameters": {"rope_type": 1}}, "rope_type is 1: it must be a name"),
        ({"rope_parameters": {"full_attention": DEFAULT}}, "an object for 'full_attention': one rope for all layers"),
        ({"rope_parameters": DEFAULT | {"rope_type": "linear"}}, "config.json lacks factor: it must be a positive"),
        ({"rope_parameters": YARN | {"factor": 0}}, "factor is 0: it must be a positive number"),
        ({"rope_parameters": YARN | {"factor": 10**400}}, "factor is 1000"),
        ({"rope_parameters": YARN | {"truncate": 1}}, "truncate is 1: it must be true or false"),
        ({"rope_parameters": YARN | {"attention_factor": -1}}, "attention_factor is -1: it must be a positive"),
        ({"rope_parameters": YARN | {"beta_fast": "32"}}, "beta_fast is '32': it must be a positive number"),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": {}}}, "an object for 'original_max"),
        ({"rope_parameters": YARN, "original_max_position_embeddings": "x"}, "original_max_position_embeddings is 'x'"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1}}, "high_freq_factor is 1: it must be a number above 1"),
        ({"max_position_embeddings": "4096"}, "max_position_embeddings is '4096': it must be a positive integer"),
    ],
)
def test_a_rope_that_is_not_understood_is_refused_in_one_line(rope, says):
    for config in (BARE | rope, {"model_type": "qwen3_5", "text_config": BARE | rope}):
        with pytest.raises(ValueError) as error:
            check_target(config, Path("model"))
        assert says in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) <= 200
    if "partial_rotary_factor" not in rope:
        with pytest.raises(ValueError) as error:
            DrafterConfig.from_dict(DFLASH | rope)
        assert says in str(error.value) and len(str(error.value)) <= 200


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (DEFAULT, 4096),
        (YARN, 2048),
        (YARN | {"original_max_position_embeddings": 4096}, 16384),
        (YARN | {"factor": 2.5}, 1280),
        (DEFAULT | {"rope_type": "linear", "factor": 4}, 16384),
        (LLAMA3, 4096),
        # Beyond its positions a dynamic rope depends on the number of rows in a pass.
        (DEFAULT | {"rope_type": "dynamic", "factor": 4.0}, 4096),
    ],
)
def test_a_conversation_may_be_as_long_as_its_rope_reaches(rope, length):
    model = tiny(0, **SMALL, rope_parameters=rope)
    most, what = context_limit(model)
    assert most == length and ("max_position_embeddings" in what) == (length == 4096)
    assert context_limit(model, length) == (length, what)
    with pytest.raises(ValueError, match=f"max_kv_size is {length + 1}: the model's .* is {length}"):
        context_limit(model, length + 1)


def test_a_rope_that_mlx_lm_reads_at_the_top_only_is_read_from_rope_parameters_too(tmp_path):
    flat = {"model_type": "llama", **SIZES} | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    nested = {name: value for name, value in flat.items() if not name.startswith("rope_")}
    nested["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    model = random_lm("llama", rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    save_model(tmp_path, model)
    ids = tokens(1, 12)
    for config in (flat, nested):
        save_config(dict(config), tmp_path / "config.json")
        target, _ = load_target(tmp_path)
        assert mx.array_equal(target.lm(ids), model(ids)).item()
        assert target.config.rope_theta == 500.0
    # Which is another one than mlx-lm itself reads there.
    assert not mx.array_equal(random_lm("llama")(ids), model(ids)).item()


def test_parity_says_where_mlx_lm_reads_another_rope(tmp_path):
    yarn = DEFAULT | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    notes = {}
    for name, rope in (("same", yarn), ("other", yarn | {"attention_factor": 1.3})):
        path = write_model(tmp_path / name, rope_parameters=rope)
        args = ["--model", str(path), "-p", "Hello", "-m", "2", "--draft-model", "ngram", "--reference", "mlx-lm"]
        result = CliRunner().invoke(main, ["parity", *args, "--json"])
        assert result.exit_code in (0, 1), result.output
        notes[name] = json.loads(result.stdout).get("note")
    assert notes["same"] is None and "mlx-lm reads config.json's rope otherwise" in notes["other"]
    shown = CliRunner().invoke(main, ["parity", *args])
    assert notes["other"] in shown.stdout.splitlines()
