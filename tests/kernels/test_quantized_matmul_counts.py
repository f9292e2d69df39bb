"""What the quantized_matmul kernels load and compute, counted by the simulator: bounds, and the README's figures."""

import re
from pathlib import Path

import numpy as np
import pytest
from msl import Simulator
from quantized_kit import FORMATS, inputs, weights

from specmlx.evaluation.chips import chip_named
from specmlx.kernels import quantized_matmul as kernels

BOUNDED = [name for name in FORMATS if name.startswith(("affine4", "affine8", "nv", "mx"))]


@pytest.mark.parametrize("name", BOUNDED)
def test_weights_and_scales_are_read_once_in_whole_lines(name):
    sim = Simulator()
    N, K = 256, 2048
    packed = weights(name, (N, K))
    for M in (1, 5, 8, 16, 24):
        kernels.quantized_matmul(inputs(M, K), packed, factory=sim.metal_kernel)
        traffic = sim.last.buffers
        for key in ("w", "scales", *["biases"] * (packed[2] is not None)):
            assert traffic[key].reads == (1 if M <= 16 else 2) and traffic[key].line_use == 1, key
        packed_bytes = packed.nbytes
        if M in (8, 16):
            assert traffic["ordered_x"].simd_bytes <= M // 8 * packed_bytes
            assert sim.last.multiply_adds <= 1.15 * M * N * K


def counted(form, name, M):
    """A row of the README's table: a launch of N 64, K 5120 as the simulator counts it."""
    sim = Simulator()
    N, K = 64, 5120
    packed = weights(name, (N, K))
    kernels.quantized_matmul(inputs(M, K), packed, factory=sim.metal_kernel, variant=form)
    report, traffic = sim.last, sim.last.buffers
    x = traffic["x" if form == "V" else "ordered_x"]
    packed_bytes = packed.nbytes
    return [
        traffic["w"].reads,
        traffic["w"].line_use,
        traffic["scales"].reads,
        traffic["scales"].line_use,
        x.simd_bytes / packed_bytes,
        x.line_use,
        report.multiply_adds / (M * N * K),
        report.flops / (N * K),
        report.instructions / (N * K),
        report.conversions / (N * K),
    ]


def readme_rows():
    text = Path(kernels.__file__).with_name("README.md").read_text()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in cells if row[0] in ("A", "AX", "B", "V") and row[1] in FORMATS]


@pytest.mark.parametrize("row", readme_rows(), ids=lambda row: "-".join(row[:3]))
def test_the_readmes_figures_are_what_the_simulator_counts(row):
    form, name, M, *figures = row
    counts = np.array(counted(form, name, int(M)))
    # The last three depend on the simulator's compiler, integer operations the most: clang 19 and 22 differ by .6.
    assert np.all(np.abs(counts - np.array(figures, float)) <= [0.006] * 6 + [0.01, 0.3, 0.7, 0.3])


def docs_ceilings():
    """The table's chips, its rows of the buses and its rows of the ALUs, as (cells, cells, ...)."""
    lines = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text().splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    head = next(row for row in cells if row[0] == "10⁹ weights a second")
    return (
        [chip_named(re.sub(",.*? ", " ", name).removesuffix(" cores")) for name in head[2:]],
        [row for row in cells if row[0].startswith("bus, ")],
        [row for row in cells if row[0].startswith("ALUs, ")],
    )


def test_the_docs_ceilings_follow_from_the_readmes_counts_and_the_chips():
    chips, buses, alus = docs_ceilings()
    counts = {tuple(row[:3]): (float(row[9]), float(row[11])) for row in readme_rows()}
    assert [row[0] for row in buses] == ["bus, affine4g64 and nvfp4", "bus, affine8g64"] and len(alus) == 15
    for row, nbytes in zip(buses, (0.5625, 1.0625), strict=True):
        assert [int(x) for x in row[2:]] == [round(chip.bandwidth / nbytes) for chip in chips]
    for name, operations, *shown in alus:
        form, M, format = re.match(r"ALUs, (\w+), M (\d+), (\w+)", name).groups()
        multiply_adds, integer = counts[form, format, M]
        assert float(operations) == pytest.approx(multiply_adds * int(M) + integer, abs=0.06)
        for chip, ceiling in zip(chips, shown, strict=True):
            assert (ceiling == "–") == (chip.multiply_adds is None)
            if chip.multiply_adds:
                assert float(ceiling) == pytest.approx(chip.multiply_adds / float(operations) / 1e9, rel=0.01)
