"""The attention kernels, their Metal source run on the CPU: against float64, against themselves, and traffic."""

import mlx.core as mx
import numpy as np
import pytest
from msl import Simulator
from rig import serve

from specmlx.kernels.attention import attention, metal, reference
from specmlx.kernels.attention.reference import Span, Stored
from specmlx.kernels.tuning import Chunks

SIMULATOR = Simulator()
# Short chunks, so that a few hundred keys meet several of both kinds.
CHUNKS = Chunks(size=64, many=2, rest=128)


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def stored(x: mx.array, kind: str) -> Stored:
    if kind in ("float32", "bfloat16", "float16"):
        return Stored(x.astype(getattr(mx, kind)))
    if kind == "int8":
        scales = mx.abs(x).max(axis=-1, keepdims=True) / 127
        return Stored(mx.round(x / scales).astype(mx.int8), scales, bits=8)
    bits, group = (int(n) for n in kind.split("/"))
    return Stored(*mx.quantize(x, group_size=group, bits=bits), bits=bits)


def buffer(B: int, Hkv: int, capacity: int, D: int, kind: str, end: int) -> tuple[Stored, Stored]:
    """Random keys and values; behind row `end` everything that can hold NaN does."""

    def poison(x: mx.array | None) -> mx.array | None:
        if x is None or not mx.issubdtype(x.dtype, mx.floating):
            return x
        return mx.where((mx.arange(x.shape[2]) < end)[:, None], x, mx.nan).astype(x.dtype)

    def make(seed: int) -> Stored:
        x = stored(normal(B, Hkv, capacity, D, seed=seed), kind)
        return Stored(*(poison(part) for part in x[:3]), bits=x.bits)

    return make(1), make(2)


def run(q, keys, values, start, window=None, chunks=CHUNKS):
    start = mx.array(start, dtype=mx.int32)
    span = Span(start, int(start.max()) + q.shape[2], window=window)
    factory = SIMULATOR.metal_kernel
    return metal.attention(q, keys, values, span, q.shape[-1] ** -0.5, chunks=chunks, factory=factory)


def in_float64(q, keys, values, start, window=None):
    """softmax(q kᵀ / sqrt(D)) v of each row by itself."""
    B, Hq, T, D = q.shape
    q = np.array(q.astype(mx.float32), np.float64)
    k, v = (np.array(reference.dequantized(x), np.float64) for x in (keys, values))
    out = np.zeros(q.shape)
    for b, h, t in np.ndindex(B, Hq, T):
        last = start[b] + t + 1
        span = slice(max(last - window, 0) if window else 0, last)
        head = h * k.shape[1] // Hq
        scores = k[b, head, span] @ q[b, h, t] / np.sqrt(D)
        weights = np.exp(scores - scores.max())
        out[b, h, t] = weights @ v[b, head, span] / weights.sum()
    return out


# Hq, Hkv, D, T, start, kind, window
CASES = [
    (6, 1, 256, 8, [150], "bfloat16", None),
    (6, 1, 256, 17, [83], "bfloat16", None),
    (2, 2, 64, 1, [0], "float32", None),
    (4, 1, 64, 5, [127, 3, 60], "float32", None),
    (8, 1, 64, 17, [111], "float16", None),
    (4, 2, 96, 3, [200, 199], "float32", 70),
    (7, 1, 128, 4, [64], "int8", None),
    (12, 1, 64, 3, [70], "bfloat16", 33),
    (4, 2, 128, 9, [91, 5], "8/64", None),
    (6, 1, 256, 2, [129], "4/64", None),
    (3, 1, 192, 6, [40], "4/32", 24),
    (2, 1, 128, 2, [30], "int8", 16),
    (6, 1, 192, 12, [25], "bfloat16", None),
    (2, 1, 160, 4, [66, 7], "float16", 40),
    (3, 1, 224, 5, [61], "8/32", None),
    (2, 2, 256, 3, [33, 90], "4/128", 65),
]


def test_the_cases_have_every_head_size_with_and_without_a_window_and_lanes_of_their_own_length():
    assert {D for _, _, D, *_ in CASES} == set(range(64, 257, 32))
    assert {kind for *_, kind, _ in CASES} >= {"bfloat16", "float16", "int8", "8/64", "4/64"}
    assert (
        {bool(window) for *_, window in CASES} == {bool(len(start) > 1) for *_, start, _, _ in CASES} == {True, False}
    )


