"""What a layer's products launch and move with and without their fusions, counted on the simulator: not speed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import mlx.core as mx
import mlx.nn as nn

from specmlx.kernels.choice.operators import GATE_UP, QUANTIZED_MATMUL
from specmlx.kernels.dispatch import Choice
from specmlx.kernels.linear import Chosen, GatedMLP, added, products, with_choice

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import msl  # noqa: E402

# Qwen3.8-27B's layers, a quarter of their columns and of their rows.
HIDDEN, INNER, MIXED = 1280, 4352, 1536
PARTS = {
    "q, k, v": (3072, 256, 256),
    "qkv, z, b, a": (2560, 1536, 48, 48),
}
WEIGHTS = ("w", "scales", "biases", "up_w", "up_scales", "up_biases")
BYTES = 2  # of an activation


class Moved(NamedTuple):
    """Launches, and bytes of everything but weights that are loaded (distinct within an instruction) or stored."""

    launches: int
    nbytes: int

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(self.launches + other.launches, self.nbytes + other.nbytes)


def counted(run: Callable[[Callable], object]) -> Moved:
    """Of the launches of ours that `run` makes with a factory."""
    sim = msl.Simulator()
    mx.eval(run(sim.metal_kernel))
    total = Moved(len(sim.reports), 0)
    for report in sim.reports:
        buffers = {name: b for name, b in report.buffers.items() if name not in WEIGHTS}
        total += Moved(0, sum(b.simd_bytes + b.store_simd_bytes for b in buffers.values()))
    return total


def elementwise(inputs: int, size: int) -> Moved:
    """mlx's own operation on arrays of `size` activations."""
    return Moved(1, (inputs + 1) * size * BYTES)


def packed(N: int, K: int) -> nn.QuantizedLinear:
    return nn.QuantizedLinear(K, N, bias=False, group_size=64, bits=4)


def chosen(layer: nn.QuantizedLinear, form: str, factory: Callable) -> Chosen:
    layer.set_dtype(mx.bfloat16)
    return with_choice(layer, Choice.same(QUANTIZED_MATMUL, form), factory)


def figures(M: int, form: str) -> dict[str, tuple[Moved, Moved]]:
    """Of M rows by each part of a layer: apart, and together."""

    def rows(K: int) -> mx.array:
        return mx.random.normal((M, K), key=mx.random.key(K)).astype(mx.bfloat16)

    found = {}
    # What a form has no kernel for is an operation of mlx's.
    fused = form in ("A", "AX")
    x, residual = rows(HIDDEN), rows(HIDDEN)
    for name, sizes in PARTS.items():
        layers = [packed(N, HIDDEN) for N in sizes]
        apart = counted(lambda f, layers=layers: [chosen(layer, form, f)(x) for layer in layers])
        found[name] = apart, counted(lambda f, layers=layers: products(x, *(chosen(n, form, f) for n in layers)))
    for name, K in (("o, out + residual", MIXED), ("down + residual", INNER)):
        layer, y = packed(HIDDEN, K), rows(K)
        apart = counted(lambda f, layer=layer, y=y: chosen(layer, form, f)(y)) + elementwise(2, M * HIDDEN)
        together = counted(lambda f, layer=layer, y=y: added(residual, chosen(layer, form, f), y))
        found[name] = apart, together + (Moved(0, 0) if fused else elementwise(2, M * HIDDEN))

    mlp = GatedMLP(HIDDEN, INNER)
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = packed(INNER, HIDDEN), packed(INNER, HIDDEN), nn.Identity()
    mlp.set_dtype(mx.bfloat16)

    def gated(factory: Callable) -> mx.array:
        mlp.choose(Choice.same(GATE_UP, form), factory)
        return mlp(x)

    pair = [mlp.gate_proj, mlp.up_proj]
    apart = counted(lambda f: [chosen(layer, form, f)(x) for layer in pair]) + elementwise(2, M * INNER)
    found["gate, up, silu"] = apart, counted(gated) + (Moved(0, 0) if fused else elementwise(2, M * INNER))
    return found


@click.command()
@click.option("--rows", type=int, multiple=True, default=(1, 8, 16), show_default=True)
def main(rows: tuple[int, ...]) -> None:
    """Print a table for the forms A, AX, B and V (V up to 5 rows)."""
    click.echo("| part | form | M | launches | kB beside the weights |\n|---|---|---:|---:|---:|")
    for M in rows:
        for form in ("A", "AX", "B", *(("V",) if M <= 5 else ())):
            for name, (apart, together) in figures(M, form).items():
                launches = f"{apart.launches} → {together.launches}"
                click.echo(
                    f"| {name} | {form} | {M} | {launches} | {apart.nbytes / 1e3:.0f} → {together.nbytes / 1e3:.0f} |"
                )


if __name__ == "__main__":
    main()
