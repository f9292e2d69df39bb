"""The residual stream between the layers of an mlx-lm model, without a hook on it."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Outline:
    """An mlx-lm model seen as its layers and what is around them.

    Rows run through the model's own code, on a shallow copy of the modules between the model and its list of layers:
    the copy's list holds stand-ins that call the layers and keep what they return. Layers and weights are the model's,
    and nothing in it is changed.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        found = _find(model, list(model.layers))
        if found is None:
            raise ValueError(f"{type(model).__module__} keeps its layers in no list of modules: specmlx can't run it")
        self._path, self._name = found
        self.inner = model
        for name in self._path:
            self.inner = self.inner[name]

    @property
    def layers(self) -> list:
        return self.inner[self._name]

    def rows(self, ids: mx.array, caches: list | None, tap_ids: Sequence[int]) -> tuple[mx.array, mx.array | None]:
        """Logits `[B, T, V]` of ids `[B, T]`, and the outputs of the tapped layers side by side `[B, T, F]`.

        Raises ValueError where a tapped layer returns no rows `[B, T, D]`.
        """
        if not tap_ids:
            return self.model(ids, cache=caches), None
        taps: dict[int, mx.array] = {}
        layers = [_Tapped(layer, i, taps) if i in tap_ids else layer for i, layer in enumerate(self.layers)]
        top, inner = self._copied(self._path)
        dict.__setitem__(inner, self._name, layers)
        logits = top(ids, cache=caches)
        if missing := [i for i in tap_ids if i not in taps]:
            raise ValueError(f"{type(self.model).__module__} did not run layers {missing} of its list: no taps there")
        return logits, mx.concatenate([taps[i] for i in tap_ids], axis=-1)

    def _copied(self, path: list[str]) -> tuple[nn.Module, nn.Module]:
        """Copies of the modules along a path from the model: the first and the last of them."""
        copy = top = _shallow(self.model)
        for name in path:
            inner = _shallow(copy[name])
            dict.__setitem__(copy, name, inner)
            copy = inner
        return top, copy


class _Tapped:
    """A layer that keeps its output under its index."""

    def __init__(self, layer: nn.Module, index: int, taps: dict[int, mx.array]):
        self._layer, self._index, self._taps = layer, index, taps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._layer(*args, **kwargs)
        # Gemma 4's layers return their keys and values too, behind their rows.
        rows = out[0] if isinstance(out, tuple) and out else out
        if not isinstance(rows, mx.array) or rows.shape != args[0].shape:
            kind = f"{type(self._layer).__module__}.{type(self._layer).__name__}"
            raise ValueError(f"{kind} returns a {type(out).__name__}, not its rows: no taps there")
        self._taps[self._index] = rows
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __contains__(self, name: str) -> bool:
        return name in self._layer


def _shallow(module: nn.Module) -> nn.Module:
    """Another module object of the same class, on the same children and arrays."""
    copy = type(module).__new__(type(module))
    vars(copy).update(vars(module))
    dict.update(copy, module)
    return copy


def _find(module: nn.Module, layers: list) -> tuple[list[str], str] | None:
    """The names of the modules from a model to the one with the list of its layers, and that list's name."""
    for name, value in module.items():
        if isinstance(value, list) and len(value) == len(layers) > 0:
            if all(a is b for a, b in zip(value, layers, strict=True)):
                return [], name
    for name, value in module.items():
        if isinstance(value, nn.Module) and (found := _find(value, layers)):
            return [name, *found[0]], found[1]
    return None
