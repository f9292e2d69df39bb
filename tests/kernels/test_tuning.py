"""The table of tuning parameters: every family's values run, and chips that nobody knows have some."""

import mlx.core as mx
import pytest
from msl import Simulator

from specmlx.kernels.attention import Span, Stored, metal, reference
from specmlx.kernels.tuning import FAMILIES, family


def test_a_family_goes_by_the_architectures_last_letter_and_unknown_chips_have_one():
    assert family("applegpu_g13g") is FAMILIES["g"]
    assert family("applegpu_g16s") is FAMILIES["s"]
    assert family("applegpu_g14d") is FAMILIES["d"]
    assert family("applegpu_g31x") is family("cpu") is family("") is FAMILIES["s"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_chunks_give_a_position_its_bits_whatever_the_number_of_rows(name):
    chunks, sim = FAMILIES[name].chunks, Simulator()
    length = chunks.size * 2 + 5
    q, k, v = (
        mx.random.normal((1, heads, n, 64), key=mx.random.key(i)).astype(mx.bfloat16)
        for i, (heads, n) in enumerate([(2, 3), (1, length), (1, length)])
    )

    def rows(first: int, count: int) -> mx.array:
        span = Span(mx.array([length - 3 + first], dtype=mx.int32), length - 3 + first + count)
        some, factory = q[:, :, first : first + count], sim.metal_kernel
        return metal.attention(some, Stored(k), Stored(v), span, 0.125, chunks=chunks, factory=factory)

    together = rows(0, 3)
    want = reference.by_formula(q, Stored(k), Stored(v), Span(length - 3, length), 0.125)
    assert mx.abs(together - want).max().item() < 2**-7 * mx.abs(want).max().item()
    for t in range(3):
        assert mx.array_equal(rows(t, 1), together[:, :, t : t + 1]), t
