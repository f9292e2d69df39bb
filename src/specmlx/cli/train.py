"""`specmlx train`: a drafter for the user's own model, from the model itself and a file of prompts."""

import signal
import sys
from pathlib import Path
from typing import Any

import click

from specmlx.cli import options
from specmlx.cli.flags import grouped, options_of
from specmlx.cli.terminal import handled, note, show_status, status
from specmlx.training.settings import Settings

KINDS = ("dflash", "dflash2", "dspark")
PACKAGINGS = ("zlab", "deepspec", "speculators")

MINUTES = "As many steps as fit, at least 20, instead of --steps; decoding held-out prompts comes on top."


def _ids(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    try:
        return None if value is None else tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r}: it must be layer numbers with commas between, like 1,8,15.") from None


@click.command(short_help="Train a drafter for a model.")
@grouped("target", options.ModelFlags)
@click.option(
    "--data", required=True, metavar="FILE|HUB_DATASET", help="JSONL: messages, prompt (completion), or text."
)
@click.option("--kind", type=click.Choice(KINDS), default=None, help="Kind of drafter; default: --init's, else dspark.")
@click.option(
    "--init", metavar="PATH_OR_ID", help="A drafter to begin with: the way for a fine-tune, or from dflash to dflash2."
)
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder for the drafter.")
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps.  [default: 1000]")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help=MINUTES)
@click.option("--resume", is_flag=True, help="Go on with the training in --out.")
@click.option("--block-size", type=int, help="Rows that the drafter runs.  [default: 8]")
@click.option("--layers", type=int, help="Of the drafter; default: 5 for targets of 24 and more, else 2.")
@click.option("--taps", callback=_ids, metavar="I,J,…", help="Target layers whose outputs it sees; default: spread.")
@click.option("--window", type=int, metavar="N", help="Rows that it looks back; default: all.")
@click.option("--mask-token-id", type=int, help="A token that no text uses; default: found in the tokenizer.")
@options_of(Settings, learning_rate=None)
@options_of(options.RequestFlags, "max_tokens", max_tokens=256)
@click.option("--seed", type=int, default=0, show_default=True)
@options_of(options.TemplateFlags, "chat_template_config")
@click.option(
    "--export",
    "exports",
    type=click.Choice(PACKAGINGS),
    multiple=True,
    help="Also write OUT/export-NAME in the form of another engine; may be repeated.",
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the curves to a .png or .svg.")
def train(
    target: options.ModelFlags,
    data: str,
    kind: str | None,
    init: str | None,
    out: Path,
    steps: int | None,
    minutes: float | None,
    resume: bool,
    exports: tuple[str, ...],
    plot: Path | None,
    **flags: Any,
) -> None:
    """Train a drafter: the target answers the prompts itself, and the drafter learns to guess its answers.

    \b
    specmlx train --model my-fine-tune --data prompts.jsonl --kind dspark --out my-drafter --steps 2000
    specmlx generate --model my-fine-tune --draft-model my-drafter --prompt "…"
    """
    if steps and minutes:
        raise click.UsageError("--steps and --minutes can't go together.")
    if plot:
        from specmlx.evaluation.plot import check_plot

        check_plot(plot)
    from specmlx.training.dataset import find_rows

    rows = find_rows(data)
    model, tokenizer = target.load("none")
    from specmlx.training.run import Run

    settings = _settings(model, tokenizer, kind, init, steps, minutes, flags)
    run = Run(model, tokenizer, rows, settings, out, resume, exports)
    note(
        f"{settings.kind} drafter, {run.parameters / 1e6:.2f} M parameters; {len(run.learned)} rows to learn from, "
        f"{len(run.kept)} held out; checkpoints in {run.folder}"
    )
    _learn(run)
    from specmlx.training.card import finish

    with status("decoding held-out prompts"):
        report = finish(run, sys.argv[1:], data, target.model)
    if plot:
        from specmlx.training.curves import draw

        draw(run.folder, plot)
    if left_out := run.answers.left_out:
        note(f"not learned: {', '.join(f'{count} rows ({why})' for why, count in sorted(left_out.items()))}")
    note(report)


def _settings(model: Any, tokenizer: Any, kind: str | None, init: str | None, steps, minutes, flags: dict):
    from specmlx.drafters.config import DFLASH, DFLASH2, DrafterConfig
    from specmlx.formats.checkpoint import read_config
    from specmlx.loading.resolve import resolve
    from specmlx.training.geometry import default_rate, drafter_config, grown, mask_token

    shape = {name: flags.pop(name) for name in ("block_size", "layers", "taps", "window")}
    mask = flags.pop("mask_token_id")
    if init:
        given = [name for name, value in {**shape, "mask_token_id": mask}.items() if value is not None]
        if given:
            raise click.UsageError(f"--{given[0].replace('_', '-')} and --init can't go together: --init's stays.")
        path = resolve(init)
        config = read_config(path)
        own = DrafterConfig.from_dict(config)
        if (own.kind, kind) == (DFLASH, DFLASH2):
            config = grown(own)
        elif kind and own.kind != kind:
            raise click.UsageError(f"--init {init} is a {own.kind} drafter, not a {kind} one.")
        init = str(path)
    else:
        mask = mask_token(tokenizer, model.vocab_size) if mask is None else mask
        config = drafter_config(model.config, kind or "dspark", mask, **shape)
    if flags["learning_rate"] is None:
        flags["learning_rate"] = default_rate(model.config.hidden_size)
    count = None if minutes else steps or 1000
    warmup = 50 if minutes else min(50, max(1, count // 5))
    return Settings(config=config, steps=count, minutes=minutes, init=init, warmup=warmup, **flags)


def _learn(run: Any) -> None:
    figures = ""

    def begin(step: int) -> None:
        if not figures:
            show_status(f"step {step}: the target answers its prompts, the drafter learns; figures every 10 steps")

    # SIGTERM ends a training as Ctrl-C does.
    with handled([signal.SIGTERM], signal.default_int_handler):
        try:
            for record in run.steps(begin):
                figures = _line(record)
                if "held_out_tau" in record:
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


def _line(record: dict) -> str:
    held_out = f", held-out τ {record['held_out_tau']:.2f}" if "held_out_tau" in record else ""
    return (
        f"step {record['step']} of {record['of']}: loss {record['loss']:.4f}, τ {record['tau']:.2f}{held_out}, "
        f"{record['tokens_per_second']:.0f} tokens/s, {record['peak_memory']:.2f} GB"
    )
