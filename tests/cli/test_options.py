"""Options are checked alike by every function and command that takes them."""

import math

import numpy as np
import pytest
from click.testing import CliRunner
from rig import SMALL, small_tokenizer, tiny

from specmlx import (
    Engine,
    batch_generate,
    generate,
    load_drafter,
    make_logits_processors,
    make_sampler,
    stream_generate,
)
from specmlx.cli import main

INTEGERS = {
    "max_tokens": [0, -2],
    "num_draft_tokens": [-1, 99, "all"],
    "seed": [-1],
    "prefill_step_size": [0, -64, None],
    "max_kv_size": [0, -1, 5000],
    "kv_bits": [0, 7, 16, "int4"],
    "kv_group_size": [0, 48, None],
    "quantized_kv_start": [-1, None],
}
# No integers, though some of them equal one.
WRONG = [3.0, math.nan, "64", True, np.float32(64), [64]]
CASES = [(name, value) for name, values in INTEGERS.items() for value in [*values, *WRONG]]
OF_REQUESTS = ("max_tokens", "seed")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    model, tokenizer = tiny(0, **SMALL), small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    model.attach(load_drafter("ngram", model))
    return model, tokenizer


@pytest.fixture(scope="module")
def engine(pair):
    with Engine(*pair) as engine:
        yield engine


@pytest.mark.parametrize("name, value", CASES, ids=str)
def test_a_wrong_value_is_refused_by_name_before_anything_runs(pair, engine, name, value):
    ways = [
        lambda: stream_generate(*pair, [5], **{name: value}),
        lambda: generate(*pair, [5], **{name: value}),
        lambda: engine.submit([5], **{name: value}) if name in OF_REQUESTS else Engine(*pair, **{name: value}),
    ]
    # A list is one value for each prompt there.
    if not (name in OF_REQUESTS and isinstance(value, list)):
        ways.append(lambda: batch_generate(*pair, [[5]], **{name: value}))
    said = set()
    for way in ways:
        with pytest.raises(ValueError) as error:
            way()
        said.add(str(error.value))
    (line,) = said
    assert line.startswith(f"{name} is {value!r}: ") and "\n" not in line and len(line) <= 200


@pytest.mark.parametrize("integer", [np.int64, np.uint8, np.array], ids=["int64", "uint8", "array"])
def test_numpys_integers_are_integers(pair, engine, integer):
    model, _ = pair
    options = dict(max_tokens=4, num_draft_tokens=3, seed=7, prefill_step_size=64, max_kv_size=90)
    options |= dict(kv_bits=8, kv_group_size=32, quantized_kv_start=64)
    theirs = {name: integer(value) for name, value in options.items()}
    want = generate(*pair, [5, 6] * 4, **options)
    assert generate(*pair, [5, 6] * 4, **theirs) == want
    assert batch_generate(*pair, [[5, 6] * 4], **theirs).texts == [want]
    settings = {name: value for name, value in theirs.items() if name not in OF_REQUESTS}
    with Engine(*pair, max_lanes=integer(2), max_waiting=integer(2), **settings) as small:
        assert small.submit([5, 6] * 4, theirs["max_tokens"], seed=theirs["seed"]).text() == want
    number = np.float32 if integer is not np.array else np.float64
    assert make_sampler(number(0.5), top_k=integer(3)) == make_sampler(0.5, top_k=3)
    assert make_logits_processors({np.int64(3): number(2)}, repetition_context_size=integer(4))


@pytest.mark.parametrize(
    "name, value",
    [
        *(("temp", value) for value in (-1, math.nan, math.inf, "1", True, None)),
        *(
            (name, value)
            for name in ("top_p", "min_p", "xtc_probability")
            for value in (-0.1, 1.1, math.nan, "1", True)
        ),
        *(("top_k", value) for value in (-5, 3.0, "3", True, math.nan)),
        *(("min_tokens_to_keep", value) for value in (0, 1.0, True)),
    ],
)
def test_a_wrong_setting_of_a_sampler_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} is "):
        make_sampler(**{name: value})


@pytest.mark.parametrize("kind", ["repetition", "presence", "frequency"])
def test_a_wrong_setting_of_a_processor_is_refused_by_name(kind):
    sizes, penalties = (
        (-1, 2.0, "3", True, None),
        (math.nan, math.inf, "1", True, *([-1] if kind == "repetition" else [])),
    )
    for what, values in (("context_size", sizes), ("penalty", penalties)):
        for value in values:
            with pytest.raises(ValueError, match=f"^{kind}_{what} is "):
                make_logits_processors(**{f"{kind}_{what}": value})
    for bias in ({1.0: 2}, {True: 1}, {"1": 1}, {1: math.nan}, {1: math.inf}, {1: "2"}, {1: None}):
        with pytest.raises(ValueError, match="logit_bias"):
            make_logits_processors(bias)


@pytest.mark.parametrize(
    "flags, word",
    [
        (["--max-tokens", "0"], "max_tokens is 0: "),
        (["--num-draft-tokens", "-1"], "num_draft_tokens is -1: "),
        (["--num-draft-tokens", "3.0"], "num_draft_tokens is '3.0': "),
        (["--seed", "-1"], "seed is -1: "),
        (["--seed", "1.5"], "'1.5' is not a valid integer"),
        (["--top-k", "-5"], "top_k is -5: "),
        (["--top-p", "nan"], "top_p is nan: "),
        (["--max-kv-size", "nan"], "'nan' is not a valid integer"),
        (["--max-kv-size", "0"], "max_kv_size is 0: "),
        (["--prefill-step-size", "0"], "prefill_step_size is 0: "),
        (["--kv-bits", "7"], "kv_bits is 7: "),
        (["--kv-bits", "int4"], "kv_bits is 'int4': "),
        (["--kv-group-size", "48"], "kv_group_size is 48: "),
        (["--repetition-context-size", "-1"], "repetition_context_size is -1: "),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_command_line_refuses_the_same_before_it_looks_for_a_model(command, flags, word):
    result = CliRunner().invoke(main, [command, "--model", "no/such/model", *flags])
    assert result.exit_code == 2 and word in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("flags", [["--num-draft-tokens", "99"], ["--extra-eos-token", "1280"]], ids=lambda f: f[0])
def test_what_only_the_model_can_tell_is_refused_by_the_command_line_too(flags):
    result = CliRunner().invoke(main, ["generate", "--prompt", "Hello", *flags])
    assert result.exit_code == 2 and flags[1] in result.stderr and result.stdout == ""
