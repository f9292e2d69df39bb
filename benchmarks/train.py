"""What a step of `specmlx train` costs on the demo: tokens per second, where the time goes, peak memory.

`python benchmarks/train.py` trains a drafter for the demo target with the default settings of `specmlx train`, and then
takes the gradient of one batch at several batch sizes and lengths, with and without `--grad-checkpoint`.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import click
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from specmlx import __version__
from specmlx.demo.export import write_demo
from specmlx.evaluation.machine import this_machine
from specmlx.loading.load import load
from specmlx.training.dataset import read_rows
from specmlx.training.drafter import draft_loss, sample_anchors
from specmlx.training.geometry import KINDS, drafter_config, mask_token
from specmlx.training.run import LOSSES, Run, Settings

BATCHES, LENGTHS = (1, 4), (128, 512)


def shares(model, tokenizer, rows, settings: Settings, folder: Path) -> dict[str, float]:
    """Seconds by what they went to, and tokens a second of all of them, padding included."""
    run = Run(model, tokenizer, rows, settings, folder)
    # The measuring on held-out rows at the last step is not a step's cost.
    run.held_out_tau()
    clock, before = time.perf_counter(), run.answers.seconds
    run.held_out_tau()
    measuring = time.perf_counter() - clock
    clock = time.perf_counter()
    for record in run.steps():
        last = record
    total = time.perf_counter() - clock
    generation = run.answers.seconds - before
    batches = [run.batches(step) for step in range(max(0, settings.steps - 5), settings.steps)]
    clock = time.perf_counter()
    for tokens, *_ in batches:
        mx.eval(model.scored(tokens[:, :-1], run.drafter.tap_ids))
    target = (time.perf_counter() - clock) / len(batches) * settings.steps
    steps = total - measuring
    return {
        "seconds": steps,
        "tokens_per_second": last["tokens_per_second"],
        "generation": generation / steps,
        "target_pass": target / steps,
        "drafter": 1 - (generation + target) / steps,
    }


def memory(run: Run) -> Iterator[dict]:
    """Peak memory of one gradient by batch size, length and whether layers run again for it, in MB."""
    s, rng = run.settings, np.random.default_rng(0)
    for batch in BATCHES:
        for length in LENGTHS:
            tokens = mx.array(rng.integers(0, run.model.vocab_size, (batch, length + 1)).astype(np.int32))
            weights = np.ones((batch, length), np.float32)
            arrays = tokens, mx.array(weights), mx.array(sample_anchors(weights, s.anchors, rng))
            row: dict = {"batch": batch, "length": length}
            for again in (False, True):
                loss = draft_loss(run.drafter, run.model, LOSSES[s.kind], again)
                mx.clear_cache()
                mx.reset_peak_memory()
                before = mx.get_active_memory()
                mx.eval(nn.value_and_grad(run.drafter.model, loss)(run.drafter.model, *arrays))
                row["checkpointed" if again else "kept"] = (mx.get_peak_memory() - before) / 1e6
            yield row


@click.command()
@click.option("--kind", type=click.Choice(KINDS), default="dspark", show_default=True)
@click.option("--steps", default=32, show_default=True, help="The first four learn new answers alone, all others half.")
@click.option("--max-tokens", "-m", default=256, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(kind: str, steps: int, max_tokens: int, as_json: bool) -> None:
    """Print speed, shares of time and peak memory of training on the demo target."""
    with tempfile.TemporaryDirectory() as folder:
        demo = write_demo(Path(folder) / "demo")
        rows = read_rows(demo / "train.jsonl")
        model, tokenizer = load(str(demo), draft_model=None)
        config = drafter_config(model.config, kind, mask_token(tokenizer, model.vocab_size))
        settings = Settings(config, steps=steps, max_tokens=max_tokens)
        found = shares(model, tokenizer, rows, settings, Path(folder) / "shares")
        peaks = list(memory(Run(model, tokenizer, rows, settings, Path(folder) / "memory")))
    machine = this_machine()
    used = {
        "machine": f"{machine.system}, {machine.chip}, {machine.cores} cores, {machine.backend}",
        "specmlx": __version__,
        **{package: version(package) for package in ("mlx", "mlx-lm")},
    }
    if as_json:
        click.echo(json.dumps({"machine": used, "kind": kind, "steps": steps, **found, "memory": peaks}))
        return
    click.echo(f"{used}; {kind}, {steps} steps of {settings.batch_size} sequences, {settings.anchors} blocks of each")
    click.echo(
        f"{found['tokens_per_second']:.0f} tokens/s; of the time {found['generation']:.0%} generation, "
        f"{found['target_pass']:.0%} target pass, {found['drafter']:.0%} drafter"
    )
    click.echo("| sequences | length | peak MB of a gradient | with --grad-checkpoint |")
    click.echo("|---:|---:|---:|---:|")
    for row in peaks:
        click.echo(f"| {row['batch']} | {row['length']} | {row['kept']:.0f} | {row['checkpointed']:.0f} |")


if __name__ == "__main__":
    main()
