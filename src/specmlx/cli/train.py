"""`specmlx train`: a drafter for the user's own model, from the model itself and a file of prompts."""

import signal
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from specmlx.cli.flags import command, like
from specmlx.cli.options import ModelFlags, plot_option
from specmlx.cli.template import TemplateFlags
from specmlx.cli.terminal import handled, note, show_status, status
from specmlx.formats.values import option
from specmlx.training.settings import Settings


def _ids(value: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r}: it must be layer numbers with commas between, like 1,8,15.") from None


@dataclass(frozen=True)
class ShapeFlags:
    """What a new drafter looks like; the fields are keywords of `geometry.drafter_config`."""

    block_size: int | None = option(None, "Rows that the drafter runs.  [default: 8]")
    layers: int | None = option(None, "Layers of the drafter; default: 5 if the target has 24 or more, else 2.")
    taps: tuple[int, ...] | None = option(
        None, "Target layers whose outputs it sees; default: spread.", type=_ids, metavar="I,J,…"
    )
    window: int | None = option(None, "Rows that it looks back; default: all.", metavar="N")
    mask_token_id: int | None = option(None, "A token that no text uses; default: found in the tokenizer.")


@command()
class Train:
    """Train a drafter: the target answers the prompts itself, and the drafter learns to guess its answers.

    \b
    Examples:
      specmlx train --model my-fine-tune --data prompts.jsonl --kind dspark --out my-drafter --steps 2000
      specmlx generate --model my-fine-tune --draft-model my-drafter --prompt "…"
    """

    target: ModelFlags
    data: str = option(
        None, "JSONL: messages, prompt (completion), or text.", required=True, metavar="FILE|HUB_DATASET"
    )
    kind: str | None = option(
        None, "Kind of drafter; default: --init's, else dspark.", type=("dflash", "dflash2", "dspark")
    )
    init: str | None = option(
        None, "A drafter to begin with: the way for a fine-tune, or from dflash to dflash2.", metavar="PATH_OR_ID"
    )
    out: Path = option(None, "Folder for the drafter.", required=True, type=click.Path(path_type=Path, file_okay=False))
    steps: int | None = option(None, "Optimizer steps.  [default: 1000]", least=1)
    minutes: float | None = option(
        None,
        "As many steps as fit, at least 20, instead of --steps; decoding held-out prompts comes on top.",
        type=click.FloatRange(min=0, min_open=True),
    )
    resume: bool = option(False, "Go on with the training in --out.")
    shape: ShapeFlags
    learning: Settings = Settings({}, learning_rate=None)
    chat_template_config: dict[str, Any] | None = like(TemplateFlags, "chat_template_config")
    export: tuple[str, ...] = option(
        (),
        "Also write OUT/export-NAME in the form of another engine; may be repeated.",
        type=("zlab", "deepspec", "speculators"),
    )
    plot: Path | None = plot_option("Draw the curves to a .png or .svg.")

    def run(self) -> None:
        if self.steps and self.minutes:
            raise click.UsageError("--steps and --minutes can't go together.")
        from specmlx.training.dataset import find_rows

        rows = find_rows(self.data)
        model, tokenizer = self.target.load("none")
        from specmlx.training.card import finish
        from specmlx.training.geometry import default_rate
        from specmlx.training.run import Run

        config, init = self._config(model, tokenizer)
        count, rate = None if self.minutes else self.steps or 1000, self.learning.learning_rate
        settings = replace(
            self.learning,
            config=config,
            init=init,
            steps=count,
            minutes=self.minutes,
            warmup=min(50, max(1, count // 5)) if count else 50,
            learning_rate=default_rate(model.config.hidden_size) if rate is None else rate,
            chat_template_config=self.chat_template_config,
        )
        run = Run(model, tokenizer, rows, settings, self.out, self.resume, self.export)
        note(
            f"{run.drafter.config.kind} drafter, {run.parameters / 1e6:.2f} M parameters; "
            f"{len(run.learned)} rows to learn from, {len(run.kept)} held out; checkpoints in {run.folder}"
        )
        _learn(run)
        with status("decoding held-out prompts"):
            report = finish(run, sys.argv[1:], self.data, self.target.model)
        if self.plot:
            from specmlx.evaluation.plot import plot_training
            from specmlx.training.loop import LOG

            plot_training(run.folder / LOG, self.plot)
        if left_out := run.answers.left_out:
            note(f"not learned: {', '.join(f'{count} rows ({why})' for why, count in sorted(left_out.items()))}")
        note(report)

    def _config(self, model: Any, tokenizer: Any) -> tuple[dict[str, Any], str | None]:
        """The drafter's config.json, and where the one to begin with is. Raises UsageError for what can't be."""
        from specmlx.drafters.config import DFLASH, DFLASH2, DrafterConfig
        from specmlx.formats.checkpoint import read_config
        from specmlx.loading.resolve import resolve
        from specmlx.training.geometry import drafter_config, grown, mask_token

        given = {name: value for name, value in asdict(self.shape).items() if value is not None}
        if not self.init:
            if self.shape.mask_token_id is None:
                given["mask_token_id"] = mask_token(tokenizer, model.vocab_size)
            return drafter_config(model.config, self.kind or "dspark", **given), None
        for name in given:
            raise click.UsageError(f"--{name.replace('_', '-')} and --init can't go together: --init's stays.")
        path = resolve(self.init)
        config = read_config(path)
        own = DrafterConfig.from_dict(config)
        if (own.kind, self.kind) == (DFLASH, DFLASH2):
            config = grown(own)
        elif self.kind and own.kind != self.kind:
            raise click.UsageError(f"--init {self.init} is a {own.kind} drafter, not a {self.kind} one.")
        return config, str(path)


def _learn(run: Any) -> None:
    figures = ""

    def begin(step: int) -> None:
        if not figures:
            show_status(f"step {step}: the target answers its prompts, the drafter learns; figures every 10 steps")

    # SIGTERM ends a training as Ctrl-C does.
    with handled([signal.SIGTERM], signal.default_int_handler):
        try:
            for record in run.steps(begin):
                held_out = f", held-out τ {record['held_out_tau']:.2f}" if "held_out_tau" in record else ""
                figures = (
                    f"step {record['step']} of {record['of']}: loss {record['loss']:.4f}, τ {record['tau']:.2f}"
                    f"{held_out}, {record['tokens_per_second']:.0f} tokens/s, {record['peak_memory']:.2f} GB"
                )
                if held_out:
                    show_status("")
                    note(figures)
                show_status(figures)
        except KeyboardInterrupt:
            show_status("")
            note(f"Stopped. Go on with the same command and --resume (checkpoints are in {run.folder}).")
            raise
        except FloatingPointError as error:
            raise ValueError(f"{error}; a lower --learning-rate may help") from None
        finally:
            show_status("")
