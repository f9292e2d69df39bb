"""Layers of a model that multiply by a matrix, with the kernel that was chosen for their shape and number of rows."""

from collections.abc import Callable
from math import ceil
from typing import Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from specmlx.formats.scaled_linear import (
    BlockScaledLinear,
    BlockScaledSwitchLinear,
    ScaledLinear,
    ScaledSwitchLinear,
)
from specmlx.kernels.choice import FIXED, STOCK, Choice
from specmlx.kernels.experts import gather_by_expert
from specmlx.kernels.quantized_matmul import Ordered, quantized_matmul

# Rows of a pass of FIXED: stock mlx has one kernel for so many.
BLOCK = 32


def products(x: mx.array, *layers: nn.Module) -> list[mx.array]:
    """What each layer makes of x; layers whose kernels read x in another order share one copy of it."""
    ordered = Ordered()
    return [layer.product(x, ordered) if isinstance(layer, _Product) else layer(x) for layer in layers]


def added(residual: mx.array | None, layer: nn.Module, x: mx.array) -> mx.array:
    """residual + layer(x), added by the layer's kernel where it can; layer(x) alone for None."""
    if residual is None:
        return layer(x)
    return layer.product(x, residual=residual) if isinstance(layer, _Product) else residual + layer(x)


class Chosen(nn.Module):
    """Any of the layers below: what it is made of, and the choice that it obeys. Parameters and their names stay."""

    _choice: Choice
    _factory: Callable

    @classmethod
    def of(cls, layer: nn.Module, choice: Choice, factory: Callable = mx.fast.metal_kernel) -> Self:
        """On the layer's own arrays; nothing is copied."""
        new = _same(layer, cls)
        new._choice, new._factory = choice, factory
        return new

    def as_stock(self, kind: type[nn.Module]) -> nn.Module:
        """The layer that it was made of, which is of this kind."""
        stock = _same(self, kind)
        del stock._choice, stock._factory
        return stock


class _Product(Chosen):
    """x `[..., K]` times a packed matrix."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.product(x)

    def product(self, x: mx.array, ordered: Ordered | None = None, residual: mx.array | None = None) -> mx.array:
        """The layer's output, plus `residual`. `ordered`: x in kernels' orders, to share with other layers."""
        variant = self._choice.variant(x.size // x.shape[-1])
        if variant in (STOCK, FIXED):
            y = super().__call__(x) if variant == STOCK else in_blocks(super().__call__, x)
            return y if residual is None else residual + y
        biased = "bias" in self
        y = _multiply(self, x, variant, self._factory, ordered, None if biased else residual, self.get("output_scale"))
        if not biased:
            return y
        y = y + self.bias
        return y if residual is None else residual + y


class ChosenLinear(_Product, nn.QuantizedLinear):
    """mlx's QuantizedLinear, with the kernel of a `Choice` for few rows."""


class ChosenScaledLinear(_Product, ScaledLinear):
    """A ScaledLinear with the kernel of a `Choice` for few rows."""


class ChosenEmbedding(Chosen, nn.QuantizedEmbedding):
    """mlx's QuantizedEmbedding, whose use as the model's head has the kernel of a `Choice` for few rows."""

    def as_linear(self, x: mx.array) -> mx.array:
        variant = self._choice.variant(x.size // x.shape[-1])
        if variant == STOCK:
            return super().as_linear(x)
        return in_blocks(super().as_linear, x) if variant == FIXED else _multiply(self, x, variant, self._factory)


class ChosenSwitchLinear(Chosen, QuantizedSwitchLinear):
    """mlx-lm's QuantizedSwitchLinear, with the kernel of a `Choice` by the number of (row, expert) pairs."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        variant = self._choice.variant(indices.size)
        if variant in (STOCK, FIXED):
            # Unsorted, each pair is a product by itself.
            return super().__call__(x, indices, sorted_indices and variant == STOCK)
        y = gather_by_expert(
            x,
            self.weight,
            self.scales,
            self.get("biases"),
            indices,
            sorted_indices=sorted_indices,
            factory=self._factory,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )
        return y + mx.expand_dims(self.bias[indices], -2) if "bias" in self else y


class _FixedRows(Chosen):
    """A layer that multiplies rows, few of which are always multiplied as so many."""

    def __call__(self, x: mx.array) -> mx.array:
        few = self._choice.variant(x.size // x.shape[-1]) == FIXED
        return in_blocks(super().__call__, x) if few else super().__call__(x)


class FixedPairs(Chosen):
    """A layer of experts, run pair by pair however many there are."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return super().__call__(x, indices, sorted_indices and self._choice.variant(indices.size) == STOCK)


class FixedLinear(_FixedRows, nn.Linear):
    """mlx's Linear."""


class FixedBlockScaledLinear(_FixedRows, BlockScaledLinear):
    """A BlockScaledLinear."""


class FixedSwitchLinear(FixedPairs, SwitchLinear):
    """mlx-lm's SwitchLinear."""


class FixedScaledSwitchLinear(FixedPairs, ScaledSwitchLinear):
    """A ScaledSwitchLinear."""


class FixedBlockScaledSwitchLinear(FixedPairs, BlockScaledSwitchLinear):
    """A BlockScaledSwitchLinear."""


class FixedEmbedding(Chosen, nn.Embedding):
    """mlx's Embedding, whose use as the model's head is always of so many rows."""

    def as_linear(self, x: mx.array) -> mx.array:
        few = self._choice.variant(x.size // x.shape[-1]) == FIXED
        return in_blocks(super().as_linear, x) if few else super().as_linear(x)


def in_blocks(layer: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """layer(x) by blocks of 32 rows, the last one filled up: one kernel of mlx's for any number of rows."""
    rows = x.reshape(-1, x.shape[-1])
    n = len(rows)
    padded = mx.pad(rows, [(0, ceil(n / BLOCK) * BLOCK - n), (0, 0)])
    parts = [layer(padded[i : i + BLOCK]) for i in range(0, n, BLOCK)]
    y = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return y[:n].reshape(*x.shape[:-1], -1)


def _multiply(
    layer: nn.Module,
    x: mx.array,
    variant: str,
    factory: Callable,
    ordered: Ordered | None = None,
    residual: mx.array | None = None,
    tensor_scale: mx.array | None = None,
) -> mx.array:
    return quantized_matmul(
        x,
        layer.weight,
        layer.scales,
        layer.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        tensor_scale=tensor_scale,
        variant=variant,
        kernel=factory,
        ordered=ordered,
        residual=residual,
    )


def _same(layer: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """A module of this kind on a layer's arrays and settings."""
    # The kinds' own __init__ would make, and quantize, random weights.
    new = kind.__new__(kind)
    nn.Module.__init__(new)
    dict.update(new, layer)
    vars(new).update(vars(layer))
    return new
