"""The simulator of Metal kernels: mlx's source, mlx's own kernels, and planted faults."""

import re
import types

import mlx.core as mx
import msl
import msl_faults
import pytest
from mlx_lm.models import gated_delta
from msl import stock
from msl.source import ATTRIBUTES, generate

from specmlx.kernels import quantized_matmul
from specmlx.kernels.accept import metal as accept_kernel
from specmlx.kernels.attention import Span, Stored
from specmlx.kernels.attention import metal as attention_kernel
from specmlx.kernels.draft_head import Candidates
from specmlx.kernels.draft_head import metal as draft_head_kernel
from specmlx.kernels.gated_delta import Tape
from specmlx.kernels.gated_delta import metal as gated_delta_kernel


def matrices(M: int, N: int, K: int, dtype: mx.Dtype = mx.bfloat16):
    x = mx.random.normal((M, K), key=mx.random.key(0)).astype(dtype)
    w = mx.random.normal((N, K), key=mx.random.key(1)).astype(dtype)
    return x, w


EVERY_ATTRIBUTE = "o[0] = a[0] + a_shape[0] + c_strides[1] + b_ndim; // " + " ".join(ATTRIBUTES)
SOURCES = {
    "templates": ("o[thread_position_in_grid.x] = T(a[0]) + N;", [("T", mx.bfloat16), ("N", -3), ("B", True)], False),
    "attributes": (EVERY_ATTRIBUTE, [], False),
    "atomic outputs": ("atomic_fetch_add_explicit(o, a[0], memory_order_relaxed);", None, True),
}


@pytest.mark.parametrize("case", SOURCES)
def test_the_source_is_what_mlx_generates(case, tmp_path, capfd):
    source, template, atomic = SOURCES[case]
    inputs = [mx.zeros((4, 8)), mx.array([1, 2], mx.uint8), mx.zeros((2, 4), mx.float16), mx.array(3)]
    made = ("golden", ["a", "b", "c", "d"], ["o", "p"], source, "constant int H = 1;\n")
    kernel = mx.fast.metal_kernel(*made, atomic_outputs=atomic)
    call = {"template": template, "output_shapes": [(4,), (2, 2)], "output_dtypes": [mx.float32, mx.int64]}

    def print_it(*inputs):
        return kernel(inputs=list(inputs), grid=(4, 1, 1), threadgroup=(4, 1, 1), verbose=True, **call)

    capfd.readouterr()
    mx.export_function(str(tmp_path / "kernel.mlxfn"), print_it, *inputs)
    printed = re.search("```\n(.*)\n```", capfd.readouterr().out, re.DOTALL)[1]
    ours = generate(*made, atomic, inputs, template or [], call["output_dtypes"])
    assert ours.text.split() == printed.split()


def test_the_librarys_own_launches_have_the_source_that_mlx_generates(tmp_path, capfd):
    names = set()

    def factory(name, input_names, output_names, source, header=""):
        kernel = mx.fast.metal_kernel(name, input_names, output_names, source, header)

        def launch(inputs, output_shapes, output_dtypes, template=(), **call):
            def print_it(*inputs):
                shapes = {"output_shapes": output_shapes, "output_dtypes": output_dtypes}
                return kernel(inputs=list(inputs), template=list(template), verbose=True, **shapes, **call)

            capfd.readouterr()
            mx.export_function(str(tmp_path / "kernel.mlxfn"), print_it, *inputs)
            printed = re.search("```\n(.*)\n```", capfd.readouterr().out, re.DOTALL)[1]
            ours = generate(name, input_names, output_names, source, header, False, inputs, template, output_dtypes)
            assert ours.text.split() == printed.split(), name
            names.add(name)
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    x, w = matrices(9, 40, 128)
    weights = quantized_matmul.Matrix(*mx.quantize(w, 64, 4))
    for variant in ("A", "AX", "B", "V"):
        quantized_matmul.quantized_matmul(x, weights, variant, factory=factory)
    quantized_matmul.gated_quantized_matmul(x, weights, weights, factory=factory)
    experts = quantized_matmul.Matrix(*(mx.stack([a, a]) for a in weights[:3]))
    pairs = mx.array([3, 1], mx.uint32), mx.array([0, 1], mx.int32)
    quantized_matmul.gather_quantized_matmul(x, experts, *pairs, factory=factory)
    heads, rows, one = mx.zeros((1, 2, 32, 32)), mx.zeros((1, 3, 1, 32)), mx.array([1], mx.int32)
    tape = Tape(rows, mx.zeros((1, 3, 2, 32)), mx.zeros((1, 3, 2)))
    gated_delta_kernel.advance(heads, tape, one, rows, rows, tape.delta, tape.g, tape.g, factory=factory)
    gated_delta_kernel.fold(heads, tape, one, factory=factory)
    kv = Stored(mx.zeros((1, 1, 64, 64)))
    attention_kernel.attention(mx.zeros((1, 2, 3, 64)), kv, kv, Span(one, 4), 1.0, factory=factory)
    scores, ids = mx.zeros((1, 3, 40)), mx.zeros((1, 2), mx.int32)
    accept_kernel.match_best(ids, scores, factory=factory)
    accept_kernel.rejection(ids, scores[:, :2], scores, mx.zeros((1, 2)), scores[:, 0], factory=factory)
    draft_head_kernel.top_k(scores, 4, factory=factory)
    table = mx.zeros((40, 64))
    draft_head_kernel.chain(scores, table, table, one, keep_logits=True, factory=factory)
    shortlist = mx.zeros((1, 3, 4), mx.int32)
    candidates = Candidates(mx.zeros((1, 3, 4)), shortlist, table, table, one)
    draft_head_kernel.walk(candidates, factory=factory)
    draft_head_kernel.path(candidates, factory=factory)
    assert len(names) == 21, sorted(names)


