"""benchmarks/kernels.py --simulate: the figures it prints, and the bounds that it holds them to."""

import json
import sys
from pathlib import Path

import msl
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import kernel_traffic  # noqa: E402
import kernels  # noqa: E402

FIGURES = """kernel format M N K weight_reads line_use multiply_adds x_bytes scale_reads partial_bytes threadgroups
    loads_in_flight""".split()


def test_every_format_keeps_the_bounds_and_a_broken_one_is_named():
    msl.Simulator()
    run = CliRunner().invoke(kernels.main, ["--simulate", "--json", "--shape", "256x2048"])
    assert run.exit_code == 0, run.output
    rows = json.loads(run.output)
    assert [(row["format"], row["M"]) for row in rows if row["kernel"].endswith(" A")] == [
        (name, M) for name in ("affine4", "affine8", "nvfp4") for M in (1, 8, 16)
    ]
    assert all(row.keys() >= {*FIGURES, "stock"} and row["stock"].keys() >= set(FIGURES[5:]) for row in rows)
    last = next(row for row in rows if row["M"] == 16)
    assert kernel_traffic.broken_bounds(last) == []
    assert kernel_traffic.broken_bounds({**last, "line_use": 0.5}) == ["a load covers whole lines"]
    assert kernel_traffic.broken_bounds({**last, "scale_line_use": 0.5}) == ["scales come in whole lines"]
    assert "A [qmm_t], affine4 256 x 2048, M 16: weight_reads 1.0 [1.0], line_use 1.0" in kernels.in_one_line(last)


def test_the_state_the_keys_and_the_values_are_read_once():
    msl.Simulator()
    rows = list(kernel_traffic.others())
    assert [(row["kernel"], row["T"]) for row in rows] == [
        *(("gated_delta", T) for T in (1, 4, 8, 8, 16)),
        *(("attention", T) for T in (1, 8, 17)),
    ]
    assert [kernel_traffic.broken_bounds(row) for row in rows] == [[]] * 8
    assert kernel_traffic.broken_bounds({**rows[0], "state_reads": 2.0}) == ["state_reads is 1"]


def test_a_shape_that_stocks_kernels_dont_take_is_refused_in_one_line():
    for shape in ("17408", "13x512", "64x500", "axb"):
        run = CliRunner().invoke(kernels.main, ["--simulate", "--shape", shape])
        assert run.exit_code == 2 and "N a multiple of 8 and K one of 512" in run.output
