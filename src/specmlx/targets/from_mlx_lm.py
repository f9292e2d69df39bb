"""A target from a model object that mlx-lm loaded: on the same modules and arrays, the object itself left as it is."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specmlx.kernels.linear import GatedMLP
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.attention import Attention
from specmlx.targets.config import FULL, LINEAR, HybridConfig
from specmlx.targets.gated_delta import GatedDeltaNet
from specmlx.targets.hybrid import DecoderLayer, HybridTextModel, Model, TextModel
from specmlx.targets.mlp import SparseMLP

_HYBRIDS = ("mlx_lm.models.qwen3_5", "mlx_lm.models.qwen3_5_moe", "mlx_lm.models.qwen3_next")
# What is rebuilt; any other module (a projection, a norm, a rope, the experts) is taken over as it is.
_OURS = (TextModel, HybridTextModel, DecoderLayer, GatedDeltaNet, Attention, GatedMLP, SparseMLP)


def as_target(model: Any) -> Model | AnyLM:
    """A target of ours as it is; a model of mlx-lm's as one, with nothing copied.

    Raises ValueError in one line for anything else, and for models that are split over several machines.
    """
    if isinstance(model, (Model, AnyLM)):
        return model
    if not isinstance(model, nn.Module) or not hasattr(model, "layers"):
        raise ValueError(f"{type(model).__name__} is no language model of specmlx or mlx-lm: load it with specmlx.load")
    if any(vars(module).get("sharding_group") for _, module in model.named_modules()):
        raise ValueError("the model was sharded by mlx-lm: load it with specmlx.load(path, group=…)")
    return _rebuilt(model) if type(model).__module__ in _HYBRIDS else AnyLM(model)


def _rebuilt(model: nn.Module) -> Model:
    args = vars(model.args)
    config = {**args, **(args.get("text_config") or {}), "model_type": model.model_type}
    config["layer_types"] = [LINEAR if layer.is_linear else FULL for layer in model.layers]
    # Initial weights are never evaluated, but drawing them would move the caller's generator.
    key = mx.array(mx.random.state[0])
    ours = Model(HybridConfig.from_dict(config))
    mx.random.state[0][:] = key
    _take(ours.language_model, model.language_model if "language_model" in model else model)
    ours.eval()
    return ours


def _take(ours: Any, theirs: Any) -> None:
    """Fill the places of our module with what the same places of theirs hold."""
    places = enumerate(ours) if isinstance(ours, list) else list(ours.items())
    for name, value in places:
        if isinstance(value, (list, *_OURS)):
            _take(value, theirs[name])
        else:
            ours[name] = theirs[name]
