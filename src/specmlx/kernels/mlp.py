"""The gated MLP of targets and drafters, its first half in one pass where that was chosen."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from specmlx.formats.scaled_linear import ScaledLinear
from specmlx.kernels.choice.operator import STOCK
from specmlx.kernels.dispatch import Choice
from specmlx.kernels.linear import added, packing, products
from specmlx.kernels.quantized_matmul import gated_quantized_matmul


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), by mlx-lm's names."""

    def __init__(self, dims: int, hidden_dims: int):
        super().__init__()
        self.gate_proj = nn.Linear(dims, hidden_dims, bias=False)
        self.up_proj = nn.Linear(dims, hidden_dims, bias=False)
        self.down_proj = nn.Linear(hidden_dims, dims, bias=False)
        self._pair: Choice | None = None
        self._factory: Callable = mx.fast.metal_kernel

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """Rows `[..., D]`, plus `residual`."""
        gated = swiglu(*products(x, self.gate_proj, self.up_proj)) if self._pair is None else self._gated(x)
        return added(residual, self.down_proj, gated)

    def pair(self) -> nn.Module | None:
        """One of gate and up where both are packed alike and have no bias, else None."""
        gate, up = self.gate_proj, self.up_proj
        packed = type(gate) is type(up) and type(gate) in (nn.QuantizedLinear, ScaledLinear)
        if not packed or "bias" in gate or "bias" in up or gate.weight.shape != up.weight.shape:
            return None
        return gate if packing(gate) == packing(up) else None

    def choose(self, choice: Choice | None, factory: Callable = mx.fast.metal_kernel) -> None:
        """Run gate and up as the choice says; without one, and in rows that it leaves to mlx, as the layers do."""
        self._pair, self._factory = choice, factory

    def served(self) -> list[nn.Module]:
        """The layers that are run as a pair."""
        return [] if self._pair is None else [self.gate_proj, self.up_proj]

    def _gated(self, x: mx.array) -> mx.array:
        gate, up = self.gate_proj, self.up_proj
        variant = self._pair.variant(x.size // x.shape[-1])
        if variant == STOCK:
            return swiglu(*products(x, gate, up))
        matrices, options = (_matrix(gate), _matrix(up)), packing(gate)
        return gated_quantized_matmul(x, *matrices, variant=variant, kernel=self._factory, **options)


def _matrix(layer: nn.Module) -> tuple:
    return layer.weight, layer.scales, layer.get("biases"), layer.get("output_scale")
