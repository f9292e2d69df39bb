"""Quantized layers of a model on the chosen kernels: the library's own launches, run by the simulator."""

import mlx.core as mx
import mlx.nn as nn
import msl
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU

from specmlx.formats.scaled_linear import ScaledLinear
from specmlx.kernels.choice.operator import REFERENCE, STOCK
from specmlx.kernels.choice.operators import QUANTIZED_MATMUL
from specmlx.kernels.choice.table import Outcome, Table
from specmlx.kernels.chosen import choose_kernels, mixed
from specmlx.kernels.dispatch import Chooser
from specmlx.kernels.linear import CHOSEN, GatedMLP
from specmlx.kernels.quantized_matmul import Matrix, reference


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.layers = [nn.Linear(64, 24, bias=True), nn.Linear(24, 64, bias=False)]

    def __call__(self, ids):
        return self.embed.as_linear(self.layers[0](self.embed(ids)) @ mx.ones((24, 64), self.embed.scales.dtype))


def tiny(dtype=mx.bfloat16) -> Tiny:
    model = Tiny()
    model.set_dtype(dtype)
    # Rows of 24 are no whole group: that layer stays as it is.
    nn.quantize(model, group_size=64, bits=4, class_predicate=lambda _, m: m.weight.shape[-1] == 64)
    return model


def chooser(tmp_path, **outcome: float):
    seconds = {n: {STOCK: 1.0, **outcome} for n in (1, 32, 128)}
    table = Table.read(tmp_path / "kernels.json", "Apple M99")
    return Chooser(table=table, race=lambda *_: Outcome(seconds), available=True)


def test_chosen_kernels_serve_few_rows_and_keep_the_parameters(tmp_path):
    model, sim = tiny(), msl.Simulator()
    before = dict(nn.utils.tree_flatten(model.parameters()))
    ids = mx.array([[1, 5, 39]])
    want = model(ids)
    chosen = choose_kernels(model, mx.bfloat16, chooser(tmp_path, A=0.5), sim.metal_kernel)
    assert {shape: str(choice) for shape, choice in chosen.items()} == {
        "40x64 affine 4/64": "A",
        "24x64 affine 4/64": "A",
    }
    assert (type(model.embed), type(model.layers[0]), type(model.layers[1])) == (
        CHOSEN[nn.QuantizedEmbedding],
        CHOSEN[nn.QuantizedLinear],
        nn.Linear,
    )
    after = dict(nn.utils.tree_flatten(model.parameters()))
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)
    got = model(ids)
    assert got.dtype == want.dtype and got.shape == want.shape
    # mlx's CPU kernel sums in bfloat16.
    assert mx.abs(got - want).max().item() < 0.05 * mx.abs(want).max().item()
    assert {r.name for r in sim.reports} >= {"specmlx_quantized_matmul_A"}


