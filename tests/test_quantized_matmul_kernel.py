"""The quantized_matmul kernels' own launches and Metal source, run by the simulator, against float64."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from msl import Simulator
from msl import stock as stock_kernels

from specmlx.kernels import quantized_matmul as kernels
from specmlx.kernels.quantized_matmul import reference

FORMATS = {
    "affine4g32": ("affine", 32, 4),
    "affine4g64": ("affine", 64, 4),
    "affine4g128": ("affine", 128, 4),
    "affine8g32": ("affine", 32, 8),
    "affine8g64": ("affine", 64, 8),
    "affine8g128": ("affine", 128, 8),
    "affine2": ("affine", 64, 2),
    "affine3": ("affine", 32, 3),
    "affine5": ("affine", 64, 5),
    "affine6": ("affine", 128, 6),
    "nvfp4": ("nvfp4", 16, 4),
    "mxfp4": ("mxfp4", 32, 4),
    "mxfp8": ("mxfp8", 32, 8),
    "fp8": ("fp8", None, 8),
}
COMMON = ["affine4g64", "affine8g64", "nvfp4", "mxfp8"]
ROWS = [*range(1, 18), 24, 32]
NS = [1, 8, 13, 40, 96, 1001, 1024]
KS = [64, 128, 192, 320, 512, 2048, 5120]


def weights(name, shape, dtype=mx.bfloat16, seed=0):
    """(w, scales, biases) and the keywords of a random matrix `[..., N, K]` in a format."""
    mode, group_size, bits = FORMATS[name]
    dense = mx.random.normal(shape, key=mx.random.key(seed))
    format = {"mode": mode, "group_size": group_size, "bits": bits}
    if mode == "fp8":
        scale = 0.37 if len(shape) == 2 else mx.random.uniform(0.3, 0.4, shape[:2], key=mx.random.key(seed + 1))
        return (mx.to_fp8(dense).view(mx.uint32), None, None), {**format, "tensor_scale": scale}
    packed = mx.quantize(dense.astype(dtype), group_size=group_size, bits=bits, mode=mode)
    if mode == "nvfp4":
        format["tensor_scale"] = mx.random.uniform(1.5, 1.7, shape[:-1], key=mx.random.key(seed + 1))
    return (*packed, *[None] * (3 - len(packed))), format


def whole(K, name):
    """The next K that the format's groups divide."""
    group = FORMATS[name][1] or 16
    return -(-K // group) * group


def inputs(M, K, dtype=mx.bfloat16, seed=1):
    return mx.random.normal((M, K), key=mx.random.key(seed)).astype(dtype)


def float64(x):
    return np.array(x.astype(mx.float32)).astype(np.float64)


def bits_of(x):
    return np.array(x.view(mx.uint16))


def assert_rounded(y, x, dense):
    """y is x denseᵀ `[M, N]`, summed in float32 (relative 1e-6 of the sum of magnitudes), rounded once to y's dtype."""
    x, dense = float64(x), float64(dense)
    exact, error = x @ dense.T, 1e-6 * (np.abs(x) @ np.abs(dense).T)
    low, high = (float64(mx.array((exact + e).astype(np.float32)).astype(y.dtype)) for e in (-error, error))
    y = float64(y)
    assert np.all((low <= y) & (y <= high)), f"{np.abs(y - exact).max():.2e} off"


def sample():
    """Every pair of format and M, with N and K going round; no large N with a large K, for time.

    N = 1 makes arrays so small that Metal gives them another address space, and so other kernels: for a few formats.
    """
    i = 0
    for f, name in enumerate(FORMATS):
        group = FORMATS[name][1] or 16
        for M in ROWS:
            N = max(NS[i % len(NS)], 1 if f % 4 == 1 else 8)
            ks = [K for K in KS if K % group == 0 and K * N <= 1024 * 192]
            yield name, M, N, ks[(i // len(NS) + f) % len(ks)]
            i += 1


def test_the_sample_has_every_value_of_each_list():
    _, Ms, Ns, Ks = map(set, zip(*sample(), strict=True))
    assert Ms == set(ROWS) and Ns == set(NS) and Ks == set(KS)


@pytest.mark.parametrize("name", FORMATS)
def test_every_row_count_on_odd_and_even_shapes_is_the_rounded_product(name):
    sim = Simulator()
    for _, M, N, K in (case for case in sample() if case[0] == name):
        dtype = mx.float16 if M in (4, 9) and name in COMMON else mx.bfloat16
        packed, format = weights(name, (N, K), dtype)
        x = inputs(M, K, dtype)
        y = kernels.quantized_matmul(x, *packed, **format, kernel=sim.metal_kernel)
        assert_rounded(y, x, reference.dense(*packed, **format))


GROUPED = ["affine4g64", "affine4g128", "affine8g64", "affine8g128"]  # formats of form B


@pytest.mark.parametrize(
    "name, variant", [*((name, variant) for variant in "AV" for name in FORMATS), *((name, "B") for name in GROUPED)]
)
def test_a_rows_bits_depend_neither_on_the_number_of_rows_nor_on_its_place(name, variant):
    sim = Simulator()
    K = whole(576, name)  # blocks for several simdgroups, and a tail
    packed, format = weights(name, (9, K), mx.float16)
    # Products that nearly cancel, so that what the order of the sums rounds away shows in 16 bits.
    dense, x = float64(reference.dense(*packed, **format)), float64(inputs(32, K))
    x = mx.array(x - x @ np.linalg.pinv(dense) @ dense).astype(mx.float16)
    run = {"kernel": sim.metal_kernel, "variant": variant, **format}
    alone = [bits_of(kernels.quantized_matmul(x[m : m + 1], *packed, **run))[0] for m in range(32)]
    some = (2, 3, 4, 5, 8, 17, 32) if name in COMMON else (5, 32)  # each of 2 to 5 rows is a kernel of form V
    for M in range(2, 33) if variant == "A" else some:
        rows = (np.arange(M) + 5 * M) % 32
        y = bits_of(kernels.quantized_matmul(x[mx.array(rows)], *packed, **run))
        assert np.array_equal(y, np.stack([alone[m] for m in rows])), f"{M} rows"


@pytest.mark.parametrize("name", FORMATS)
def test_the_vector_form_is_the_rounded_product(name):
    sim = Simulator()
    for M, N, K in [(1, 13, 5120), (5, 96, 320), (10, 1001, 64), (20, 40, 2048), (1, 8, 192), (15, 8, 512)]:
        K = whole(K, name)
        packed, format = weights(name, (N, K))
        x = inputs(M, K)
        y = kernels.quantized_matmul(x, *packed, **format, kernel=sim.metal_kernel, variant="V")
        assert_rounded(y, x, reference.dense(*packed, **format))


@pytest.mark.parametrize("name", ["affine4g64", "affine8g64", "affine3", "nvfp4", "fp8"])
@pytest.mark.parametrize("pairs", [[3], [0, 0, 2, 2, 2, 3], [0] * 8 + [1] * 17 + [3] * 5 + [4] * 16])
def test_each_expert_in_use_is_read_once_for_16_rows_and_no_other(name, pairs):
    sim = Simulator()
    N, K, E = 64, whole(320, name), 5
    packed, format = weights(name, (E, N, K))
    used = np.isin(np.arange(E), pairs)
    if packed[1] is not None:
        poison = mx.array(float("nan")).astype(packed[1].dtype) if packed[2] is not None else mx.array(255, mx.uint8)
        packed = (packed[0], mx.where(mx.array(used)[:, None, None], packed[1], poison), packed[2])
    rows = (7 * np.arange(len(pairs)) + 2) % 11
    x = mx.where(mx.array(np.isin(np.arange(11), rows))[:, None], inputs(11, K), mx.array(float("nan"), mx.bfloat16))
    rows, experts = mx.array(rows, mx.uint32), mx.array(pairs, mx.int32)
    y = kernels.gather_quantized_matmul(x, *packed, rows, experts, **format, kernel=sim.metal_kernel)
    dense = reference.dense(*packed, **format)
    for pair, expert in enumerate(pairs):
        assert_rounded(y[pair : pair + 1], x[rows[pair : pair + 1]], dense[expert])
    tiles = sum(-(-pairs.count(expert) // (16 if len(pairs) > 8 else 8)) for expert in set(pairs))
    assert sim.last.buffers["w"].threadgroup_bytes == tiles * packed[0].nbytes // E
    eights = sum(-(-pairs.count(expert) // 8) for expert in set(pairs))
    assert sim.last.matrix_ops * 512 == eights * 8 * N * K  # no second 8 rows where there are none
    if (scale := format.pop("tensor_scale", None)) is not None:
        format["tensor_scale"] = scale[pairs[-1]]
    last = (None if a is None else a[pairs[-1]] for a in packed)
    alone = kernels.quantized_matmul(x[rows[-1:]], *last, **format, kernel=sim.metal_kernel)
    assert np.array_equal(bits_of(alone)[0], bits_of(y)[-1])


@pytest.mark.parametrize("name", ["affine4g64", "affine8g64", "affine5", "nvfp4"])
def test_x_in_the_order_of_the_lanes_gives_the_same_bits(name):
    sim = Simulator()
    for M, K in [(1, 64), (5, 192), (9, 320), (16, 1088), (17, 576), (24, 80 if name == "nvfp4" else 96)]:
        K = whole(K, name)
        packed, format = weights(name, (40, K))
        x = inputs(M, K)
        run = {"kernel": sim.metal_kernel, **format}
        plain, ordered = (kernels.quantized_matmul(x, *packed, **run, variant=variant) for variant in ("A", "AX"))
        assert np.array_equal(bits_of(plain), bits_of(ordered))
        assert_rounded(plain, x, reference.dense(*packed, **format))


BOUNDED = [
    "affine4g32",
    "affine4g64",
    "affine4g128",
    "affine8g32",
    "affine8g64",
    "affine8g128",
    "nvfp4",
    "mxfp4",
    "mxfp8",
]


@pytest.mark.parametrize("name", BOUNDED)
def test_weights_and_scales_are_read_once_in_whole_lines(name):
    sim = Simulator()
    N, K = 256, 2048
    packed, format = weights(name, (N, K))
    for M in (1, 5, 8, 16, 24):
        kernels.quantized_matmul(inputs(M, K), *packed, **format, kernel=sim.metal_kernel)
        traffic = sim.last.buffers
        for key in ("w", "scales", *["biases"] * (packed[2] is not None)):
            assert traffic[key].reads == (1 if M <= 16 else 2) and traffic[key].line_use == 1, key
        packed_bytes = sum(a.nbytes for a in packed if a is not None)
        if M in (8, 16):
            assert traffic["ordered_x"].simd_bytes <= M // 8 * packed_bytes
            assert sim.last.multiply_adds <= 1.15 * M * N * K


def test_scales_that_fill_threadgroup_memory_come_in_chunks_and_rows_need_no_alignment():
    sim = Simulator()
    for name, M, N, K in [
        ("affine4g64", 3, 33, 17408),
        ("affine8g32", 9, 5, 6400),
        ("nvfp4", 2, 3, 17408),
        ("nvfp4", 4, 6, 592),
    ]:
        packed, format = weights(name, (N, K))
        x = inputs(M, K)
        y = kernels.quantized_matmul(x, *packed, **format, kernel=sim.metal_kernel)
        assert_rounded(y, x, reference.dense(*packed, **format))
        assert sim.last.buffers["w"].reads == 1 and sim.last.buffers["scales"].reads == 1


def test_what_has_no_kernel_is_refused_in_one_line():
    packed, format = weights("affine4g64", (8, 64))
    for x in (inputs(1, 64, mx.float32), inputs(1, 64, mx.float16), inputs(1, 128)):
        assert not kernels.supported(x, *packed[:2], **format)
        with pytest.raises(ValueError, match="no kernel of form A for x .* use mx.quantized_matmul"):
            kernels.quantized_matmul(x, *packed, **format)


@pytest.mark.parametrize("name", GROUPED)
def test_scales_outside_the_matrix_operations_give_the_rounded_product(name):
    sim = Simulator()
    for M, N, K in [(1, 1, 64), (3, 13, 192), (8, 1001, 320), (9, 40, 2048), (16, 96, 512), (24, 8, 5120)]:
        K = whole(K, name)
        dtype = mx.float16 if M == 3 else mx.bfloat16
        packed, format = weights(name, (N, K), dtype)
        x = inputs(M, K, dtype)
        y = kernels.quantized_matmul(x, *packed, **format, kernel=sim.metal_kernel, variant="B")
        assert_rounded(y, x, reference.dense(*packed, **format))
        assert sim.last.buffers["w"].reads == (1 if M <= 16 else 2)


@pytest.mark.parametrize(
    "name, variant", [("affine4g64", "A"), ("affine4g64", "AX"), ("affine8g32", "A"), ("nvfp4", "A"), ("fp8", "A")]
)
def test_gate_and_up_in_one_pass_have_the_bits_of_two_passes(name, variant):
    sim = Simulator()
    for M, N, K in [(3, 40, 576), (16, 13, 192), (20, 96, 320)]:
        (gate, format), (up, _) = weights(name, (N, K)), weights(name, (N, K), seed=5)
        x, scale = inputs(M, K) / 16, format.pop("tensor_scale", None)
        run = {"kernel": sim.metal_kernel, "variant": variant, **format}
        y = kernels.gated_quantized_matmul(x, (*gate, scale), (*up, 0.1), **run)
        fused = sim.last.buffers
        assert fused["w"].reads == fused["up_w"].reads == -(-M // 16) and fused["out"].stores_bytes == 2 * M * N
        g = kernels.quantized_matmul(x, *gate, tensor_scale=scale, **run)
        u = kernels.quantized_matmul(x, *up, tensor_scale=0.1, **run)
        sigmoid = mx.array((1 / (1 + np.exp(-float64(g)))).astype(np.float32)).astype(g.dtype)
        expected = (g * sigmoid) * u
        assert np.array_equal(bits_of(y), bits_of(expected))


def test_a_residual_is_added_to_the_rounded_product():
    sim = Simulator()
    packed, format = weights("affine4g64", (40, 192))
    for M, variant in [(3, "A"), (17, "AX"), (2, "V"), (9, "B")]:
        x, residual = inputs(M, 192), inputs(M, 40, seed=3)
        run = {"kernel": sim.metal_kernel, "variant": variant, **format}
        y = kernels.quantized_matmul(x, *packed, residual=residual, **run)
        assert np.array_equal(bits_of(y), bits_of(kernels.quantized_matmul(x, *packed, **run) + residual))


@pytest.mark.parametrize("name", COMMON)
def test_no_form_is_further_from_float64_than_mlxs_own_kernels(name):
    sim = Simulator()
    mode, group_size, bits = FORMATS[name]
    packed, format = weights(name, (64, 1024))
    format.pop("tensor_scale", None)
    x = inputs(4, 1024)
    exact = float64(x) @ float64(reference.dense(*packed, **format)).T

    def error(y):
        return np.abs(float64(y) - exact).mean()

    _, stock = stock_kernels.quantized_matmul("qmv_wide", x, *packed, group_size, bits)
    for variant in ("A", "V", *["B"] * (name in GROUPED)):
        y = kernels.quantized_matmul(x, *packed, **format, kernel=sim.metal_kernel, variant=variant)
        assert error(y) <= 1.01 * error(stock), variant


def counted(form, name, M):
    """A row of the README's table: a launch of N 64, K 5120 as the simulator counts it."""
    sim = Simulator()
    N, K = 64, 5120
    packed, format = weights(name, (N, K))
    kernels.quantized_matmul(inputs(M, K), *packed, **format, kernel=sim.metal_kernel, variant=form)
    report, traffic = sim.last, sim.last.buffers
    x = traffic["x" if form == "V" else "ordered_x"]
    packed_bytes = sum(a.nbytes for a in packed if a is not None)
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
    # The last three depend a little on the simulator's compiler.
    assert np.all(np.abs(counts - np.array(figures, float)) <= [0.006] * 6 + [0.01] + [0.3] * 3)
