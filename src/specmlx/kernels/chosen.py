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
from specmlx.kernels.linear import CHOSEN, PACKED, Chosen, Experts, GatedMLP, as_stock, matrix, with_choice
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
    for module in _of(Served, model):
        module.consistent = chooser.consistent
    for mlp in _of(GatedMLP, model):
        if (gate := mlp.pair()) is not None and _supported(gate, dtype):
            choice = chooser.choose(GATE_UP, _key(gate, dtype))
            if not {STOCK, FIXED}.issuperset(choice.by_rows):
                chosen[f"gate and up {_name(gate)}"] = choice
                mlp.choose(choice, factory)

    def choose(layer: nn.Module) -> nn.Module:
        operator = EXPERTS if issubclass(CHOSEN[type(layer)], Experts) else QUANTIZED_MATMUL
        if _supported(layer, dtype):
            experts = {"E": len(layer.weight)} if operator is EXPERTS else {}
            choice = chosen[_name(layer)] = chooser.choose(operator, experts | _key(layer, dtype))
        else:
            choice = Choice.same(operator, FIXED if chooser.consistent else STOCK, together=True)
        return layer if set(choice.by_rows) == {STOCK} else with_choice(layer, choice, factory)

    paired = _paired(model)
    _replace(model, lambda layer: choose(layer) if type(layer) in CHOSEN and id(layer) not in paired else layer)
    if chooser.consistent:
        _check_consistent(model, dtype, paired)
    return chosen


def restore(model: nn.Module) -> None:
    """Let mlx and mlx-lm run every product again."""
    _replace(model, lambda layer: as_stock(layer) if isinstance(layer, Chosen) else layer)
    for mlp in _of(GatedMLP, model):
        mlp.choose(None)


def _replace(model: nn.Module, new: Callable[[nn.Module], nn.Module]) -> None:
    """Put other layers in the places of those for which `new` gives others."""
    layers = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    replaced = [(path, other) for path, layer in layers if (other := new(layer)) is not layer]
    model.update_modules(tree_unflatten(replaced))


def _of(kind: type, model: nn.Module) -> list:
    return [module for module in model.modules() if isinstance(module, kind)]


def _paired(model: nn.Module) -> set[int]:
    """The layers that an MLP runs as a pair, by id."""
    return {id(layer) for mlp in _of(GatedMLP, model) for layer in mlp.served()}


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
    return sorted(found | {each.operator for each in _of(Served, model) if not each.on_kernel(dtype)})


def _check_consistent(model: nn.Module, dtype: mx.Dtype, paired: set[int]) -> None:
    for module in _of(Served, model):
        if not module.on_kernel(dtype):
            raise ValueError(f"consistent can't be had: {why_not(module.operator)}")
    # A convolution is four products a value; gate and up of a pair are run by their MLP.
    for path, module in model.named_modules():
        if isinstance(module, (Chosen, nn.Conv1d)) or id(module) in paired:
            continue
        if any(isinstance(value, mx.array) and value.ndim > 1 for value in module.values()):
            kind = type(module).__name__
            raise ValueError(f"consistent can't be had: {path} is a {kind}, which mlx runs by the number of rows")


def _key(layer: nn.Module, dtype: mx.Dtype) -> dict:
    N, K = matrix(layer).shape[-2:]
    return {"N": N, "K": K, **matrix(layer).format, "dtype": dtype_name(dtype)}


def _name(layer: nn.Module) -> str:
    sizes = "x".join(str(n) for n in matrix(layer).shape)
    return f"{sizes} {layer.mode} {layer.bits}/{layer.group_size}"


def _supported(layer: nn.Module, dtype: mx.Dtype) -> bool:
    if type(layer) not in PACKED or (isinstance(layer, QuantizedSwitchLinear) and layer.global_scale is not None):
        return False
    packed = matrix(layer)
    return supported(mx.zeros((1, packed.shape[-1]), dtype), packed)
