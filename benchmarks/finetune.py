"""What `--init` is worth on a fine-tune: `python benchmarks/finetune.py`.

The demo target learns a new kind of question by LoRA (mlx-lm's tuner), which is then fused into it. Three drafters
guess its answers: the demo's own, one trained from nothing, and one begun with the demo's, in a tenth of the steps.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import click
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from specmlx.demo.export import write_demo
from specmlx.evaluation.evaluation import Acceptance, evaluate
from specmlx.loading.load import load, load_drafter
from specmlx.targets.hybrid import Model
from specmlx.training.answers import Dialogue
from specmlx.training.batches import arrays
from specmlx.training.dataset import Row
from specmlx.training.geometry import KINDS, default_rate, drafter_config, mask_token
from specmlx.training.loop import Schedule, train
from specmlx.training.run import Run, Settings

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from make_demo.loss import next_token_loss  # noqa: E402
from make_demo.words import NAMES, WORDS  # noqa: E402

SHARE = 0.1
PROMPTS = 30


def questions(seed: str) -> Iterator[tuple[str, str]]:
    """A kind of question that the demo knows nothing of, and its answers."""
    rng = Random(seed)
    while True:
        name, words = rng.choice(NAMES), rng.sample(WORDS, rng.randint(5, 7))
        question = rng.choice(("{n} packs a bag: {w}.", "Please pack a bag for {n}: {w}.", "A bag for {n} with {w}?"))
        packed = "; then the ".join(words)
        yield question.format(n=name, w=", ".join(words)), f"First {name} packs the {packed}; last the bag is closed."


def tune(model: Model, tokenizer, steps: int, folder: Path) -> None:
    """Teach a target the new kind by LoRA on all its projections, and fuse it."""
    from mlx_lm.tuner.lora import LoRALinear
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model.freeze()
    linear_to_lora_layers(model, len(model.layers), {"rank": 8, "scale": 10.0, "dropout": 0.0})
    model.train()
    asked = questions("tune")

    def batch(step: int):
        dialogues = [_dialogue(tokenizer, *next(asked)) for _ in range(8)]
        return arrays(dialogues, 1, np.random.default_rng(step))[:2]

    for record in train(model, next_token_loss, batch, Schedule(2e-3, steps, warmup=20), folder, weight_decay=0.0):
        if record["step"] % 50 == 0:
            click.echo(f"LoRA, step {record['step']}: answers' tokens right {record['right']:.3f}", err=True)
    fused = [(name, m.fuse()) for name, m in model.named_modules() if isinstance(m, LoRALinear)]
    model.update_modules(tree_unflatten(fused))
    model.eval()


def _dialogue(tokenizer, question: str, answer: str) -> Dialogue:
    messages = [{"role": "user", "content": question}]
    start = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": answer}])
    return Dialogue(ids[: ids.index(tokenizer.eos_token_id, len(start)) + 1], len(start))


def tau(model: Model, tokenizer, drafter, rows: list[Row]) -> float:
    """Tokens a target pass on rows' prompts. Raises RuntimeError where a text differs from plain decoding's."""
    prompts, total = [row.ids(tokenizer) for row in rows], Acceptance()
    for _, found in evaluate(model, tokenizer, drafter, prompts, [""] * len(rows), max_tokens=96):
        total += found
    if total.identical != total.prompts:
        raise RuntimeError(f"{total.prompts - total.identical} texts differ from plain decoding's")
    return total.sums.acceptance_length


@click.command()
@click.option("--kind", type=click.Choice(KINDS), default="dspark", show_default=True)
@click.option("--tune-steps", default=150, show_default=True, help="LoRA steps of the target.")
@click.option("--steps", default=300, show_default=True, help="Of the drafter that is trained from nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(kind: str, tune_steps: int, steps: int, as_json: bool) -> None:
    """Print τ on a fine-tune's new kind of question: the demo's drafter, one from nothing, and one with --init."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo = write_demo(folder / "demo")
        model, tokenizer = load(str(demo), draft_model=None)
        tune(model, tokenizer, tune_steps, folder / "lora")
        mx.save_safetensors(str(demo / "model.safetensors"), dict(tree_flatten(model.parameters())))
        model, tokenizer = load(str(demo), draft_model=None)
        asked = questions("drafter")
        pairs = dict(next(asked) for _ in range(800))
        rows = [Row(({"role": "user", "content": question},)) for question in pairs]
        kept = [row for row in rows if row.held_out][:PROMPTS]
        found = {"demo's drafter": tau(model, tokenizer, load_drafter(str(demo / kind), model), kept)}
        fresh = Settings(
            drafter_config(model.config, kind, mask_token(tokenizer, model.vocab_size)),
            steps,
            learning_rate=default_rate(model.config.hidden_size),
            max_tokens=96,
        )
        short = round(SHARE * steps)
        begun = Settings(
            json.loads((demo / kind / "config.json").read_text()),
            short,
            init=str(demo / kind),
            learning_rate=fresh.learning_rate,
            warmup=max(1, short // 5),
            max_tokens=96,
        )
        for name, settings in ((f"from nothing, {steps} steps", fresh), (f"--init, {short} steps", begun)):
            run = Run(model, tokenizer, rows, settings, folder / name)
            for record in run.steps():
                click.echo(f"{name}: step {record['step']}, loss {record['loss']:.3f}, τ {record['tau']:.2f}", err=True)
            found[name] = tau(model, tokenizer, run.drafter, kept)
    before, nothing, init = found.values()
    recovered = (init - before) / (nothing - before)
    if as_json:
        click.echo(json.dumps({"kind": kind, "tau": found, "recovered": recovered}))
        return
    for name, value in found.items():
        click.echo(f"{name:<28} τ {value:.2f}")
    click.echo(f"--init recovers {recovered:.0%} of the gap; every text as plain decoding gives it")


if __name__ == "__main__":
    main()
