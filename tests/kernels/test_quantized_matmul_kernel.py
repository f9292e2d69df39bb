"""The quantized_matmul kernels' own launches and Metal source, run by the simulator, against float64."""

import re

import mlx.core as mx
import numpy as np
import pytest
from msl import Simulator
from msl import stock as stock_kernels
from quantized_kit import (
    DTYPES,
    FORMATS,
    FORMS,
    GROUPED,
    KS,
    NS,
    ROWS,
    assert_rounded,
    assert_same_bits,
    bits_of,
    float64,
    inputs,
    nearly_cancelling,
    one_of,
    sample,
    weights,
    whole,
)

from specmlx.kernels import quantized_matmul as kernels
from specmlx.kernels.quantized_matmul import reference


@pytest.mark.parametrize("form", FORMS)
def test_the_sample_has_every_value_of_each_list_and_every_pair_of_format_and_rows(form):
    cases, formats = list(sample(form)), GROUPED if form == "B" else list(FORMATS)
    assert {case.N for case in cases} == set(NS) and {case.K for case in cases} == set(KS)
    assert {(case.format, case.M) for case in cases} == {(name, M) for name in formats for M in ROWS}
    assert {case.dtype for case in cases} == set(DTYPES)
    if form in "AB":
        assert len({(case.format, case.dtype, case.M) for case in cases}) == len(formats) * len(ROWS) * len(DTYPES)


def silu(x: mx.array, error: float) -> mx.array:
    """x times sigmoid(x) (1 + error), both rounded to x's dtype, as mlx's nn.silu rounds on 16-bit numbers."""
    return x * mx.array(((1 + error) / (1 + np.exp(-float64(x)))).astype(np.float32)).astype(x.dtype)


def gathered(x: mx.array, packed: kernels.Matrix, case, sim: Simulator) -> None:
    """M pairs over two of three experts, and rows of x of which some are in no pair: what isn't in use is NaN."""
    experts = np.sort(5 * np.arange(case.M) % 2 * 2)
    rows = (7 * np.arange(case.M) + 2) % 11
    x = mx.where(mx.array(np.isin(np.arange(11), rows))[:, None], x, mx.array(float("nan"), x.dtype))
    pairs = mx.array(rows, mx.uint32), mx.array(experts, mx.int32)
    y = kernels.gather_quantized_matmul(x, packed, *pairs, factory=sim.metal_kernel)
    for expert in set(experts.tolist()):
        pairs = mx.array(np.flatnonzero(experts == expert))
        some = x[mx.array(rows)[pairs]]
        alone = kernels.quantized_matmul(some, one_of(packed, expert), factory=sim.metal_kernel)
        assert_same_bits(y[pairs], alone, case)


def is_slow(form: str, name: str) -> bool:
    """What is built on A, of the formats that are seldom met: compiling them takes a fifth of all tests' time."""
    return form not in "ABV" and re.fullmatch("affine[2356]g(32|128)", name) is not None


CASES = [(form, name) for form in FORMS for name in (GROUPED if form == "B" else FORMATS)]


