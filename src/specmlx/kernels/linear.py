"""Quantized layers of a model that run the kernel which was chosen for their shape and number of rows."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from specmlx.formats.scaled_linear import ScaledLinear
from specmlx.kernels.choice import STOCK, Choice, Chooser
from specmlx.kernels.choice.operators import EXPERTS, QUANTIZED_MATMUL
from specmlx.kernels.experts import gather_by_expert
from specmlx.kernels.quantized_matmul import quantized_matmul, supported


class ChosenLinear(nn.QuantizedLinear):
    """mlx's QuantizedLinear, with the kernel of a `Choice` for few rows. Parameters and their names stay."""

    @classmethod
    def of(cls, layer: nn.QuantizedLinear, choice: Choice, factory: Callable = mx.fast.metal_kernel) -> "ChosenLinear":
        """On the layer's own arrays; nothing is copied."""
        # QuantizedLinear's own __init__ would make and quantize random weights.
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        for name, value in layer.items():
            new[name] = value
        new.group_size, new.bits, new.mode = layer.group_size, layer.bits, layer.mode
        new._choice, new._factory = choice, factory
        return new

    def __call__(self, x: mx.array) -> mx.array:
        variant = self._choice.variant(x.size // x.shape[-1])
        if variant == STOCK:
            return super().__call__(x)
        y = _multiply(self, x, variant, self._factory)
        return y + self.bias if "bias" in self else y


class ChosenEmbedding(nn.QuantizedEmbedding):
    """mlx's QuantizedEmbedding, whose use as the model's head has the kernel of a `Choice` for few rows."""

    @classmethod
    def of(
        cls, layer: nn.QuantizedEmbedding, choice: Choice, factory: Callable = mx.fast.metal_kernel
    ) -> "ChosenEmbedding":
        """On the layer's own arrays; nothing is copied."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        for name, value in layer.items():
            new[name] = value
        new.group_size, new.bits, new.mode = layer.group_size, layer.bits, layer.mode
        new.num_embeddings, new.dims = layer.num_embeddings, layer.dims
        new._choice, new._factory = choice, factory
        return new

    def as_linear(self, x: mx.array) -> mx.array:
        variant = self._choice.variant(x.size // x.shape[-1])
        return super().as_linear(x) if variant == STOCK else _multiply(self, x, variant, self._factory)


class ChosenScaledLinear(ScaledLinear):
    """A ScaledLinear with the kernel of a `Choice` for few rows. Parameters and their names stay."""

    @classmethod
    def of(cls, layer: ScaledLinear, choice: Choice, factory: Callable = mx.fast.metal_kernel) -> "ChosenScaledLinear":
        """On the layer's own arrays; nothing is copied."""
        new = cls(layer.mode)
        for name, value in layer.items():
            new[name] = value
        new._choice, new._factory = choice, factory
        return new

    def __call__(self, x: mx.array) -> mx.array:
        variant = self._choice.variant(x.size // x.shape[-1])
        if variant == STOCK:
            return super().__call__(x)
        y = _multiply(self, x, variant, self._factory, tensor_scale=self.output_scale)
        return y + self.bias if "bias" in self else y


class ChosenSwitchLinear(QuantizedSwitchLinear):
    """mlx-lm's QuantizedSwitchLinear, with the kernel of a `Choice` by the number of (row, expert) pairs."""

    @classmethod
    def of(
        cls, layer: QuantizedSwitchLinear, choice: Choice, factory: Callable = mx.fast.metal_kernel
    ) -> "ChosenSwitchLinear":
        """On the layer's own arrays; nothing is copied."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        for name, value in layer.items():
            new[name] = value
        new.group_size, new.bits, new.mode = layer.group_size, layer.bits, layer.mode
        new.global_scale = None
        new._choice, new._factory = choice, factory
        return new

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if self._choice.variant(indices.size) == STOCK:
            return super().__call__(x, indices, sorted_indices)
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


def _multiply(
    layer: nn.Module, x: mx.array, variant: str, factory: Callable, tensor_scale: mx.array | None = None
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
    )


_CHOSEN = {
    nn.QuantizedLinear: ChosenLinear,
    nn.QuantizedEmbedding: ChosenEmbedding,
    ScaledLinear: ChosenScaledLinear,
    QuantizedSwitchLinear: ChosenSwitchLinear,
}


def choose_kernels(
    model: nn.Module, dtype: mx.Dtype, chooser: Chooser, factory: Callable = mx.fast.metal_kernel
) -> dict[str, Choice]:
    """Put the chosen kernels into a model's quantized layers, in place; the choices by shape, as `256x512 affine 4/64`.

    dtype: of the activations. A layer whose shapes and dtypes have no kernel, or for which stock mlx won at every
    number of rows, stays as it is.
    """
    chosen: dict[str, Choice] = {}
    replaced = []
    for path, layer in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        new = _CHOSEN.get(type(layer))
        if new is None or not _supported(layer, dtype):
            continue
        *experts, N, words = layer.weight.shape
        K = words * 32 // layer.bits
        key = {"N": N, "K": K, "mode": layer.mode, "bits": layer.bits, "group_size": layer.group_size}
        key["dtype"] = str(dtype).removeprefix("mlx.core.")
        if experts:
            choice = chooser.choose(EXPERTS, {"E": experts[0], **key})
        else:
            choice = chooser.choose(QUANTIZED_MATMUL, key)
        shape = "x".join(str(n) for n in (*experts, N, K))
        chosen[f"{shape} {layer.mode} {layer.bits}/{layer.group_size}"] = choice
        if set(choice.by_rows) != {STOCK}:
            replaced.append((path, new.of(layer, choice, factory)))
    model.update_modules(tree_unflatten(replaced))
    return chosen


def mixed(chosen: dict[str, Choice]) -> str | None:
    """One line on choices that differ by the number of rows; None if a row has one kernel in every pass."""
    different = {shape: choice for shape, choice in chosen.items() if len(set(choice.by_rows)) > 1}
    if not different:
        return None
    shape, choice = next(iter(different.items()))
    more = f", and {len(different) - 1} more" if len(different) > 1 else ""
    return f"kernels by number of rows, which may round differently (consistent=True: one): {shape} {choice}{more}"


def _supported(layer: nn.Module, dtype: mx.Dtype) -> bool:
    if isinstance(layer, QuantizedSwitchLinear) and layer.global_scale is not None:
        return False
    K = layer.weight.shape[-1] * 32 // layer.bits
    x = mx.zeros((1, K), dtype)
    return supported(x, layer.weight, layer.scales, group_size=layer.group_size, bits=layer.bits, mode=layer.mode)
