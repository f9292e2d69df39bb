"""The simulator of Metal kernels: mlx's source, mlx's own kernels, and planted faults."""

import types

import mlx.core as mx
import msl
import pytest
from mlx_lm.models import gated_delta
from msl import stock


def matrices(M: int, N: int, K: int, dtype: mx.Dtype = mx.bfloat16):
    x = mx.random.normal((M, K), key=mx.random.key(0)).astype(dtype)
    w = mx.random.normal((N, K), key=mx.random.key(1)).astype(dtype)
    return x, w


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
