"""What lanes save: target passes and speed with 1, 2, 4 and 8 of them, beside mlx-lm's own batches.

`python benchmarks/batch.py` answers the same held-out questions of the demo in batches, in an order that turns from run
to run, and prints passes a token, the bytes of the target's weights that they read for each (every pass reads them
once, for all lanes), and the ratio of decoding speed to one lane of the same kind in the same run.
"""

import json
import platform
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path

import click
import mlx.core as mx
from mlx.utils import tree_flatten

from specmlx.demo.export import write_demo
from specmlx.demo.tasks import held_out_examples
from specmlx.generation.batch import batch_generate
from specmlx.loading.load import load, load_drafter

LANES = (1, 2, 4, 8)


class Ours:
    """specmlx on the exported demo target, with or without a drafter."""

    def __init__(self, path: Path, drafter: str | None, num_draft_tokens: str | None = None):
        self.model, self.tokenizer = load(str(path), draft_model=None)
        self.drafter = load_drafter(drafter, self.model) if drafter else None
        self.num_draft_tokens = num_draft_tokens

    def answer(self, prompts: list[list[int]], lanes: int, max_tokens: int):
        found = batch_generate(
            self.model,
            self.tokenizer,
            prompts,
            max_tokens=max_tokens,
            max_lanes=lanes,
            draft_model=self.drafter,
            num_draft_tokens=self.num_draft_tokens,
            return_token_ids=True,
        )
        return found.token_ids, found.stats.generation_tps, found.stats.passes / found.stats.generation_tokens


class Theirs:
    """mlx-lm's own batch_generate on the same files."""

    def __init__(self, path: Path):
        import mlx_lm

        self.model, self.tokenizer = mlx_lm.load(str(path))

    def answer(self, prompts: list[list[int]], lanes: int, max_tokens: int):
        from mlx_lm import batch_generate as their_batch

        sizes = dict(completion_batch_size=lanes, prefill_batch_size=lanes)
        found = their_batch(self.model, self.tokenizer, prompts, max_tokens=max_tokens, return_token_ids=True, **sizes)
        stats = found.stats
        return found.token_ids, stats.generation_tps, stats.generation_steps / stats.generation_tokens


@click.command()
@click.option("--questions", default=16, show_default=True, help="Held-out questions.")
@click.option("--runs", default=5, show_default=True, help="Runs after the warm-up.")
@click.option("--max-tokens", "-m", default=96, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(questions: int, runs: int, max_tokens: int, as_json: bool) -> None:
    """Print passes and speed of the demo pair by the number of lanes."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_demo(Path(folder) / "demo")
        drafting = {f"dspark, {width}": Ours(path, "demo/dspark", width) for width in ("full", "auto")}
        sides = {**drafting, "plain": Ours(path, None), "mlx-lm": Theirs(path)}
    tokenizer = sides["plain"].tokenizer
    examples = held_out_examples(2)[:: max(1, 30 // questions)][:questions]
    turns = ([{"role": "user", "content": example.question}] for example in examples)
    prompts = [tokenizer.apply_chat_template(turn, add_generation_prompt=True) for turn in turns]
    settings = [(name, lanes) for name in sides for lanes in LANES]
    speeds: dict = {setting: [] for setting in settings}
    passes, texts = {}, set()
    weights = sum(x.nbytes for _, x in tree_flatten(sides["plain"].model.parameters()))
    for run in range(runs + 1):
        for name, lanes in settings[run % len(settings) :] + settings[: run % len(settings)]:
            ids, speed, passes[name, lanes] = sides[name].answer(prompts, lanes, max_tokens)
            texts.add(json.dumps(ids))
            if run:  # The first run warms up.
                speeds[name, lanes].append(speed)
    rows = []
    for name, lanes in settings:
        ratios = [a / b for a, b in zip(speeds[name, lanes], speeds[name, 1], strict=True)]
        rows.append(
            {
                "decoding": name,
                "lanes": lanes,
                "passes_per_token": round(passes[name, lanes], 4),
                "weight_bytes_per_token": round(passes[name, lanes] * weights),
                "speed_to_one_lane": round(statistics.median(ratios), 2),
                "lowest": round(min(ratios), 2),
                "highest": round(max(ratios), 2),
                "tps": round(statistics.median(speeds[name, lanes]), 1),
            }
        )
    machine = {
        "machine": f"{platform.system()} {platform.machine()}, {mx.device_info().get('device_name', 'cpu')}",
        **{package: version(package) for package in ("mlx", "mlx-lm")},
    }
    if as_json:
        click.echo(json.dumps({"machine": machine, "same_text": len(texts) == 1, "rows": rows}))
        return
    click.echo(f"{machine}; {len(prompts)} questions, {runs} runs; the same text in all: {len(texts) == 1}")
    names = ("decoding", "lanes", "target passes a token", "its weights", "speed to one lane (lowest–highest)", "tok/s")
    click.echo(f"| {' | '.join(names)} |\n|---|---:|---:|---:|---:|---:|")
    for r in rows:
        megabytes = f"{r['weight_bytes_per_token'] / 1e6:.2f} MB"
        speed = f"{r['speed_to_one_lane']:.2f} ({r['lowest']:.2f}–{r['highest']:.2f})"
        columns = (r["decoding"], r["lanes"], f"{r['passes_per_token']:.3f}", megabytes, speed, f"{r['tps']:.0f}")
        click.echo(f"| {' | '.join(map(str, columns))} |")


if __name__ == "__main__":
    main()
