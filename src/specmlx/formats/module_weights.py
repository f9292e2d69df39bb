"""A module's weights: what tells them from another's, and their storage order."""

import json
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

_ROWS, _COLUMNS = 8, 32


def fingerprint(module: nn.Module, config: Any) -> str:
    """32 hex digits of a module's geometry (a dataclass `config`) and of its tensors: names, shapes, dtypes, values.

    Of each tensor a sample spread over all of it is read: a fine-tune of every tensor is told apart, one value is not.
    """
    tensors = sorted(tree_flatten(module.parameters()))
    samples = [_sample(x) for _, x in tensors]
    mx.eval(samples)
    digest = blake2b(json.dumps(asdict(config), sort_keys=True, default=str).encode(), digest_size=16)
    for (name, x), sample in zip(tensors, samples, strict=True):
        digest.update(f"{name} {x.shape} {x.dtype}".encode())
        digest.update(bytes(memoryview(sample)))
    return digest.hexdigest()


def _sample(x: mx.array) -> mx.array:
    if x.ndim:
        x = x[:: -(-x.shape[0] // _ROWS)] if x.ndim > 1 else x
        x = x[..., :: -(-x.shape[-1] // _COLUMNS)]
    # Widened, since not every dtype has bytes that Python can see; no value changes.
    return mx.contiguous(x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x)


def column_major(module: nn.Module) -> None:
    """Store float32 matrices `[N, K]` with K as the slow axis, in place; shapes and results stay the same, bit for bit.

    The BLAS that mlx's Linux wheel bundles multiplies x `[M, K]` with such a W almost twice as fast, whatever M is.
    Quantized layers keep their order.
    """
    for _, layer in module.named_modules():
        if isinstance(layer, (nn.Linear, nn.Embedding)) and layer.weight.dtype == mx.float32:
            layer.weight = mx.contiguous(layer.weight.T).T