def test_a_bias_is_added_and_many_rows_go_to_mlx(tmp_path):
    layer = tiny().layers[0]
    layer.bias = mx.arange(24).astype(mx.bfloat16)
    sim = msl.Simulator()
    model = nn.Sequential(layer)
    choose_kernels(model, mx.bfloat16, chooser(tmp_path, A=0.5), sim.metal_kernel)
    x = mx.random.normal((33, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    want = reference.quantized_matmul(x, Matrix(layer.weight, layer.scales, layer.biases)) + layer.bias
    assert mx.array_equal(model(x[:2]), want[:2])
    launches = len(sim.reports)
    assert launches and mx.array_equal(model(x), layer(x))
    assert len(sim.reports) == launches


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_codes_with_a_scale_of_the_tensor_or_of_channels(tmp_path, mode, channels, dtype):
    layer = ScaledLinear(mode)
    format = {"group_size": layer.group_size, "bits": layer.bits, "mode": mode}
    layer.weight, layer.scales = mx.quantize(mx.random.normal((24, 64), key=mx.random.key(1)), **format)
    layer.output_scale = mx.random.uniform(0.5, 2, (24,) if channels else (), key=mx.random.key(2))
    layer.bias = mx.arange(24).astype(dtype)
    x = mx.random.normal((3, 64), key=mx.random.key(0)).astype(dtype)
    want = x.astype(mx.float32) @ mx.dequantize(layer.weight, layer.scales, dtype=mx.float32, **format).T
    want = want * layer.output_scale + layer.bias
    sim, model = msl.Simulator(), nn.Sequential(layer)
    choose_kernels(model, dtype, chooser(tmp_path, A=0.5), sim.metal_kernel)
    assert type(model.layers[0]) is CHOSEN[ScaledLinear]
    y = model(x)
    assert y.dtype == dtype
    assert mx.abs(y - want).max().item() < (0.01 if dtype == mx.bfloat16 else 0.002) * mx.abs(want).max().item()
    assert sim.reports


@pytest.mark.parametrize("form", ["AX", "V"])
def test_gate_and_up_with_scales_of_their_tensors_are_one_pass(tmp_path, form):
    mlp, sim = GatedMLP(64, 24), msl.Simulator()
    for i, name in enumerate(("gate_proj", "up_proj")):
        layer = ScaledLinear("nvfp4")
        format = {"group_size": layer.group_size, "bits": layer.bits, "mode": "nvfp4"}
        layer.weight, layer.scales = mx.quantize(mx.random.normal((24, 64), key=mx.random.key(i)) / 8, **format)
        layer.output_scale = mx.array(0.5 + i)
        mlp[name] = layer
    mlp.down_proj = nn.Identity()
    x = mx.random.normal((3, 64), key=mx.random.key(7)).astype(mx.bfloat16)
    want = mlp(x.astype(mx.float32))
    choose_kernels(mlp, mx.bfloat16, chooser(tmp_path, **{form: 0.5}), sim.metal_kernel)
    got = mlp(x)
    assert got.dtype == mx.bfloat16 and mx.abs(got - want).max().item() < 0.02 * mx.abs(want).max().item()
    assert len(sim.reports) == 2  # AX: the copy of x and the pass; V: two products


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("sort", [False, True])
def test_a_mixture_of_experts_has_the_products_of_mlx(tmp_path, T, sort):
    glu = SwitchGLU(64, 128, 6)
    glu.set_dtype(mx.float16)
    nn.quantize(glu, group_size=64, bits=4)
    x = mx.random.normal((2, T, 64), key=mx.random.key(0)).astype(mx.float16)
    # From 64 pairs on mlx-lm sorts them itself.
    indices = mx.random.randint(0, 6, (2, T, (64 // (2 * T) + 1) if sort else 2), key=mx.random.key(1))
    want = glu(x.astype(mx.float32), indices)
    sim = msl.Simulator()
    choose_kernels(glu, mx.float16, chooser(tmp_path, A=0.5), sim.metal_kernel)
    assert type(glu.gate_proj) is CHOSEN[QuantizedSwitchLinear]
    got = glu(x, indices)
    assert got.shape == want.shape and got.dtype == mx.float16
    assert mx.abs(got - want).max().item() < 0.01 * mx.abs(want).max().item()
    assert sim.reports


@pytest.mark.parametrize("dtype, outcome", [(mx.bfloat16, {"A": 2.0}), (mx.float32, {"A": 0.5})])
def test_layers_stay_where_stock_wins_or_there_is_no_kernel(tmp_path, dtype, outcome):
    model = tiny(dtype)
    choose_kernels(model, dtype, chooser(tmp_path, **outcome))
    assert (type(model.embed), type(model.layers[0])) == (nn.QuantizedEmbedding, nn.QuantizedLinear)


@pytest.mark.parametrize(
    "mode, bits, group_size", [("affine", 4, 64), ("affine", 8, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)]
)
def test_what_is_raced_is_what_the_reference_takes(mode, bits, group_size):
    key = {"N": 200, "K": 128, "mode": mode, "bits": bits, "group_size": group_size, "dtype": "bfloat16"}
    small = QUANTIZED_MATMUL.small(key)
    inputs = QUANTIZED_MATMUL.inputs(small, 3, seed=1, exact=True)
    want = QUANTIZED_MATMUL.run(REFERENCE, inputs)
    # In float32: in bfloat16 mlx's CPU kernel sums in bfloat16.
    stock = QUANTIZED_MATMUL.run(STOCK, inputs._replace(x=inputs.x.astype(mx.float32)))
    assert mx.abs(stock - want).max().item() < QUANTIZED_MATMUL.tolerance(key) * mx.abs(want).max().item()
    timed = QUANTIZED_MATMUL.inputs(key, 3, seed=1, exact=False).matrix
    assert timed.w.shape == (200, 128 * bits // 32) and timed.w.nbytes == QUANTIZED_MATMUL.nbytes(key)
    assert timed.scales.dtype == inputs.matrix.scales.dtype


def test_kernels_that_differ_by_the_number_of_rows_are_named(tmp_path):
    outcome = Outcome({1: {"A": 2.0, STOCK: 1.0}, 32: {"A": 1.0, STOCK: 2.0}})
    table = Table.read(tmp_path / "kernels.json", "Apple M99")
    chosen = choose_kernels(tiny(), mx.bfloat16, Chooser(table=table, race=lambda *_: outcome, available=True))
    assert mixed(chosen).endswith(": 40x64 affine 4/64 1: stock, 2-32: A, and 1 more")
    assert mixed({}, ["attention", "dense products"]).endswith(": attention, dense products by mlx")
    same = Chooser(table=table, available=True, consistent=True)
    assert mixed(choose_kernels(tiny(), mx.bfloat16, same)) is None
