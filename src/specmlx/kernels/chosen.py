"""Which kernels the layers of a model run: the choices, put into its layers in place."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from specmlx.kernels.choice.operator import FIXED, STOCK
from specmlx.kernels.choice.operators import EXPERTS, GATE_UP, QUANTIZED_MATMUL
from specmlx.kernels.dispatch import Choice, Chooser, dtype_name, why_not
from specmlx.kernels.linear import CHOSEN, PACKED, Chosen, Experts, as_stock, packing, with_choice
from specmlx.kernels.mlp import GatedMLP
from specmlx.kernels.quantized_matmul import supported


@runtime_checkable
class Served(Protocol):
    """A layer that runs another operator than a product.

    operator: what it is called. consistent: whether it has to give a row the same bits in every pass.
    """

    operator: str
    consistent: bool

    def on_kernel(self, dtype: mx.Dtype) -> bool:
        """Whether a kernel runs it for rows of this dtype."""


def choose_kernels(
    model: nn.Module, dtype: mx.Dtype, chooser: Chooser, factory: Callable = mx.fast.metal_kernel
) -> dict[str, Choice]:
    """Put the chosen kernels into a model's layers, in place; the choices by shape, as `256x512 affine 4/64`.

    dtype: of the activations.
    A layer whose shapes and dtypes have no kernel, or for which stock mlx won at every number of rows, stays as it is.
    A consistent chooser leaves no layer to kernels that depend on the number of rows. Called again, it chooses anew.
    Raises ValueError for a layer that it can't make consistent.
    """
    chosen: dict[str, Choice] = {}
    restore(model)
    for module in _served(model):
        module.consistent = chooser.consistent
    paired = _choose_pairs(model, dtype, chooser, factory, chosen)
    replaced = []
    for path, layer in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if id(layer) in paired or type(layer) not in CHOSEN:
            continue
        operator = EXPERTS if issubclass(CHOSEN[type(layer)], Experts) else QUANTIZED_MATMUL
        if _supported(layer, dtype):
            experts = {"E": len(layer.weight)} if operator is EXPERTS else {}
            choice = chosen[_name(layer)] = chooser.choose(operator, experts | _key(layer, dtype))
        else:
            choice = Choice.same(operator, FIXED if chooser.consistent else STOCK, together=True)
        if set(choice.by_rows) != {STOCK}:
            replaced.append((path, with_choice(layer, choice, factory)))
    model.update_modules(tree_unflatten(replaced))
    if chooser.consistent:
        _check_consistent(model, dtype)
    return chosen


def restore(model: nn.Module) -> None:
    """Let mlx and mlx-lm run every product again."""
    layers = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    replaced = [(path, as_stock(layer)) for path, layer in layers if isinstance(layer, Chosen)]
    model.update_modules(tree_unflatten(replaced))
    for module in model.modules():
        if isinstance(module, GatedMLP):
            module.choose(None)


def _served(model: nn.Module) -> list[Served]:
    return [module for module in model.modules() if isinstance(module, Served)]


def mixed(chosen: dict[str, Choice], by_mlx: Sequence[str] = ()) -> str | None:
    """One line on choices that differ by the number of rows; None if a row has one kernel in every pass.

    by_mlx: operators that mlx runs, by other kernels for one row than for many.
    """
    different = [f"{shape} {choice}" for shape, choice in chosen.items() if len(set(choice.by_rows)) > 1]
    found = different[:1] + ([f"{len(different) - 1} more"] if len(different) > 1 else [])
    if by_mlx:
        found.append(f"{', '.join(by_mlx)} by mlx")
    if not found:
        return None
    return f"kernels by number of rows, which may round differently (consistent=True: one): {', and '.join(found)}"


def run_by_mlx(model: nn.Module, dtype: mx.Dtype) -> list[str]:
    """What mlx runs in a model by other kernels for one row than for many. What is not checked yet, is then."""
    dense = CHOSEN.keys() - {nn.Embedding, *PACKED}
    found = {"dense products" for layer in model.modules() if type(layer) in dense}
    return sorted(found | {each.operator for each in _served(model) if not each.on_kernel(dtype)})


def _choose_pairs(
    model: nn.Module, dtype: mx.Dtype, chooser: Chooser, factory: Callable, chosen: dict[str, Choice]
) -> set[int]:
    """Choose for gate and up of each MLP together; the layers that need no choice of their own then, by id."""
    for module in model.modules():
        layer = module.pair() if isinstance(module, GatedMLP) else None
        if layer is None or not _supported(layer, dtype):
            continue
        choice = chooser.choose(GATE_UP, _key(layer, dtype))
        if not {STOCK, FIXED}.issuperset(choice.by_rows):
            chosen[f"gate and up {_name(layer)}"] = choice
            module.choose(choice, factory)
    return _paired(model)


def _paired(model: nn.Module) -> set[int]:
    """The layers that an MLP runs as a pair, by id."""
    return {id(layer) for module in model.modules() if isinstance(module, GatedMLP) for layer in module.served()}


def _check_consistent(model: nn.Module, dtype: mx.Dtype) -> None:
    for module in _served(model):
        if not module.on_kernel(dtype):
            raise ValueError(f"consistent can't be had: {why_not(module.operator)}")
    # A convolution is four products a value; gate and up of a pair are run by their MLP.
    paired = _paired(model)
    for path, module in model.named_modules():
        if isinstance(module, (Chosen, nn.Conv1d)) or id(module) in paired:
            continue
        if any(isinstance(value, mx.array) and value.ndim > 1 for value in module.values()):
            kind = type(module).__name__
            raise ValueError(f"consistent can't be had: {path} is a {kind}, which mlx runs by the number of rows")


def _key(layer: nn.Module, dtype: mx.Dtype) -> dict:
    N, words = layer.weight.shape[-2:]
    return {"N": N, "K": words * 32 // layer.bits, **packing(layer), "dtype": dtype_name(dtype)}


def _name(layer: nn.Module) -> str:
    *shape, words = layer.weight.shape
    sizes = "x".join(str(n) for n in (*shape, words * 32 // layer.bits))
    return f"{sizes} {layer.mode} {layer.bits}/{layer.group_size}"


def _supported(layer: nn.Module, dtype: mx.Dtype) -> bool:
    if type(layer) not in PACKED or (isinstance(layer, QuantizedSwitchLinear) and layer.global_scale is not None):
        return False
    x = mx.zeros((1, layer.weight.shape[-1] * 32 // layer.bits), dtype)
    return supported(x, layer.weight, layer.scales, **packing(layer))
