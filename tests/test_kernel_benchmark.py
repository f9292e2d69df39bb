"""benchmarks/kernels.py --simulate: the figures it prints, and the bounds that it holds them to."""

import sys
from pathlib import Path

import msl

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import kernel_traffic  # noqa: E402
import kernels  # noqa: E402

FIGURES = """kernel format M N K weight_reads line_use multiply_adds x_bytes scale_reads partial_bytes threadgroups
    loads_in_flight stock"""


def test_every_format_keeps_the_bounds_and_a_broken_one_is_named():
    msl.Simulator()
    rows = list(kernel_traffic.products((1, 16), ("A",), {"": (64, 2048)}, with_stock=True))
    assert [row["format"] for row in rows] == ["affine4"] * 2 + ["affine8"] * 2 + ["nvfp4"] * 2
    assert all(set(FIGURES.split()) <= row.keys() and row["stock"] for row in rows)
    assert [kernel_traffic.broken_bounds(row) for row in rows] == [[]] * 6
    assert kernel_traffic.broken_bounds({**rows[1], "line_use": 0.5}) == ["a load covers whole lines"]
    assert "A [qmm_t], affine4 64 x 2048, M 16: weight_reads 1.0 [1.0], line_use 1.0" in kernels.in_one_line(rows[1])
