"""What the kernels load and compute, counted on the simulator of tests/msl. Traffic, not speed."""

import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import mlx.core as mx

from specmlx.evaluation.chips import chip_named
from specmlx.kernels import attention, gated_delta
from specmlx.kernels.attention import Span, Stored
from specmlx.kernels.quantized_matmul import Matrix, quantized_matmul, supported

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import msl  # noqa: E402
from msl import stock  # noqa: E402

FORMATS = {
    "affine4": {"mode": "affine", "bits": 4, "group_size": 64},
    "affine8": {"mode": "affine", "bits": 8, "group_size": 64},
    "nvfp4": {"mode": "nvfp4", "bits": 4, "group_size": 16},
}
FORMS = ("A", "AX", "B", "V")
# The shapes of Qwen3.8-27B, a sixteenth of their rows and about a quarter of their columns: K in whole lines.
SHAPES = {
    "gate, up": (1088, 1280),
    "down": (320, 4352),
    "q": (768, 1280),
    "o, out": (320, 1536),
    "in_proj_qkv": (640, 1280),
    "head": (3872, 1280),
}
PLAIN = (1024, 2048)
LONG = (64, 5120)  # two tiles of the model's rows, on which the ceilings are reckoned
WEIGHTS = ("w", "scales", "biases")


def packed(N: int, K: int, format: dict) -> Matrix:
    w = mx.random.normal((N, K), key=mx.random.key(1)).astype(mx.bfloat16)
    return Matrix(*mx.quantize(w, **format), **format)


def figures(reports: list[msl.Report], M: int, N: int, K: int) -> dict:
    """Of one product: `reports` of all its launches, the last of them the one that reads the weights.

    multiply_adds and instructions (other arithmetic, conversions included) are a weight and row, and a weight. x_bytes
    are distinct within a load instruction; x_line_use is that of the launch that reads the weights. partial_bytes:
    written to threadgroup memory, staged scales and split-K partials. loads_in_flight: most loads of a lane in a
    straight line.
    """
    main = reports[-1]
    w = main.buffers["w"]
    x = [b for report in reports for name, b in report.buffers.items() if name in ("x", "ordered_x", "x_sums")]
    names = [name for name in ("x", "ordered_x") if name in main.buffers]
    main_x = max((main.buffers[name] for name in names), key=lambda b: b.simd_bytes)
    scales = [main.buffers[name] for name in ("scales", "biases") if name in main.buffers]
    used = [b for b in scales if b.loads]
    return {
        "weight_reads": round(w.reads, 3),
        "line_use": round(w.line_use, 3),
        "multiply_adds": round(sum(r.multiply_adds for r in reports) / (M * N * K), 3),
        "instructions": round((main.instructions + main.conversions) / (N * K), 2),
        "conversions": round(main.conversions / (N * K), 2),
        "x_bytes": sum(b.simd_bytes for b in x),
        "x_line_use": round(main_x.line_use, 3),
        "packed_bytes": w.nbytes + sum(b.nbytes for b in used),
        "scale_reads": round(max((b.reads for b in used), default=0.0), 3),
        "scale_line_use": round(min((b.line_use for b in used), default=1.0), 3),
        "partial_bytes": main.threadgroup_stores,
        "threadgroups": main.threadgroups,
        "barriers": round(main.barriers / main.threadgroups, 1),
        "loads_in_flight": main.loads_in_flight,
    }


def stock_kernel(M: int, K: int, format: dict) -> str:
    """What mlx runs on M3 and later."""
    if M == 1:
        fast = K % (256 if format["bits"] == 8 else 512) == 0
        return "qmv_fast" if fast else "qmv_wide"
    return "qmv_wide" if M < 13 else "qmm_t"


def products(forms: dict[int, tuple[str, ...]], shapes: dict) -> Iterator[dict]:
    """Figures of each format, shape and number of rows in its forms, beside those of stock mlx."""
    for name, format in FORMATS.items():
        for shape, (N, K) in shapes.items():
            w = packed(N, K, format)
            for M in forms:
                x = mx.random.normal((M, K), key=mx.random.key(0)).astype(mx.bfloat16)
                kernel = stock_kernel(M, K, format)
                report, _ = stock.quantized_matmul(kernel, x, *w[:3], format["group_size"], format["bits"])
                beside = {"kernel": kernel, **figures([report], M, N, K)}
                for form in forms[M]:
                    if not supported(x, w, form):
                        continue
                    sim = msl.Simulator()
                    quantized_matmul(x, w, form, factory=sim.metal_kernel)
                    common = {"kernel": f"quantized_matmul {form}", "format": name, "shape": shape}
                    yield {**common, "M": M, "N": N, "K": K, **figures(sim.reports, M, N, K), "stock": beside}