@pytest.mark.parametrize("Hq, Hkv, D, T, start, kind, window", CASES)
def test_rows_see_the_keys_up_to_their_own(Hq, Hkv, D, T, start, kind, window):
    B, dtype = len(start), getattr(mx, kind, mx.float32)
    dtype = dtype if isinstance(dtype, mx.Dtype) and dtype != mx.int8 else mx.float32
    q = normal(B, Hq, T, D, seed=3).astype(dtype)
    keys, values = buffer(B, Hkv, max(start) + T + 3, D, kind, max(start) + T)
    want = in_float64(q, keys, values, start, window)
    got = run(q, keys, values, start, window)
    assert got.dtype == dtype and got.shape == q.shape
    rounding = {mx.float32: 0, mx.bfloat16: 2**-8, mx.float16: 2**-11}[dtype]
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), want, rtol=rounding, atol=3e-6)
    span = Span(mx.array(start), keys.data.shape[2], window=window)
    mine = np.array(reference.by_formula(q, keys, values, span, D**-0.5))
    np.testing.assert_allclose(mine, want, rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    "Hq, D, kind, window",
    [
        (2, 64, "float32", None),
        (6, 64, "bfloat16", 90),
        (3, 96, "float16", None),
        (4, 128, "int8", 30),
        (2, 128, "8/64", None),
        (2, 64, "4/32", 70),
    ],
)
def test_any_number_of_rows_in_any_format_sees_the_keys_up_to_its_own_with_the_same_bits(Hq, D, kind, window):
    """17 rows against float64, then 1 .. 16 of them from somewhere among these."""
    T, start = 17, [58, 9]
    dtype = getattr(mx, kind) if kind in ("bfloat16", "float16") else mx.float32
    q = normal(2, Hq, T, D, seed=3).astype(dtype)
    keys, values = buffer(2, 1, max(start) + T, D, kind, max(start) + T)
    whole = run(q, keys, values, start, window)
    rounding = {mx.float32: 0, mx.bfloat16: 2**-8, mx.float16: 2**-11}[dtype]
    want = in_float64(q, keys, values, start, window)
    np.testing.assert_allclose(np.array(whole.astype(mx.float32)), want, rtol=rounding, atol=3e-6)
    for n in range(1, 17):
        first = 5 * n % (18 - n)
        part = run(q[:, :, first : first + n], keys, values, [s + first for s in start], window)
        assert mx.array_equal(part, whole[:, :, first : first + n]), (n, first)


@pytest.mark.parametrize(
    "Hq, D, kind, window, start",
    [(6, 64, "bfloat16", None, 58), (8, 64, "int8", 30, 58), (6, 256, "bfloat16", None, 20)],
)
def test_a_positions_bits_do_not_depend_on_the_rows_around_it(Hq, D, kind, window, start):
    T = 17
    dtype = mx.float32 if kind == "int8" else mx.bfloat16
    q = normal(1, Hq, T, D, seed=3).astype(dtype)
    keys, values = buffer(1, 1, start + T, D, kind, start + T)
    whole = run(q, keys, values, [start], window)
    for first, T_part in [(0, 1), (3, 5), (8, 9)]:
        part = run(q[:, :, first : first + T_part], keys, values, [start + first], window)
        assert mx.array_equal(part, whole[:, :, first : first + T_part]), (first, T_part)


@pytest.mark.parametrize(
    "T, D, kind",
    [(8, 128, "bfloat16"), (16, 128, "bfloat16"), (8, 128, "int8"), (8, 128, "4/64"), (17, 256, "bfloat16")],
)
def test_each_key_and_value_is_read_once_for_all_rows_and_heads(T, D, kind):
    Hkv, length = 2, 192
    dtype = mx.bfloat16 if kind == "bfloat16" else mx.float32
    q = normal(1, 6 * Hkv, T, D).astype(dtype)
    keys, values = buffer(1, Hkv, length, D, kind, length)
    span, factory = Span(mx.array([length - T]), length), SIMULATOR.metal_kernel
    metal.attention(q, keys, values, span, 0.1, chunks=Chunks(64), factory=factory)
    chunks, _ = SIMULATOR.reports[-2:]
    assert chunks.buffers["keys"].reads == chunks.buffers["values"].reads == 1
    # Two simdgroups share the rows of 17 times 6, so that none waits: both load the keys, side by side.
    assert chunks.buffers["keys"].loads_bytes == (2 if T == 17 else 1) * keys.data.nbytes
    assert chunks.buffers["values"].loads_bytes == values.data.nbytes


def test_a_window_loads_no_blocks_before_it():
    T, D, length, window = 4, 64, 512, 70
    q, (keys, values) = normal(1, 2, T, D), buffer(1, 1, length, D, "float32", length)
    run(q, keys, values, [length - T], window, Chunks(256, 1, 256))
    # 73 keys lie in two blocks of 64.
    assert SIMULATOR.reports[-2].buffers["keys"].loads_bytes == 2 * 64 * D * 4


@pytest.mark.parametrize(
    "start, T, first", [(70, 4, 0), (mx.array([70, 9]), 4, 0), (0, 18, 0), (mx.array([0, 73]), 1, 1)]
)
def test_the_operator_gives_what_stock_mlx_gives(start, T, first, monkeypatch):
    B, D, capacity = 2, 64, 96
    q = normal(B, 4, T, D, seed=3)
    keys, values = (Stored(normal(B, 2, capacity, D, seed=seed)) for seed in (1, 2))
    length = T if T == 18 else 74
    span = Span(start, length, first)
    args = (q, keys, values, span, D**-0.5, span.mask(T)[:, None])
    launches = len(SIMULATOR.reports)
    want = attention(*args)
    serve(monkeypatch, SIMULATOR.metal_kernel)
    got = attention(*args)
    assert (len(SIMULATOR.reports) > launches) == (T <= 17)
    np.testing.assert_allclose(np.array(got), np.array(want), rtol=0, atol=3e-6)
