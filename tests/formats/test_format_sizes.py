"""Bytes of a tensor in each format, against mlx's own quantized arrays and against whole rows counted by hand."""

import mlx.core as mx
import pytest

from specmlx.formats.sizes import FORMATS, affine, format_named, quantized

SHAPES = [(48, 512), (7, 128), (3, 5, 256)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_affine_is_as_mlx_packs_it(bits, group, shape):
    for dtype in (mx.bfloat16, mx.float32):
        arrays = mx.quantize(mx.ones(shape, dtype=dtype), group_size=group, bits=bits)
        assert affine(bits, group, dtype.size).nbytes(shape) == sum(x.nbytes for x in arrays)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4", "mxfp8"])
def test_floating_point_formats_are_as_mlx_packs_them(mode, shape):
    arrays = mx.quantize(mx.ones(shape), mode=mode)
    bits, group = {"nvfp4": (4, 16), "mxfp4": (4, 32), "mxfp8": (8, 32)}[mode]
    assert quantized(mode, bits, group).nbytes(shape) == sum(x.nbytes for x in arrays)


@pytest.mark.parametrize("name, dtype", [("fp32", mx.float32), ("bf16", mx.bfloat16), ("fp16", mx.float16)])
def test_plain_formats_are_their_dtype(name, dtype):
    assert FORMATS[name].nbytes((3, 7)) == mx.zeros((3, 7), dtype=dtype).nbytes


def test_publishers_formats_count_their_scales():
    assert FORMATS["fp8"].nbytes((10, 20)) == 200 + 4
    assert FORMATS["nvfp4"].nbytes((10, 32)) == 160 + 20 + 4
    # Blocks of 128 × 128, the last ones begun: 2 × 3 scales.
    assert FORMATS["fp8-block"].nbytes((129, 300)) == 129 * 300 + 4 * 2 * 3


def test_bits_a_weight_are_those_of_a_long_row():
    for fmt in (affine(4), affine(3, 32), FORMATS["nvfp4"], FORMATS["mxfp8"], FORMATS["bf16"]):
        rows, K = 1000, 8192
        assert fmt.bits_per_weight == pytest.approx(8 * fmt.nbytes((rows, K)) / (rows * K), abs=1e-4)


def test_names_are_read_and_refused():
    assert format_named("affine-4") == affine(4, 64) and format_named("affine-3-32") == affine(3, 32)
    for name in ("affine-7", "affine-4-16", "int4", "affine-4-64-2"):
        with pytest.raises(ValueError, match=name):
            format_named(name)
    with pytest.raises(ValueError, match="mode 'hqq'"):
        quantized("hqq", 4, 64)
