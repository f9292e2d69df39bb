"""`specmlx roofline`: bytes of a round, and the speed that a bandwidth allows at most."""

import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specmlx.cli.flags import grouped
from specmlx.cli.options import DEMO
from specmlx.cli.terminal import answers, say
from specmlx.formats.values import option

if TYPE_CHECKING:
    from specmlx.drafters.config import DrafterConfig
    from specmlx.evaluation.chips import Chip
    from specmlx.evaluation.roofline import Roofline
    from specmlx.targets.config import HybridConfig

EPILOG = """\b
Examples:
  specmlx roofline --weights affine-4 --kv int8 --bandwidth M5-Pro --tau 4.8 --claim 74
  specmlx roofline --weights modelopt-nvfp4 --draft-kind dspark --context 32K --bandwidth 614.4
"""
KV = ("bf16", "fp16", "fp32", "int8")


def _context(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """32768, or 32K for 32 × 1,024."""
    if value is None:
        return None
    if not (found := re.fullmatch(r"(\d+)([kK]?)", value)):
        raise click.BadParameter(f"{value!r} is no number of tokens like 4096 or 32K.")
    return int(found[1]) * (1024 if found[2] else 1)


def _claims(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[tuple[float, float | None]]:
    """74, or 74@4.8 with its own tokens per pass."""
    claims = []
    for value in values:
        speed, _, tau = value.partition("@")
        try:
            claims.append((float(speed), float(tau) if tau else None))
        except ValueError:
            raise click.BadParameter(f"{value!r} is no speed like 74, or 74@4.8 with its tokens per pass.") from None
        if not 0 < claims[-1][0] < math.inf:
            raise click.BadParameter(f"{value!r}: a speed is above 0 tok/s.")
    return claims


def _chips(ctx: click.Context, param: click.Parameter, value: str | None) -> "tuple[Chip, ...]":
    """The named chip, a nameless one of the given bandwidth, or the whole table."""
    from specmlx.evaluation.chips import CHIPS, Chip, chip_named

    if value is None:
        return CHIPS
    try:
        number = float(value)
    except ValueError:
        return (chip_named(value),)
    if not 0 < number < math.inf:
        raise click.BadParameter(f"{value}: it must be above 0 GB/s.")
    return (Chip("", number, 0),)


@dataclass(frozen=True)
class RooflineFlags:
    """Which round is accounted, and what is asked about it."""

    model: str = option(
        "qwen3.8-27b",
        "A built-in geometry, a config.json, a checkpoint directory, a Hub id, or demo.",
        metavar="NAME_OR_PATH",
    )
    weights: str | None = option(
        None,
        "affine-4 (or affine-BITS-GROUP), modelopt-nvfp4, nvfp4, mxfp4, mxfp8, fp8, bf16 …; default: the files' own.",
        metavar="FORMAT",
    )
    draft_kind: str | None = option(
        None,
        "A drafter of the published shape; default: dflash2 for a built-in geometry, else none.",
        type=click.Choice(["dflash", "dflash2", "dspark", "none"]),
    )
    draft_model: str | None = option(
        None, "A drafter whose config.json gives the shape, instead of --draft-kind.", metavar="PATH_OR_ID"
    )
    width: int | None = option(None, "Drafted tokens verified; default: all.", least=0, metavar="N")
    kv: str = option("bf16", "Of the KV cache: bf16, int8, affine-4 …", metavar="FORMAT")
    context: int | None = option(
        None, "Tokens in the KV cache, like 4096 or 32K; default: none.", type=str, callback=_context, metavar="N"
    )
    lanes: int = option(1, "Conversations at once.", least=1)
    bandwidth: "tuple[Chip, ...]" = option(
        None, "Default: all chips of the table.", callback=_chips, metavar="GB/s|CHIP"
    )
    tau: float | None = option(None, "Tokens per pass.", metavar="X")
    claim: list[tuple[float, float | None]] = option(
        None, "What it implies; may be repeated.", multiple=True, callback=_claims, metavar="TOK/S[@TAU]"
    )
    layout: str | None = option(
        None,
        "splash pads as that engine packs; default: splash for a built-in geometry in affine formats.",
        type=click.Choice(["tensors", "splash"]),
    )

    @cached_property
    def line(self) -> "Roofline":
        """The round. Raises ValueError for what can't be read or does not fit."""
        from specmlx.evaluation.geometry import TARGETS, stored_format, target_geometry
        from specmlx.evaluation.roofline import Roofline
        from specmlx.evaluation.tensors import scheme_named

        config, files = target_geometry(self.model)
        built_in = self.model.lower() in TARGETS
        # The demo's files are float16, and loaded as float32.
        stored = "fp32" if self.model == DEMO else "affine-4" if files is None else None
        scheme = scheme_named(self.weights or stored or stored_format(files))
        if self.kv not in KV and not self.kv.startswith("affine-"):
            raise click.BadParameter(f"{self.kv!r}: it can be {', '.join(KV)} or affine-BITS.", param_hint="--kv")
        draft = self._drafter(config, built_in)
        packed = built_in and scheme.name.startswith("affine")
        splash = packed if self.layout is None else self.layout == "splash"
        # At width 0 no drafter runs.
        return Roofline(config, scheme, None if self.width == 0 else draft, self.kv, self.lanes, splash, self.width)

    def _drafter(self, config: "HybridConfig", built_in: bool) -> "DrafterConfig | None":
        from specmlx.evaluation.geometry import drafter_geometry, published_drafter

        if self.draft_kind and self.draft_model:
            raise click.UsageError("--draft-kind and --draft-model can't go together.")
        kind = self.draft_kind or ("dflash2" if built_in else "none")
        if self.draft_model is not None:
            draft = drafter_geometry(self.draft_model)
        else:
            draft = None if kind == "none" else published_drafter(kind, config)
        if draft and draft.hidden_size != config.hidden_size:
            raise ValueError(f"hidden size: the drafter's is {draft.hidden_size}, the target's {config.hidden_size}")
        most = draft.max_width if draft else 0
        if (self.width or 0) > most:
            raise click.BadParameter(f"{self.width}: this drafter proposes 0 to {most}.", param_hint="--width")
        return draft

    @property
    def taus(self) -> list[float]:
        """The tokens per pass that are shown: the given ones, or all whole ones; none without a drafter."""
        if self.line.draft is None:
            return []
        return [float(tau) for tau in range(1, self.line.rows + 1)] if self.tau is None else [self.tau]

    @cached_property
    def claims(self) -> list[tuple[float, float]]:
        """Each claimed speed with its tokens per pass. Raises ValueError for those that a round can't have."""
        found = []
        for speed, own in self.claim:
            tau = own if own is not None else self.tau if self.line.draft else 1.0
            if tau is None:
                raise click.UsageError(
                    f"--claim {speed:g} needs its tokens per pass: pass --tau, or --claim {speed:g}@4.8."
                )
            found.append((speed, tau))
        for tau in (self.tau, *(tau for _, tau in found)):
            if tau is not None:
                self.line.check_tau(tau)
        return found


@click.command(short_help="Bytes of a round, and the fastest that a bandwidth allows.", epilog=EPILOG)
@grouped("flags", RooflineFlags)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="PNG or SVG of the limits."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def roofline(flags: RooflineFlags, plot: Path | None, as_json: bool) -> None:
    """Account a round's bytes from shapes and formats: no time is measured, and nothing but a config.json is read.

    Prints each group of tensors with its bytes and how often a round reads it, the round's bytes, and the most tokens
    per second that a bandwidth allows for a number of tokens per pass. With --claim, what a claimed speed implies.
    """
    from specmlx.cli import roofline_report

    claims = flags.claims
    if plot is not None:
        from specmlx.evaluation.plot import check_plot, plot_ceilings

        check_plot(plot)
    with answers() as out:
        if plot is not None:
            title = roofline_report.title(flags)
            plot_ceilings(flags.line, plot, flags.bandwidth, flags.context or 0, claims, title)
        say(json.dumps(roofline_report.as_object(flags)) if as_json else roofline_report.text(flags), out)