@pytest.mark.parametrize("kernel, M, reads", [("qmv_fast", 2, 2), ("qmv_wide", 8, 2), ("qmm_t", 8, 1)])
def test_stock_quantized_kernels_agree_with_dequantize(kernel, M, reads):
    x, w = matrices(M, 64, 512)
    q, scales, biases = mx.quantize(w, 64, 4)
    report, y = stock.quantized_matmul(kernel, x, q, scales, biases, 64, 4)
    want = x.astype(mx.float32) @ mx.dequantize(q, *(a.astype(mx.float32) for a in (scales, biases)), 64, 4).T
    assert mx.abs(y - want).max().item() < 2**-7 * mx.abs(want).max().item()
    assert report.findings == []
    assert report.buffers["w"].reads == reads


def test_mlx_lm_gated_delta_kernel_agrees_with_its_ops():
    sim = msl.Simulator()
    metal = types.SimpleNamespace(
        metal=types.SimpleNamespace(is_available=lambda: True),
        fast=types.SimpleNamespace(metal_kernel=sim.metal_kernel),
    )
    make = gated_delta._make_gated_delta_kernel
    kernel = types.FunctionType(make.__code__, {**make.__globals__, "mx": metal}, argdefs=make.__defaults__)()
    B, T, Hk, Hv, Dk, Dv = 1, 3, 2, 4, 64, 16
    shapes = [(B, T, Hk, Dk), (B, T, Hk, Dk), (B, T, Hv, Dv), (B, T, Hv), (B, T, Hv), (B, Hv, Dv, Dk)]
    q, k, v, g, beta, state = (0.3 * mx.random.normal(s, key=mx.random.key(i)) for i, s in enumerate(shapes))
    g, beta = mx.sigmoid(g), mx.sigmoid(beta)
    y, after = kernel(
        inputs=[q, k, v, g, beta, state, T],
        template=[("InT", q.dtype), ("StT", state.dtype), ("Dk", Dk), ("Dv", Dv), ("Hk", Hk), ("Hv", Hv)],
        grid=(32, Dv, B * Hv),
        threadgroup=(32, 4, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[q.dtype, state.dtype],
    )
    want_y, want = gated_delta.gated_delta_ops(q, k, v, g, beta, state)
    assert mx.abs(y - want_y).max().item() < 1e-6
    assert mx.abs(after - want).max().item() < 1e-6
    assert sim.last.buffers["state_in"].reads == 1


def test_atomics_count_every_thread():
    source = "atomic_fetch_add_explicit(y + a[thread_position_in_grid.x] % 4, 1u, memory_order_relaxed);"
    kernel = msl.Simulator().metal_kernel("counts", ["a"], ["y"], source, atomic_outputs=True)
    call = {"grid": (64, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(4,)], "output_dtypes": [mx.uint32]}
    assert kernel(inputs=[mx.arange(64)], init_value=0, **call)[0].tolist() == [16] * 4


@pytest.mark.parametrize("name", msl_faults.PLANTED)
def test_a_planted_fault_is_found_and_its_sound_twin_is_not(name):
    sim = msl.Simulator()
    msl_faults.run(sim.metal_kernel, name, fault=False)
    with pytest.raises(msl.Findings) as found:
        msl_faults.run(sim.metal_kernel, name, fault=True)
    assert any(f.startswith(msl_faults.PLANTED[name].finding) for f in sim.last.findings), str(found.value)


REFUSED = {
    "a float becomes a bfloat": ("y[0] = x[0] * 2.0f;", "bfloat"),
    "a pointer changes its address space": (
        "threadgroup float a[4]; device float* p = a; y[0] = bfloat(p[0]);",
        "__local",
    ),
    "a pointer has no address space": ("float a[4]; float* p = a; y[0] = bfloat(p[0]);", "float. p = a"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_metal_refuses_does_not_compile(case):
    source, message = REFUSED[case]
    kernel = msl.Simulator().metal_kernel("refused", ["x"], ["y"], source)
    with pytest.raises(msl.CompileError, match=message):
        kernel(
            inputs=[mx.zeros((8,))],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.bfloat16],
        )
