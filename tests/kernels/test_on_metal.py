"""The kernels on a Metal device: `make mac-check`. SPECMLX_SIMULATE=1 runs the same tests on the simulator."""

import os
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import rig

from specmlx.kernels.attention import Span
from specmlx.kernels.attention import metal as attention
from specmlx.kernels.choice.child import check
from specmlx.kernels.choice.operator import FIXED, STOCK
from specmlx.kernels.choice.operators import GATE_UP, OPERATORS, QUANTIZED_MATMUL
from specmlx.kernels.choice.table import Outcome, Table
from specmlx.kernels.chosen import choose_kernels
from specmlx.kernels.dispatch import Chooser, on_metal
from specmlx.kernels.gated_delta import Tape, metal

FORMATS = {
    **{f"affine{bits}": ("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)},
    "affine4g32": ("affine", 4, 32),
    "affine4g128": ("affine", 4, 128),
    "nvfp4": ("nvfp4", 4, 16),
    "mxfp4": ("mxfp4", 4, 32),
    "mxfp8": ("mxfp8", 8, 32),
}
KEYS = {
    "gated_delta": [{"Hk": 2, "Hv": 6, "Dk": 128, "Dv": 128}, {"Hk": 1, "Hv": 2, "Dk": 64, "Dv": 32}],
    "gated_delta_prefill": [{"Hk": 2, "Hv": 6, "Dk": 128, "Dv": 128, "dtype": "float32"}],
    "attention": [{"Hq": 24, "Hkv": 4, "D": 256, "kv": "plain"}]
    + [{"Hq": 6, "Hkv": 2, "D": 64, "kv": kv} for kv in ("plain", "int8", "affine4", "affine8")],
    "gate_up": [{"N": 72, "K": 1216, "mode": "affine", "bits": 4, "group_size": 64}],
    "experts": [{"E": 5, "N": 72, "K": 1216, "mode": "affine", "bits": 4, "group_size": 64}],
    "draft_head": [{}],
    "accept": [{}],
}
OTHERS = [(operator, {"dtype": "bfloat16", **key}) for operator in OPERATORS for key in KEYS.get(operator.name, [])]


def product(name: str, K: int = 1216, dtype: str = "bfloat16") -> dict:
    mode, bits, group_size = FORMATS[name]
    return {
        "N": 72,
        "K": K // group_size * group_size,
        "mode": mode,
        "bits": bits,
        "group_size": group_size,
        "dtype": dtype,
    }


FORMS = [(QUANTIZED_MATMUL, name, form) for name in FORMATS for form in QUANTIZED_MATMUL.variants(product(name))]
FORMS += [(GATE_UP, name, form) for name in ("affine4", "affine8", "nvfp4") for form in ("A", "AX")]


@pytest.fixture(scope="module")
def factory():
    if os.environ.get("SPECMLX_SIMULATE") == "1":
        from msl import Simulator

        return Simulator().metal_kernel
    if not on_metal():
        pytest.skip("mlx runs on no Metal device here")
    return mx.fast.metal_kernel


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_products_agree_with_the_reference(factory, name, dtype):
    key = product(name, dtype=dtype)
    variants = list(QUANTIZED_MATMUL.variants(key))
    assert check(replace(QUANTIZED_MATMUL, factory=factory), key, (1, 2, 5, 8, 16, 17), variants) == variants


@pytest.mark.parametrize("operator, name, form", FORMS, ids=lambda x: getattr(x, "name", x))
def test_a_rows_bits_depend_neither_on_the_number_of_rows_nor_on_its_place(factory, operator, name, form):
    operator = replace(operator, factory=factory)
    inputs = operator.inputs(product(name), 32, seed=3, exact=True)
    # A product with what is added to it is a kernel of its own.
    with_rows = [field for field in ("x", "other") if isinstance(getattr(inputs, field), mx.array)]

    def bits(rows: np.ndarray) -> np.ndarray:
        some = {field: getattr(inputs, field)[mx.array(rows)] for field in with_rows}
        return np.array(operator.run(form, inputs._replace(**some)).view(mx.uint16))

    alone = np.concatenate([bits(np.array([m])) for m in range(32)])
    for M in range(2, 33):
        rows = (np.arange(M) + 5 * M) % 32
        assert np.array_equal(bits(rows), alone[rows]), f"{M} rows"


@pytest.mark.parametrize("operator, key", OTHERS, ids=lambda x: x.name if hasattr(x, "name") else "")
def test_the_other_kernels_agree_with_their_references(factory, operator, key):
    variants = [variant for variant in operator.variants(key) if variant != STOCK]
    rows = (1, 40) if operator.name == "gated_delta_prefill" else (1, 2, 8, 16)
    assert check(replace(operator, factory=factory), key, rows, variants) == variants


def test_a_pass_and_a_fold_have_the_bits_of_single_steps(factory):
    operator = next(each for each in OPERATORS if each.name == "gated_delta")
    key = {"Hk": 2, "Hv": 6, "Dk": 128, "Dv": 128, "dtype": "bfloat16"}
    S, _, _, *rows = operator.inputs(key, 8, seed=5, exact=True)
    nothing = Tape(rows[1][:, :1], mx.zeros((1, 1, 6, 128)), mx.zeros((1, 1, 6)))
    zero, one = mx.array([0], dtype=mx.int32), mx.array([1], dtype=mx.int32)
    _, y, tape = metal.advance(S, nothing, zero, *rows, factory=factory)
    state, before, count = S, nothing, zero
    for t in range(8):
        state, y_t, before = metal.advance(state, before, count, *(x[:, t : t + 1] for x in rows), factory=factory)
        count = one
        assert mx.array_equal(y_t, y[:, t : t + 1])
        folded = metal.fold(S, tape, mx.array([t + 1], dtype=mx.int32), factory=factory)
        assert mx.array_equal(folded, metal.fold(state, before, one, factory=factory))


def test_a_positions_attention_has_the_same_bits_alone_and_among_others(factory):
    operator = next(each for each in OPERATORS if each.name == "attention")
    key = {"Hq": 6, "Hkv": 1, "D": 64, "kv": "plain", "dtype": "bfloat16"}
    q, keys, values = operator.inputs(key, 17, seed=5, exact=True)
    start = keys.data.shape[2] - 17

    def rows(first: int, count: int) -> mx.array:
        at = mx.array([start + first], dtype=mx.int32)
        part = q[:, :, first : first + count]
        return attention.attention(part, keys, values, Span(at, start + first + count), 0.125, factory=factory)

    together = rows(0, 17)
    for first, count in ((0, 1), (3, 5), (8, 9), (16, 1)):
        assert mx.array_equal(rows(first, count), together[:, :, first : first + count]), (first, count)


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("form", ["A", "AX", "B", "V", FIXED, "bf16"])
def test_a_consistent_models_rows_have_the_same_bits_alone_and_together(factory, form, kind, tmp_path, monkeypatch):
    sizes = dict(num_hidden_layers=2, full_attention_interval=2, head_dim=64)
    if kind == "experts":
        if form == "bf16" and not on_metal():
            pytest.skip("mlx's CPU multiplies experts that are not packed in float32 only")
        sizes |= rig.EXPERTS | {"moe_intermediate_size": 64}
    model = rig.tiny(dtype=mx.bfloat16, bits=None if form == "bf16" else 4, group_size=64, **sizes)
    outcome = Outcome() if form == FIXED else Outcome({1: {form: 1.0, "A": 2.0}, 32: {form: 1.0, "A": 2.0}})
    table = Table.read(tmp_path / "kernels.json", "this chip")
    chooser = Chooser(table=table, race=lambda *_: outcome, available=True, consistent=True)
    rig.serve(monkeypatch, factory)
    choose_kernels(model, mx.bfloat16, chooser, factory)
    ids, states, alone = rig.tokens(1, 9), model.new_states(), []
    together = model.verify(model.new_states(), ids).logits
    for t in range(ids.shape[1]):
        alone.append(model.verify(states, ids[:, t : t + 1]).logits)
        states.commit(1)
    assert mx.array_equal(mx.concatenate(alone, axis=1), together)
