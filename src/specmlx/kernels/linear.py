"""Layers of a model that multiply by a matrix, with the kernel that was chosen for their shape and number of rows."""

from collections.abc import Callable
from math import ceil
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from specmlx.formats.scaled_linear import (
    BlockScaledLinear,
    BlockScaledSwitchLinear,
    ScaledLinear,
    ScaledSwitchLinear,
)
from specmlx.kernels.choice.operator import FIXED, STOCK
from specmlx.kernels.dispatch import Choice
from specmlx.kernels.quantized_matmul import Matrix, gated_quantized_matmul, gather_by_expert, quantized_matmul

# Rows of a pass of FIXED: stock mlx has one kernel for so many.
BLOCK = 32


def products(x: mx.array, *layers: nn.Module) -> list[mx.array]:
    """What each layer makes of x; layers whose kernels read x in another order share one copy of it."""
    copies: dict = {}
    return [layer(x, copies) if isinstance(layer, _Rows) else layer(x) for layer in layers]


def added(residual: mx.array | None, layer: nn.Module, x: mx.array) -> mx.array:
    """residual + layer(x), added by the layer's kernel where it can; layer(x) alone for None."""
    if residual is None:
        return layer(x)
    return layer(x, residual=residual) if isinstance(layer, _Rows) else residual + layer(x)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), by mlx-lm's names, of targets and drafters; gate and up in one pass if so chosen."""

    def __init__(self, dims: int, hidden_dims: int):
        super().__init__()
        self.gate_proj = nn.Linear(dims, hidden_dims, bias=False)
        self.up_proj = nn.Linear(dims, hidden_dims, bias=False)
        self.down_proj = nn.Linear(hidden_dims, dims, bias=False)
        self.choose(None)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """Rows `[..., D]`, plus `residual`."""
        gate, up = self.gate_proj, self.up_proj
        variant = STOCK if self._pair is None else self._pair.variant(x.size // x.shape[-1])
        if variant == STOCK:
            gated = swiglu(*products(x, gate, up))
        else:
            gated = gated_quantized_matmul(x, matrix(gate), matrix(up), variant, factory=self._factory)
        return added(residual, self.down_proj, gated)

    def pair(self) -> nn.Module | None:
        """One of gate and up where both are packed alike and have no bias, else None."""
        gate, up = self.gate_proj, self.up_proj
        if type(gate) is not type(up) or type(gate) not in (nn.QuantizedLinear, ScaledLinear):
            return None
        alike = (matrix(gate).shape, matrix(gate).format) == (matrix(up).shape, matrix(up).format)
        return gate if alike and "bias" not in gate and "bias" not in up else None

    def choose(self, choice: Choice | None, factory: Callable = mx.fast.metal_kernel) -> None:
        """Run gate and up as the choice says; without one, and in rows that it leaves to mlx, as the layers do."""
        self._pair, self._factory = choice, factory

    def served(self) -> list[nn.Module]:
        """The layers that are run as a pair."""
        return [] if self._pair is None else [self.gate_proj, self.up_proj]


class Chosen(nn.Module):
    """A layer that obeys a choice of kernels: one of the three kinds below with a class of mlx's, or of ours, behind.

    Only forms of ours need a packed matrix; STOCK and FIXED are the layer's own call.
    """

    _choice: Choice
    _factory: Callable

    def _product(
        self, stock: Callable, x: mx.array, copies: dict | None = None, residual: mx.array | None = None
    ) -> mx.array:
        variant, bias = self._choice.variant(x.size // x.shape[-1]), self.get("bias")
        if variant in (STOCK, FIXED):
            y = stock(x) if variant == STOCK else in_blocks(stock, x)
        else:
            fused = residual if bias is None else None
            y = quantized_matmul(x, matrix(self), variant, copies=copies, residual=fused, factory=self._factory)
            if bias is None:
                return y
            y = y + bias
        return y if residual is None else residual + y


class _Rows(Chosen):
    """x `[..., K]` times a matrix."""

    def __call__(self, x: mx.array, copies: dict | None = None, residual: mx.array | None = None) -> mx.array:
        """The layer's output, plus `residual`. `copies`: of x in kernels' orders, to share with other layers."""
        return self._product(super().__call__, x, copies, residual)


class _Head(Chosen):
    """An embedding, with the kernel where it is used as the model's head."""

    def as_linear(self, x: mx.array) -> mx.array:
        return self._product(super().as_linear, x)


class Experts(Chosen):
    """Rows times the matrices of experts, with the kernel by the number of (row, expert) pairs."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        variant = self._choice.variant(indices.size)
        if variant in (STOCK, FIXED):
            # Unsorted, each pair is a product by itself.
            return super().__call__(x, indices, sorted_indices and variant == STOCK)
        y = gather_by_expert(x, matrix(self), indices, sorted_indices=sorted_indices, factory=self._factory)
        return y + mx.expand_dims(self.bias[indices], -2) if "bias" in self else y


_KINDS = {
    _Rows: (nn.Linear, nn.QuantizedLinear, ScaledLinear, BlockScaledLinear),
    _Head: (nn.Embedding, nn.QuantizedEmbedding),
    Experts: (SwitchLinear, QuantizedSwitchLinear, ScaledSwitchLinear, BlockScaledSwitchLinear),
}
CHOSEN: dict[type[nn.Module], type[Chosen]] = {
    stock: type(f"Chosen{stock.__name__}", (kind, stock), {}) for kind, stocks in _KINDS.items() for stock in stocks
}
# Those that kernels of ours take.
PACKED = (nn.QuantizedLinear, nn.QuantizedEmbedding, ScaledLinear, QuantizedSwitchLinear)


def with_choice(layer: nn.Module, choice: Choice, factory: Callable) -> Chosen:
    """A layer on the same arrays, under the same names, that obeys the choice."""
    return _same(layer, CHOSEN[type(layer)], vars(layer) | {"_choice": choice, "_factory": factory})


def as_stock(layer: Chosen) -> nn.Module:
    """The layer that it was made of."""
    settings = {name: value for name, value in vars(layer).items() if name not in Chosen.__annotations__}
    return _same(layer, next(stock for stock, chosen in CHOSEN.items() if type(layer) is chosen), settings)


def _same(layer: nn.Module, kind: type[nn.Module], settings: dict[str, Any]) -> nn.Module:
    """A module of this kind on a layer's arrays. Its own __init__ would make, and quantize, random weights."""
    new = kind.__new__(kind)
    nn.Module.__init__(new)
    dict.update(new, layer)
    vars(new).update(settings)
    return new


def matrix(layer: nn.Module) -> Matrix:
    """A packed layer's weights."""
    arrays = layer.weight, layer.scales, layer.get("biases")
    return Matrix(*arrays, layer.group_size, layer.bits, layer.mode, layer.get("output_scale"))


def in_blocks(layer: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """layer(x) by blocks of 32 rows, the last one filled up: one kernel of mlx's for any number of rows."""
    rows = x.reshape(-1, x.shape[-1])
    n = len(rows)
    padded = mx.pad(rows, [(0, ceil(n / BLOCK) * BLOCK - n), (0, 0)])
    parts = [layer(padded[i : i + BLOCK]) for i in range(0, n, BLOCK)]
    y = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return y[:n].reshape(*x.shape[:-1], -1)
