"""Several processes that answer together: the text of one, and an end for all when one of them ends."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from click.testing import CliRunner
from distributed_cases import cases
from distributed_kit import (
    DIVISIBLE,
    DIVISIBLE_EXPERTS,
    FakeGroup,
    finished,
    free_ports,
    start_ring,
    write_llama,
    write_pair,
)
from mlx.utils import tree_flatten
from publishers import random_fp8
from rig import NEXT, tiny

from specmlx.cli import SILENCE, main
from specmlx.formats.scaled import read_scaled
from specmlx.formats.scaled_linear import place
from specmlx.targets.sharding import shard


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = write_pair(tmp_path_factory.mktemp("pair"))
    write_llama(directory / "llama")
    return directory


@pytest.fixture(scope="module")
def alone(pair):
    return cases(str(pair), None)


# What a process keeps

FUSED = DIVISIBLE | NEXT | {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 192, "mlp_only_layers": []}


def quantized(bits: int, mode: str, changes: dict):
    model = tiny(**changes)
    nn.quantize(model, 32, bits, mode=mode)
    return model


def scaled(scales: str, size: int = 32):
    """FP8 weights with a scale for each tensor, channel or block."""
    model, rng = tiny(**DIVISIBLE), np.random.default_rng(0)
    weights = dict(tree_flatten(model.parameters()))
    for name in [name for name in weights if "_proj" in name and "in_proj_a" not in name and "in_proj_b" not in name]:
        N, K = weights[name].shape
        shape = {"tensor": (), "channel": (N,), "block": (N // size, K // size)}[scales]
        weights[name] = mx.array(random_fp8(rng, N, K))
        weights[f"{name}_scale"] = mx.array(rng.uniform(1e-4, 1e-3, shape).astype(np.float32))
    weights = read_scaled(weights, {"quantization_config": {"weight_block_size": [size, size]}})
    place(model, weights)
    model.load_weights(list(weights.items()))
    return model


MODELS = {
    "dense": lambda: tiny(**DIVISIBLE, attention_bias=True),
    "affine": lambda: quantized(4, "affine", DIVISIBLE),
    "mxfp4": lambda: quantized(4, "mxfp4", DIVISIBLE),
    "experts": lambda: tiny(**DIVISIBLE_EXPERTS),
    "affine experts": lambda: quantized(8, "affine", DIVISIBLE_EXPERTS),
    "fused": lambda: tiny(**FUSED),
    "FP8": lambda: scaled("tensor"),
    "FP8 by channels": lambda: scaled("channel"),
    "FP8 by blocks": lambda: scaled("block"),
}


def parts(size: int, make) -> list:
    """What each of `size` processes has of the same random model."""
    found = [make() for _ in range(size)]
    for rank, model in enumerate(found):
        shard(model, FakeGroup(rank, size))
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_the_parts_of_a_layer_add_up_to_the_layer(size, kind):
    whole, split = MODELS[kind](), parts(size, MODELS[kind])
    x = mx.random.normal((1, 5, 64), key=mx.random.key(1))
    for i, layer in enumerate(whole.layers):

        def mixed(layer):
            if not layer.is_linear:
                return layer.self_attn(x, None, 0, 0, "causal", residual=None)[0]
            return layer.linear_attn.prefill(x, layer.linear_attn.empty(1, x.dtype), residual=None)[0]

        for run in (mixed, lambda layer: layer.mlp(x, None)):
            want = run(layer)
            got = sum(run(part.layers[i]) for part in split)
            assert mx.allclose(got, want, atol=1e-5 * mx.abs(want).max().item() + 1e-6, rtol=0).item()
    # Nothing else is kept twice.
    everywhere = ("norm", ".gate.", "expert_gate", "o_proj.bias", "output_scale", "embed_tokens", "lm_head")
    for part in split:
        for (name, x), (_, y) in zip(tree_flatten(part.parameters()), tree_flatten(whole.parameters()), strict=True):
            assert any(word in name for word in everywhere) or x.size * size == y.size, name


def test_heads_of_keys_are_kept_by_several_processes_where_there_are_fewer():
    split = parts(3, lambda: tiny(**DIVISIBLE | {"num_key_value_heads": 1}))
    assert [part.kv_heads for part in split] == [1, 1, 1]


def test_what_does_not_divide_is_refused_with_all_values():
    with pytest.raises(
        ValueError, match=r"over 4 processes, .* linear_num_key_heads 6, num_attention_heads 6, num_key"
    ):
        shard(tiny(**DIVISIBLE), FakeGroup(0, 4))
    coarse = tiny(**DIVISIBLE)
    nn.quantize(coarse, 64, 4)
    with pytest.raises(ValueError, match=r"over 2 processes: layers.0 has a Quant.* 192 inputs .* of 64"):
        shard(coarse, FakeGroup(0, 2))
    with pytest.raises(ValueError, match=r"over 2 processes: layers.0 has FP8 weights with a scale for 64 of .* rows"):
        shard(scaled("block", 64), FakeGroup(0, 2))


# Together


@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_of_processes_gives_the_tokens_of_one(pair, alone, tmp_path, size):
    program = str(Path(__file__).parents[1] / "distributed_cases.py")
    ended = finished(start_ring(tmp_path, size, program, str(pair)), timeout=120)
    assert [code for code, _, _ in ended] == [0] * size, ended
    ranks, said = zip(*(json.loads(out) for _, out, _ in ended), strict=True)
    for told in ranks:
        assert {name: told[name][:2] for name in told} == {name: ranks[0][name][:2] for name in told}
    for name, (tokens, *_) in ranks[0].items():
        want, _, margins = alone[name]
        if tokens != want and name != "nobody's seed":
            at = next(i for i, (a, b) in enumerate(zip(tokens, want, strict=True)) if a != b)
            pytest.fail(f"{name}: token {at} is another one; the best two were {margins and margins[at]} apart")
    # Drafting was of use, and of as much as in one process.
    for name in ("greedy", "seeded"):
        assert ranks[0][name][1] == alone[name][1] and sum(alone[name][1][1:]) > 2
    if size == 2:
        assert ranks[0]["second turn"][1] == alone["second turn"][1]
        assert said[0]["prompt"] == said[1]["prompt"] == "rank 1 has another prompt than rank 0: " + SAME
        assert said[0]["sampling"] == said[1]["sampling"] == "rank 1 has another sampling than rank 0: " + SAME
        assert said[0]["one fails"] == "rank 1 could not do its part: what it said is the reason"
        assert "no such directory" in said[1]["one fails"]
        assert "one request at a time" in said[1]["batch"] and "not a PromptCache" in said[1]["prompt cache"]


SAME = "all have to be asked for the same"


def test_under_mlx_launch_the_first_process_alone_speaks(pair):
    code = "from mlx._distributed_utils.launch import main; main()"
    specmlx = [
        sys.executable,
        "-m",
        "specmlx",
        "generate",
        "--model",
        pair,
        "--draft-model",
        pair / "dspark",
        "--num-draft-tokens",
        "4",
        "--prompt",
        "Hello",
    ]
    often = ["--temp", "1", "--seed", "3", "--logit-bias", json.dumps({50: 30, 60: 30, 70: 30}), "-m", "12"]

    ports = ["--backend", "ring", "-n", "2", "--starting-port", str(free_ports(2))]
    command = [sys.executable, "-c", code, *ports, "--", *specmlx, *often, "--json"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    # An open standard input: mlx.launch reads a closed one without end.
    with subprocess.Popen([*map(str, command)], stdin=-1, stdout=-1, stderr=-1, text=True, env=env) as process:
        out, err = process.stdout.read(), process.stderr.read()
    answer = json.loads(out)
    assert process.returncode == 0 and answer["generation_tokens"] == 12 and answer["mode"] == "speculative", err
    lines = err.splitlines()
    assert len(lines) == 2 and " in 2 processes: speculative decoding with DSpark" in lines[0], err


def test_other_commands_are_refused_by_one_line_of_the_first_process(tmp_path):
    ended = finished(start_ring(tmp_path, 2, "-m", "specmlx", "chat"), timeout=120)
    refusal = "Error: chat runs in one process: under mlx.launch there is specmlx generate\n"
    assert ended == [(2, "", refusal), (2, "", "")]


def test_a_silent_process_leaves_the_first_one_time_to_say_what_is_wrong():
    begin = time.monotonic()
    result = CliRunner().invoke(main, ["generate", "--temp", "-1"], env={"MLX_RANK": "1"})
    assert (result.exit_code, result.output) == (2, "") and time.monotonic() - begin >= SILENCE
    assert (
        "temp is -1.0: it must be"
        in CliRunner().invoke(main, ["generate", "--temp", "-1"], env={"MLX_RANK": "0"}).stderr
    )


# When one ends


def launched(program: str) -> tuple[str, list[str]]:
    """What three processes under mlx.launch print, one of which ends badly: output, and errors but the ring's own."""
    here = "from specmlx.cli.launched import joined; import os, mlx.core as mx\nwith joined() as group:\n"
    waits = "\n    while True: mx.eval(mx.distributed.all_sum(mx.array(1), group=group))"
    code = "from mlx._distributed_utils.launch import main; main()"
    ports = ["--backend", "ring", "-n", "3", "--starting-port", str(free_ports(3))]
    command = [sys.executable, "-c", code, *ports, "--", sys.executable, "-c", here + program + waits]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True, env=env) as process:
        out, err = process.stdout.read(), process.stderr.read()
    return out, [line for line in err.splitlines() if line.startswith("Error")]


def test_a_killed_process_ends_the_others():
    out, _ = launched("    print(group.rank(), flush=True)\n    if group.rank() == 1: os.kill(os.getpid(), 9)")
    assert out == "0\n"


def test_a_process_that_fails_alone_says_why_and_ends_the_others():
    _, errors = launched("    if group.rank() == 1: raise ValueError('no such file: x')")
    assert errors[0] == "Error: rank 1: no such file: x"


def test_an_error_that_the_first_process_has_too_is_printed_once(tmp_path):
    wrong = ("-m", "specmlx", "generate", "--model", str(tmp_path), "--prompt", "Hello")
    (_, _, first), (_, _, other) = finished(start_ring(tmp_path, 2, *wrong), timeout=60)
    assert first.startswith("Error: ") and first.count("\n") == 1 and other == ""
