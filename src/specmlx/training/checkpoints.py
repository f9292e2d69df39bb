"""Training checkpoints: parameters, optimizer state and step in one file, replaced atomically."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from specmlx.formats.checkpoint import save_atomically


def save_checkpoint(path: Path, step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Write `path` (safetensors) so that a crash leaves the old file or the new one, never half of one."""
    arrays = {f"model.{k}": v for k, v in tree_flatten(model.trainable_parameters())}
    arrays |= {f"optimizer.{k}": v for k, v in tree_flatten(optimizer.state)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_atomically(path, arrays, {"step": str(step)})


def load_checkpoint(path: Path, model: nn.Module, optimizer: optim.Optimizer) -> int:
    """Restore model and optimizer in place and return the step. Raises ValueError where the file is another model's."""
    arrays, metadata = mx.load(str(path), return_metadata=True)
    parameters = {k.removeprefix("model."): v for k, v in arrays.items() if k.startswith("model.")}
    expected = dict(tree_flatten(model.trainable_parameters()))
    if {k: v.shape for k, v in parameters.items()} != {k: v.shape for k, v in expected.items()}:
        raise ValueError(f"{path} holds another model's parameters: remove it or train elsewhere")
    model.update(tree_unflatten(list(parameters.items())))
    state = [(k.removeprefix("optimizer."), v) for k, v in arrays.items() if k.startswith("optimizer.")]
    optimizer.state = tree_unflatten(state)
    mx.eval(model.parameters(), optimizer.state)
    return int(metadata["step"])
