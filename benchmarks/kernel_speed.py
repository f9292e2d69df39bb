"""Times of the quantized products of Qwen3.8-27B on a Metal device, in child processes that can be stopped."""

from collections.abc import Iterator

from specmlx.evaluation.machine import known_bandwidth
from specmlx.kernels.choice.operator import STOCK
from specmlx.kernels.choice.operators import QUANTIZED_MATMUL
from specmlx.kernels.choice.race import race

SHAPES = {
    "gate, up": (17408, 5120),
    "down": (5120, 17408),
    "q": (12288, 5120),
    "k, v": (1024, 5120),
    "o, out": (5120, 6144),
    "in_proj_qkv": (10240, 5120),
    "in_proj_z": (6144, 5120),
    "head": (248320, 5120),
}
FORMATS = {
    "affine4": {"mode": "affine", "bits": 4, "group_size": 64},
    "affine8": {"mode": "affine", "bits": 8, "group_size": 64},
    "nvfp4": {"mode": "nvfp4", "bits": 4, "group_size": 16},
}
ROWS = (1, 2, 4, 5, 8, 16)


def nbytes(N: int, K: int, format: dict) -> int:
    """Of the packed words with their scales and biases: what a product has to read."""
    scales = 4 if format["mode"] == "affine" else 1
    return N * K * format["bits"] // 8 + N * K // format["group_size"] * scales


def speeds() -> Iterator[dict]:
    bandwidth = known_bandwidth()
    for name, format in FORMATS.items():
        for shape, (N, K) in SHAPES.items():
            key = {"N": N, "K": K, **format, "dtype": "bfloat16"}
            outcome = race(QUANTIZED_MATMUL, key, rows=ROWS)
            for M, seconds in outcome.seconds.items():
                best = min(seconds, key=seconds.__getitem__)
                rate = nbytes(N, K, format) / seconds[best] / 1e9
                yield {
                    "shape": shape,
                    "format": name,
                    "M": M,
                    "N": N,
                    "K": K,
                    "microseconds": {variant: 1e6 * s for variant, s in seconds.items()},
                    "best": best,
                    "gigabytes_per_second": rate,
                    "share": rate / bandwidth.gigabytes_per_second if bandwidth else None,
                    "to_stock": seconds[STOCK] / seconds[best],
                    "dropped": outcome.dropped,
                }
