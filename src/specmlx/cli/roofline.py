"""`specmlx roofline`: bytes of a round, and the speed that a bandwidth allows at most."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specmlx.cli.options import DEMO
from specmlx.cli.terminal import answers, say

if TYPE_CHECKING:
    from specmlx.receipts.chips import Chip
    from specmlx.receipts.roofline import Roofline

EPILOG = """\b
Examples:
  specmlx roofline --weights affine-4 --kv int8 --bandwidth M5-Pro --tau 4.8 --claim 74
  specmlx roofline --weights modelopt-nvfp4 --draft-kind dspark --context 32K --bandwidth 614.4
"""


KV = ("bf16", "fp16", "fp32", "int8")


class Context(click.ParamType):
    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """32768, or 32K for 32 × 1,024."""
        found = re.fullmatch(r"(\d+)([kK]?)", str(value))
        if not found:
            self.fail(f"{value!r} is no number of tokens like 4096 or 32K.", param, ctx)
        return int(found[1]) * (1024 if found[2] else 1)


class Claimed(click.ParamType):
    name = "claim"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, float | None]:
        """74, or 74@4.8 with its own acceptance length."""
        speed, _, tau = str(value).partition("@")
        try:
            found = float(speed), float(tau) if tau else None
        except ValueError:
            self.fail(f"{value!r} is no speed like 74, or 74@4.8 with its τ.", param, ctx)
        if not 0 < found[0] < float("inf"):
            self.fail(f"{value!r}: a speed is above 0 tok/s.", param, ctx)
        return found


def _bandwidth(ctx: click.Context, param: click.Parameter, value: str | None) -> "tuple[float, Chip | None] | None":
    from specmlx.receipts.chips import chip_named

    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        chip = chip_named(value)
        return chip.bandwidth, chip
    if not 0 < number < float("inf"):
        raise click.BadParameter(f"{value}: it must be above 0 GB/s.")
    return number, None


@click.command(short_help="Bytes of a round, and the fastest that a bandwidth allows.", epilog=EPILOG)
@click.option(
    "--model",
    default="qwen3.8-27b",
    show_default=True,
    metavar="NAME_OR_PATH",
    help="A built-in geometry, a config.json, a checkpoint directory, a Hub id, or demo.",
)
@click.option(
    "--weights",
    metavar="FORMAT",
    help="affine-4 (or affine-BITS-GROUP), modelopt-nvfp4, nvfp4, mxfp4, mxfp8, fp8, bf16 …; default: the files' own.",
)
@click.option(
    "--draft-kind",
    type=click.Choice(["dflash", "dflash2", "dspark", "none"]),
    help="A drafter of the published shape; default: dflash2 for a built-in geometry, else none.",
)
@click.option(
    "--draft-model", metavar="PATH_OR_ID", help="A drafter whose config.json gives the shape, instead of --draft-kind."
)
@click.option("--width", type=click.IntRange(min=0), metavar="N", help="Drafted tokens verified; default: all.")
@click.option(
    "--kv", metavar="FORMAT", default="bf16", show_default=True, help="Of the KV cache: bf16, int8, affine-4 …"
)
@click.option("--context", type=Context(), metavar="N", help="Tokens in the KV cache, like 4096 or 32K; default: none.")
@click.option("--lanes", type=click.IntRange(min=1), default=1, show_default=True, help="Conversations at once.")
@click.option("--bandwidth", metavar="GB/s|CHIP", callback=_bandwidth, help="Default: all chips of the table.")
@click.option("--tau", type=float, metavar="X", help="Acceptance length: tokens a round.")
@click.option("--claim", type=Claimed(), multiple=True, metavar="TOK/S[@TAU]", help="What it implies; may be repeated.")
@click.option(
    "--layout",
    type=click.Choice(["tensors", "splash"]),
    help="splash pads as that engine packs; default: splash for a built-in geometry in affine formats.",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="PNG or SVG of the limits."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def roofline(
    model: str,
    weights: str | None,
    draft_kind: str | None,
    draft_model: str | None,
    width: int | None,
    kv: str,
    context: int | None,
    lanes: int,
    bandwidth: "tuple[float, Chip | None] | None",
    tau: float | None,
    claim: tuple[tuple[float, float | None], ...],
    layout: str | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Account a round's bytes from shapes and formats: no time is measured, and nothing but a config.json is read.

    Prints each group of tensors with its bytes and how often a round reads it, the round's bytes, and the most tokens
    per second that a bandwidth allows for an acceptance length τ. With --claim, what a claimed speed implies.
    """
    from specmlx.cli import roofline_report

    if draft_kind and draft_model:
        raise click.UsageError("--draft-kind and --draft-model can't go together.")
    line = _roofline(model, weights, draft_kind, draft_model, width, kv, lanes, layout)
    question = roofline_report.Question(line, model, context, tau, bandwidth, _claims(line, tau, claim))
    if plot is not None:
        from specmlx.receipts.plot import check_plot, plot_ceilings

        check_plot(plot)
    with answers() as out:
        if plot is not None:
            plot_ceilings(line, plot, question.chips(), context or 0, question.claims, roofline_report.title(question))
        text = json.dumps(roofline_report.as_object(question)) if as_json else roofline_report.text(question)
        say(text, out)


def _roofline(
    model: str,
    weights: str | None,
    draft_kind: str | None,
    draft_model: str | None,
    width: int | None,
    kv: str,
    lanes: int,
    layout: str | None,
) -> "Roofline":
    from specmlx.receipts.geometry import TARGETS, drafter_geometry, published_drafter, stored_format, target_geometry
    from specmlx.receipts.roofline import Roofline
    from specmlx.receipts.tensors import scheme_named

    config, files = target_geometry(model)
    built_in = model.lower() in TARGETS
    if weights is None:
        weights = "affine-4" if files is None else stored_format(files)
        # The demo's files are float16, and loaded as float32.
        weights = "fp32" if model == DEMO else weights
    scheme = scheme_named(weights)
    if kv not in KV and not kv.startswith("affine-"):
        raise click.BadParameter(f"{kv!r}: it can be {', '.join(KV)} or affine-BITS.", param_hint="--kv")
    kind = draft_kind or ("dflash2" if built_in else "none")
    if draft_model is not None:
        draft = drafter_geometry(draft_model)
    else:
        draft = None if kind == "none" else published_drafter(kind, config)
    if draft and draft.hidden_size != config.hidden_size:
        raise ValueError(f"hidden size: the drafter's is {draft.hidden_size}, the target's {config.hidden_size}")
    most = draft.max_width if draft else 0
    if (width or 0) > most:
        raise click.BadParameter(f"{width}: this drafter proposes 0 to {most}.", param_hint="--width")
    if width == 0:
        # Plain decoding: no drafter runs.
        draft = None
    packed = built_in and scheme.name.startswith("affine")
    splash = packed if layout is None else layout == "splash"
    return Roofline(config, scheme, draft, kv, lanes, splash, width)


def _claims(
    line: "Roofline", tau: float | None, claims: tuple[tuple[float, float | None], ...]
) -> list[tuple[float, float]]:
    from specmlx.receipts.roofline import check_tau

    if tau is not None:
        check_tau(tau, line.rows)
    found = []
    for speed, own in claims:
        own = (tau if line.draft else 1.0) if own is None else own
        if own is None:
            raise click.UsageError(
                f"--claim {speed:g} needs its acceptance length: pass --tau, or --claim {speed:g}@4.8."
            )
        check_tau(own, line.rows)
        found.append((speed, own))
    return found