def others() -> Iterator[dict]:
    """The state of a Gated DeltaNet layer, and the keys and values of an attention layer."""

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(sum(shape)))

    for T, n in ((1, 1), (4, 2), (8, 0), (8, 5), (16, 16)):
        Hk, Hv, D = 2, 6, 128
        q, k = (0.1 * normal(1, T, Hk, D).astype(mx.bfloat16) for _ in range(2))
        v, g, beta = normal(1, T, Hv, D).astype(mx.bfloat16), mx.sigmoid(normal(1, T, Hv)), mx.sigmoid(normal(1, T, Hv))
        S, sim = normal(1, Hv, D, D), msl.Simulator()
        tape = gated_delta.Tape(k, normal(1, T, Hv, D), g)
        rows = q, k, v, g, beta.astype(mx.bfloat16)
        gated_delta.metal.advance(S, tape, mx.array([n]), *rows, factory=sim.metal_kernel)
        state = sim.last.buffers
        written = state["S_out"]
        yield {
            "kernel": "gated_delta",
            "format": "float32",
            "T": T,
            "folded": n,
            "state_reads": round(state["S"].reads, 3),
            "state_writes": round(written.stores_bytes / written.nbytes, 3),
            "line_use": round(state["S"].line_use, 3),
            "barriers": sim.last.barriers,
            "threadgroups": sim.last.threadgroups,
        }
    for T in (1, 8, 17):
        Hq, Hkv, D, length = 12, 2, 256, 1000
        sim = msl.Simulator()
        keys, values = (Stored(normal(1, Hkv, 1024, D + i)[..., :D].astype(mx.bfloat16)) for i in range(2))
        q = normal(1, Hq, T, D).astype(mx.bfloat16)
        span = Span(mx.array([length - T], dtype=mx.int32), length)
        attention.metal.attention(q, keys, values, span, D**-0.5, factory=sim.metal_kernel)
        main = sim.reports[0]
        seen = length * Hkv * D * 2
        partials = sum(b.stores_bytes for b in main.buffers.values())
        yield {
            "kernel": "attention",
            "format": "bfloat16",
            "T": T,
            "keys": length,
            "key_reads": round(main.buffers["keys"].threadgroup_bytes / seen, 3),
            "value_reads": round(main.buffers["values"].threadgroup_bytes / seen, 3),
            "line_use": round(main.buffers["keys"].line_use, 3),
            "partial_bytes": partials,
            "threadgroups": main.threadgroups,
        }


def broken_bounds(row: dict) -> list[str]:
    """Which of the bounds (see docs/kernels.md) a row does not keep: those of form A, the state's, the keys'."""
    once = ("state_reads", "state_writes", "key_reads", "value_reads")
    if not row["kernel"].endswith(" A"):
        return [f"{name} is 1" for name in once if row.get(name, 1) != 1]
    M, N, K = row["M"], row["N"], row["K"]
    bounds = {
        "every packed word is read once for up to 16 rows": row["weight_reads"] == ceil(M / 16),
        "a load covers whole lines": row["line_use"] >= 0.97,
        "scales are read once": row["scale_reads"] == ceil(M / 16),
        "scales come in whole lines": N < 256 or row["scale_line_use"] >= 0.9,
    }
    if M in (8, 16) and N % 32 == 0:
        bounds["multiply-adds are at most 1.15 M N K"] = row["multiply_adds"] <= 1.15
        if K >= 2048:
            bounds["x costs no more than the weights a tile"] = row["x_bytes"] <= ceil(M / 8) * row["packed_bytes"]
    return [name for name, kept in bounds.items() if not kept]


# One of each generation, and a Pro; M5's matrix units lift the ALUs' limit.
CHIPS = [chip_named(name) for name in ("M1 Max", "M2 Max", "M3 Max 40", "M4 Pro", "M4 Max 40", "M5 Max 40")]


def ceilings(row: dict) -> dict[str, tuple[float, float | None]]:
    """By chip: billions of weights a second that the bus and the ALUs allow at most.

    Arithmetic on public figures, no measurement. Conversions are left out, as most ride on an operand.
    """
    weights = row["N"] * row["K"]
    operations = row["multiply_adds"] * row["M"] + row["instructions"] - row["conversions"]
    moved = row["packed_bytes"] * row["weight_reads"]
    return {
        chip.name: (chip.bandwidth * weights / moved, chip.multiply_adds and chip.multiply_adds / operations / 1e9)
        for chip in CHIPS
    }