@pytest.mark.parametrize(
    "form, name", [pytest.param(*case, marks=pytest.mark.slow if is_slow(*case) else ()) for case in CASES]
)
def test_every_row_count_on_odd_and_even_shapes_is_the_rounded_product(form, name):
    """A, B and V are held to float64; what is built on A has, bit by bit, what A and the operations after it give."""
    sim = Simulator()
    for case in (case for case in sample(form) if case.format == name):
        _, dtype, M, N, K = case
        packed = weights(name, (3, N, K) if form == "gather" else (N, K), dtype)
        x = inputs(11 if form == "gather" else M, K, dtype)
        run = {"factory": sim.metal_kernel}
        if form == "gather":
            gathered(x, packed, case, sim)
        elif form in ("A", "B", "V"):
            y = kernels.quantized_matmul(x, packed, form, **run)
            assert_rounded(y, x, reference.dense(packed), case)
            tiles = -(-M // (5 if form == "V" else 16))
            for weight in ("w", *["scales"] * (packed[1] is not None)):
                assert sim.last.buffers[weight].reads == tiles, (weight, case)
        elif form == "AX":
            y = kernels.quantized_matmul(x, packed, "AX", **run)
            assert_same_bits(y, kernels.quantized_matmul(x, packed, **run), case)
        elif form == "residual":
            residual = inputs(M, N, dtype, seed=3)
            y = kernels.quantized_matmul(x, packed, **run, residual=residual)
            assert_same_bits(y, kernels.quantized_matmul(x, packed, **run) + residual, case)
        else:
            x, up = x / 16, weights(name, (N, K), dtype, seed=5)._replace(tensor_scale=0.1)
            y = kernels.gated_quantized_matmul(x, packed, up, **run)
            assert sim.last.buffers["out"].stores_bytes == 2 * M * N
            assert sim.last.buffers["w"].reads == sim.last.buffers["up_w"].reads == -(-M // 16)
            gate = kernels.quantized_matmul(x, packed, **run)
            other = kernels.quantized_matmul(x, up, **run)
            # A sigmoid in float32 may lie on either side of a tie between 16-bit numbers.
            either = [bits_of(silu(gate, error) * other) for error in (-3e-7, 3e-7)]
            assert np.all((bits_of(y) == either[0]) | (bits_of(y) == either[1])), case


@pytest.mark.parametrize(
    "name, variant", [*((name, variant) for variant in "AV" for name in FORMATS), *((name, "B") for name in GROUPED)]
)
def test_a_rows_bits_depend_neither_on_the_number_of_rows_nor_on_its_place(name, variant):
    """Every number of rows from 1 to 32, every place among them; the other forms have A's bits."""
    sim = Simulator()
    packed = weights(name, (9, whole(576, name)), mx.float16)  # blocks for several simdgroups, and a tail
    x = nearly_cancelling(32, reference.dense(packed))
    run = {"factory": sim.metal_kernel, "variant": variant}
    alone = [bits_of(kernels.quantized_matmul(x[m : m + 1], packed, **run))[0] for m in range(32)]
    for M in range(2, 33):
        rows = (np.arange(M) + 5 * M) % 32
        y = bits_of(kernels.quantized_matmul(x[mx.array(rows)], packed, **run))
        assert np.array_equal(y, np.stack([alone[m] for m in rows])), f"{M} rows"


@pytest.mark.parametrize("name", FORMATS)
def test_no_form_is_further_from_float64_than_mlxs_own_kernels(name):
    """Of a product rounded to 16 bits, as both are; where mlx has no kernel (fp8), than its product with w unpacked."""
    sim = Simulator()
    mode, group_size, bits = FORMATS[name]
    packed = weights(name, (64, 1024), mx.float16)._replace(tensor_scale=None)
    dense, x = reference.dense(packed), inputs(4, 1024, mx.float16)

    def error(y):
        return np.abs(float64(y) - float64(x) @ float64(dense).T).mean()

    if mode == "fp8":
        stock = x @ dense.astype(x.dtype).T
    else:
        _, stock = stock_kernels.quantized_matmul("qmv_wide", x, *packed[:3], group_size, bits)
    assert_rounded(stock, x, dense)
    for variant in ("A", "V", *["B"] * (name in GROUPED)):
        y = kernels.quantized_matmul(x, packed, factory=sim.metal_kernel, variant=variant)
        # One number in 256 that both round from either side of a tie shifts the mean by less.
        assert error(y) <= 1.0002 * error(stock), variant
    # What 16 bits don't show: sums in float32 of products that nearly cancel, beside the largest of those that don't.
    x = nearly_cancelling(4, dense)
    largest = np.abs(float64(inputs(4, 1024)) @ float64(dense).T).max()
    for variant in ("A", "V", *["B"] * (name in GROUPED)):
        y = kernels.quantized_matmul(x, packed, factory=sim.metal_kernel, variant=variant)
        assert np.abs(float64(y) - float64(x) @ float64(dense).T).max() <= 6e-7 * largest, variant


@pytest.mark.parametrize("M, N, K", [(8, 33, 17408), (16, 17408, 256)])
@pytest.mark.parametrize("name", ["affine4g64", "affine8g64", "nvfp4"])
def test_the_models_longest_rows_and_its_most_are_the_rounded_product(name, M, N, K):
    """Two tiles of the down projection at its real K (scales come in chunks), and gate's real N."""
    sim = Simulator()
    packed = weights(name, (N, K))
    x = inputs(M, K)
    y = kernels.quantized_matmul(x, packed, factory=sim.metal_kernel)
    assert_rounded(y, x, reference.dense(packed))
    w, scales = sim.last.buffers["w"], sim.last.buffers["scales"]
    assert w.reads == scales.reads == 1 and w.line_use >= 0.97


@pytest.mark.parametrize("name", ["affine4g64", "affine8g64", "affine3g32", "nvfp4", "fp8"])
@pytest.mark.parametrize("pairs", [[3], [0, 0, 2, 2, 2, 3], [0] * 8 + [1] * 17 + [3] * 5 + [4] * 16])
def test_each_expert_in_use_is_read_once_for_16_rows_and_no_other(name, pairs):
    sim = Simulator()
    N, K, E = 64, whole(320, name), 5
    packed = weights(name, (E, N, K))
    used = np.isin(np.arange(E), pairs)
    if packed[1] is not None:
        poison = mx.array(float("nan")).astype(packed[1].dtype) if packed[2] is not None else mx.array(255, mx.uint8)
        packed = packed._replace(scales=mx.where(mx.array(used)[:, None, None], packed.scales, poison))
    rows = (7 * np.arange(len(pairs)) + 2) % 11
    x = mx.where(mx.array(np.isin(np.arange(11), rows))[:, None], inputs(11, K), mx.array(float("nan"), mx.bfloat16))
    rows, experts = mx.array(rows, mx.uint32), mx.array(pairs, mx.int32)
    y = kernels.gather_quantized_matmul(x, packed, rows, experts, factory=sim.metal_kernel)
    dense = reference.dense(packed)
    for pair, expert in enumerate(pairs):
        assert_rounded(y[pair : pair + 1], x[rows[pair : pair + 1]], dense[expert])
    tiles = sum(-(-pairs.count(expert) // (16 if len(pairs) > 8 else 8)) for expert in set(pairs))
    assert sim.last.buffers["w"].threadgroup_bytes == tiles * packed[0].nbytes // E
    eights = sum(-(-pairs.count(expert) // 8) for expert in set(pairs))
    assert sim.last.matrix_ops * 512 == eights * 8 * N * K  # no second 8 rows where there are none
    alone = kernels.quantized_matmul(x[rows[-1:]], one_of(packed, pairs[-1]), factory=sim.metal_kernel)
    assert np.array_equal(bits_of(alone)[0], bits_of(y)[-1])


def test_rows_of_w_and_scales_need_no_alignment():
    sim = Simulator()
    for name, M, N, K in [("affine8g32", 9, 5, 6400), ("nvfp4", 4, 6, 592), ("nvfp4", 12, 40, 80)]:
        packed = weights(name, (N, K))
        x = inputs(M, K)
        y = kernels.quantized_matmul(x, packed, factory=sim.metal_kernel)
        assert_rounded(y, x, reference.dense(packed))
        assert sim.last.buffers["w"].reads == 1 and sim.last.buffers["scales"].reads == 1


def test_what_has_no_kernel_is_refused_in_one_line():
    packed = weights("affine4g64", (8, 64))
    for x in (inputs(1, 64, mx.float32), inputs(1, 64, mx.float16), inputs(1, 128)):
        assert not kernels.supported(x, packed)
        with pytest.raises(ValueError, match="no kernel of form A for x .* use mx.quantized_matmul"):
            kernels.quantized_matmul(x, packed, factory=mx.fast.metal_kernel)


def test_a_residual_is_added_to_every_form():
    sim = Simulator()
    packed = weights("affine4g64", (40, 192))
    for M, variant in [(17, "AX"), (2, "V"), (9, "B")]:
        x, residual = inputs(M, 192), inputs(M, 40, seed=3)
        run = {"factory": sim.metal_kernel, "variant": variant}
        y = kernels.quantized_matmul(x, packed, residual=residual, **run)
        assert_same_bits(y, kernels.quantized_matmul(x, packed, **run) + residual)
