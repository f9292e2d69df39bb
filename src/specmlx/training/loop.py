"""The training loop that targets and drafters share: clipped AdamW steps, a log in JSONL, checkpoints, resume."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from specmlx.formats.atomic import write_atomically
from specmlx.formats.checkpoint import safetensors

Batch = tuple[mx.array, ...]
CHECKPOINT, LOG = "checkpoint.safetensors", "log.jsonl"


@dataclass(frozen=True)
class Schedule:
    """Learning rate: linear warm-up, constant for a share of all steps, then linear down to `floor` × peak."""

    peak: float
    steps: int
    warmup: int = 50
    constant: float = 0.5
    floor: float = 0.02

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        down_from = self.constant * self.steps
        if step < down_from:
            return self.peak
        left = max(0.0, (self.steps - step) / max(1.0, self.steps - down_from))
        return self.peak * max(self.floor, left)


def train(
    model: nn.Module,
    loss: Callable[..., tuple[mx.array, dict[str, mx.array]]],
    batch: Callable[[int], Batch],
    schedule: Schedule,
    directory: Path,
    optimizer: optim.Optimizer | None = None,
    accumulate: int = 1,
    checkpoint_every: int = 100,
    measure: Callable[[int], dict[str, float]] = lambda step: {},
) -> Iterator[dict]:
    """Train `model` in place, from the checkpoint in `directory` where there is one, and yield a record every 10 steps.

    `loss(model, *batch(i))` gives the scalar to lower and figures to log; a step's loss, figures and gradient are the
    means over the batches i = step × accumulate and so on. `optimizer`, by default AdamW with betas .9 and .97 and
    weight decay .05, gets the schedule's rates. `measure(step)` adds figures to a record. A batch depends on its number
    only, so an interrupted run goes on as an uninterrupted one would. Raises FloatingPointError at a loss or gradient
    that is not finite: the checkpoint is the last good one.
    """
    optimizer = optimizer or optim.AdamW(0.0, [0.9, 0.97], weight_decay=0.05)
    optimizer.init(model.trainable_parameters())
    checkpoint, log = directory / CHECKPOINT, directory / LOG
    first = _load_checkpoint(checkpoint, model, optimizer) if checkpoint.exists() else 0
    gradient = nn.value_and_grad(model, loss)
    directory.mkdir(parents=True, exist_ok=True)
    # Records of steps behind the checkpoint are made again.
    write_atomically(log, "".join(json.dumps(record) + "\n" for record in whole_lines(log) if record["step"] <= first))
    started, seen, saved = time.perf_counter(), 0, first
    for step in range(first + 1, schedule.steps + 1):
        optimizer.learning_rate = schedule(step - 1)
        total = None
        for i in range((step - 1) * accumulate, step * accumulate):
            arrays = batch(i)
            found = gradient(model, *arrays)
            total = found if total is None else tree_map(mx.add, total, found)
            mx.eval(total)
            seen += arrays[0].size
        (value, figures), gradients = total if accumulate == 1 else tree_map(lambda x: x / accumulate, total)
        gradients, norm = optim.clip_grad_norm(gradients, 1.0)
        if not math.isfinite(value.item()) or not math.isfinite(norm.item()):
            kept = f"{checkpoint} has step {saved}" if saved else "no checkpoint was written yet"
            raise FloatingPointError(f"loss {value.item()}, gradient norm {norm.item()} at step {step}: {kept}")
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        record = None
        # In the log before the checkpoint: records behind it are taken out by a run that goes on, and made again.
        if step % 10 == 0 or step == schedule.steps:
            record = {
                "step": step,
                "loss": round(value.item(), 5),
                "norm": round(norm.item(), 4),
                **{name: round(x.item(), 5) for name, x in figures.items()},
                "tokens_per_second": round(seen / (time.perf_counter() - started), 1),
                **measure(step),
            }
            with log.open("a") as file:
                file.write(json.dumps(record) + "\n")
        if step % checkpoint_every == 0 or step == schedule.steps:
            state = {"model": model.trainable_parameters(), "optimizer": optimizer.state}
            write_atomically(checkpoint, safetensors(dict(tree_flatten(state)), {"step": str(step)}))
            saved = step
        if record is not None:
            yield record


def _load_checkpoint(path: Path, model: nn.Module, optimizer: optim.Optimizer) -> int:
    """Restore model and optimizer in place and return the step. Raises ValueError where the file is another model's."""
    arrays, metadata = mx.load(str(path), return_metadata=True)
    saved = tree_unflatten(list(arrays.items()))
    trees = saved.get("model", {}), model.trainable_parameters()
    found, own = ({name: x.shape for name, x in tree_flatten(tree)} for tree in trees)
    if found != own:
        raise ValueError(f"{path} holds another model's parameters: remove it or train elsewhere")
    model.update(saved["model"])
    optimizer.state = saved["optimizer"]
    mx.eval(model.parameters(), optimizer.state)
    return int(metadata["step"])


def whole_lines(path: Path) -> list[dict]:
    """The objects of a JSONL file, if there is one; a line that a crash cut short is dropped from the file."""
    found, whole = [], 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            fields = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n"):
            break
        found.append(fields)
        whole += len(line)
    if path.exists():
        os.truncate(path, whole)
    return found
