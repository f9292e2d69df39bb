"""Which kernels the layers of a model run: the choices, put into its layers in place."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from specmlx.formats.scaled_linear import (
    BlockScaledLinear,
    BlockScaledSwitchLinear,
    ScaledLinear,
    ScaledSwitchLinear,
)
from specmlx.kernels import linear
from specmlx.kernels.choice import FIXED, STOCK, Choice, Chooser
from specmlx.kernels.choice.operators import EXPERTS, GATE_UP, QUANTIZED_MATMUL
from specmlx.kernels.choice.serving import Serve, Served, consistent_factory, kernel_factory
from specmlx.kernels.mlp import GatedMLP
from specmlx.kernels.quantized_matmul import supported

_CHOSEN = {
    nn.QuantizedLinear: linear.ChosenLinear,
    nn.QuantizedEmbedding: linear.ChosenEmbedding,
    ScaledLinear: linear.ChosenScaledLinear,
    QuantizedSwitchLinear: linear.ChosenSwitchLinear,
}
_FIXED = {
    nn.Linear: linear.FixedLinear,
    nn.Embedding: linear.FixedEmbedding,
    BlockScaledLinear: linear.FixedBlockScaledLinear,
    SwitchLinear: linear.FixedSwitchLinear,
    ScaledSwitchLinear: linear.FixedScaledSwitchLinear,
    BlockScaledSwitchLinear: linear.FixedBlockScaledSwitchLinear,
}


def choose_kernels(
    model: nn.Module,
    dtype: mx.Dtype,
    chooser: Chooser,
    factory: Callable = mx.fast.metal_kernel,
    serve: Serve | None = None,
) -> dict[str, Choice]:
    """Put the chosen kernels into a model's layers, in place; the choices by shape, as `256x512 affine 4/64`.

    dtype: of the activations. serve: what attention and the delta rule ask for theirs; default: by the same rule.
    A layer whose shapes and dtypes have no kernel, or for which stock mlx won at every number of rows, stays as it is.
    A consistent chooser leaves no layer to kernels that depend on the number of rows. Called again, it chooses anew.
    Raises ValueError for a layer that it can't make consistent.
    """
    chosen: dict[str, Choice] = {}
    restore(model)
    paired = _choose_pairs(model, dtype, chooser, factory, chosen)
    replaced = []
    for path, layer in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if id(layer) in paired:
            continue
        new, choice = _CHOSEN.get(type(layer)), None
        if new is not None and _supported(layer, dtype):
            *experts, N, words = layer.weight.shape
            operator = EXPERTS if experts else QUANTIZED_MATMUL
            choice = chooser.choose(operator, ({"E": experts[0]} if experts else {}) | _key(layer, dtype))
            chosen[_name(layer)] = choice
        elif chooser.consistent and (new := new or _FIXED.get(type(layer))):
            pairs = issubclass(new, (linear.FixedPairs, linear.ChosenSwitchLinear))
            choice = Choice.same(EXPERTS if pairs else QUANTIZED_MATMUL, FIXED, together=True)
        if choice is not None and set(choice.by_rows) != {STOCK}:
            replaced.append((path, new.of(layer, choice, factory)))
    model.update_modules(tree_unflatten(replaced))
    _ask(model, serve or (consistent_factory if chooser.consistent else kernel_factory))
    if chooser.consistent:
        _check_consistent(model, dtype)
    return chosen


def restore(model: nn.Module) -> None:
    """Let mlx and mlx-lm run every layer again."""
    stock = {new: old for old, new in (_CHOSEN | _FIXED).items()}
    replaced = []
    for path, layer in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if type(layer) in stock:
            replaced.append((path, layer.as_stock(stock[type(layer)])))
    model.update_modules(tree_unflatten(replaced))
    for _, module in model.named_modules():
        if isinstance(module, GatedMLP):
            module.choose(None)
    _ask(model, kernel_factory)


def _ask(model: nn.Module, serve: Serve) -> None:
    for module in _served(model):
        module.serve_by(serve)


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
    """What mlx runs in a model by other kernels for one row than for many. What is not chosen yet, is then."""
    dense = _FIXED.keys() - {nn.Embedding}
    found = {"dense products" for layer in model.modules() if type(layer) in dense}
    return sorted(found | {each.operator for each in _served(model) if not each.on_kernel(dtype)})


def _choose_pairs(
    model: nn.Module, dtype: mx.Dtype, chooser: Chooser, factory: Callable, chosen: dict[str, Choice]
) -> set[int]:
    """Choose for gate and up of each MLP together; the layers that need no choice of their own then, by id."""
    served = set()
    for _, module in model.named_modules():
        layer = module.pair() if isinstance(module, GatedMLP) else None
        if layer is None or not _supported(layer, dtype):
            continue
        choice = chooser.choose(GATE_UP, _key(layer, dtype))
        if not {STOCK, FIXED}.issuperset(choice.by_rows):
            chosen[f"gate and up {_name(layer)}"] = choice
            module.choose(choice, factory)
            served |= {id(layer) for layer in module.served()}
    return served


def _check_consistent(model: nn.Module, dtype: mx.Dtype) -> None:
    for module in _served(model):
        if not module.on_kernel(dtype):
            raise ValueError(f"consistent can't be had: {module.operator} has no kernel for heads like this model's")
    # A convolution is four products a value; gate and up of a pair are run by their MLP.
    paired = {id(layer) for _, m in model.named_modules() if isinstance(m, GatedMLP) for layer in m.served()}
    for path, module in model.named_modules():
        if isinstance(module, (linear.Chosen, nn.Conv1d)) or id(module) in paired:
            continue
        if any(isinstance(value, mx.array) and value.ndim > 1 for value in module.values()):
            kind = type(module).__name__
            raise ValueError(f"consistent can't be had: {path} is a {kind}, which mlx runs by the number of rows")


def _key(layer: nn.Module, dtype: mx.Dtype) -> dict:
    N, words = layer.weight.shape[-2:]
    key = {"N": N, "K": words * 32 // layer.bits, "mode": layer.mode, "bits": layer.bits}
    return key | {"group_size": layer.group_size, "dtype": str(dtype).removeprefix("mlx.core.")}


def _name(layer: nn.Module) -> str:
    *shape, words = layer.weight.shape
    sizes = "x".join(str(n) for n in (*shape, words * 32 // layer.bits))
    return f"{sizes} {layer.mode} {layer.bits}/{layer.group_size}"


def _supported(layer: nn.Module, dtype: mx.Dtype) -> bool:
    if isinstance(layer, QuantizedSwitchLinear) and layer.global_scale is not None:
        return False
    K = layer.weight.shape[-1] * 32 // layer.bits
    x = mx.zeros((1, K), dtype)
    return supported(x, layer.weight, layer.scales, group_size=layer.group_size, bits=layer.bits, mode=layer.mode)
