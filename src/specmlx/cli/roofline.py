"""`specmlx roofline`: bytes of a round, and the speed that a bandwidth allows at most."""

import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from specmlx.cli.flags import command, report
from specmlx.cli.options import DEMO, JSON, plot_option
from specmlx.cli.tables import table
from specmlx.evaluation.chips import CHIPS, Chip, chip_named
from specmlx.formats.values import option

KV = ("bf16", "fp16", "fp32", "int8")
# The context at which text shows a round where none is given.
LONG = 32768
DRAFT = (
    "kind hidden_size intermediate_size vocab_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "block_size selector_rank conv_kernel_size conv_group_size markov_rank"
).split()


def _context(value: str) -> int:
    """32768, or 32K for 32 × 1,024."""
    if not (found := re.fullmatch(r"(\d+)([kK]?)", value)):
        raise click.BadParameter(f"{value!r} is no number of tokens like 4096 or 32K.")
    return int(found[1]) * (1024 if found[2] else 1)


def _claim(value: str) -> tuple[float, float | None]:
    """74, or 74@4.8 with its own tokens per pass."""
    speed, _, tau = value.partition("@")
    try:
        claim = float(speed), float(tau) if tau else None
    except ValueError:
        raise click.BadParameter(f"{value!r} is no speed like 74, or 74@4.8 with its tokens per pass.") from None
    if not 0 < claim[0] < math.inf:
        raise click.BadParameter(f"{value!r}: a speed is above 0 tok/s.")
    return claim


def _chips(value: str) -> tuple[Chip, ...]:
    """The named chip, or a nameless one of the given bandwidth."""
    try:
        chip = Chip("", float(value), 0) if re.match(r"[-+.\d]|nan|inf", value) else chip_named(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None
    if not 0 < chip.bandwidth < math.inf:
        raise click.BadParameter(f"{value}: it must be above 0 GB/s.")
    return (chip,)


@command(JSON)
class Roofline:
    """Account a round's bytes from shapes and formats: no time is measured, and nothing but a config.json is read.

    Prints each group of tensors with its bytes and how often a round reads it, the round's bytes, and the most tokens
    per second that a bandwidth allows for a number of tokens per pass. With --claim, what a claimed speed implies.

    \b
    Examples:
      specmlx roofline --weights affine-4 --kv int8 --bandwidth M5-Pro --tau 4.8 --claim 74
      specmlx roofline --weights modelopt-nvfp4 --draft-kind dspark --context 32K --bandwidth 614.4
    """

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
        type=("dflash", "dflash2", "dspark", "none"),
    )
    draft_model: str | None = option(
        None, "A drafter whose config.json gives the shape, instead of --draft-kind.", metavar="PATH_OR_ID"
    )
    width: int | None = option(None, "Drafted tokens verified; default: all.", least=0, metavar="N")
    kv: str = option("bf16", "Format of the KV cache: bf16, int8, affine-4 …", metavar="FORMAT")
    context: int = option(
        "0", "Tokens in the KV cache, like 4096 or 32K; default: none.", type=_context, metavar="N", show_default=False
    )
    lanes: int = option(1, "Conversations at once.", least=1)
    bandwidth: tuple[Chip, ...] | None = option(
        None, "Default: all chips of the table.", type=_chips, metavar="GB/s|CHIP"
    )
    tau: float | None = option(None, "Tokens per pass.", metavar="X")
    claim: tuple[Any, ...] = option((), "What this speed implies; may be repeated.", type=_claim, metavar="TOK/S[@TAU]")
    layout: str | None = option(
        None,
        "splash pads as that engine packs; default: splash for a built-in geometry in affine formats.",
        type=("tensors", "splash"),
    )
    plot: Path | None = plot_option("PNG or SVG of the limits.")

    def run(self) -> None:
        line = self._line()
        claims = self._claims(line)
        found = self._object(line, claims)
        if self.plot is not None:
            from specmlx.evaluation.plot import plot_ceilings

            plot_ceilings(line, self.plot, self.chips, self.context, claims, _title(found))
        report(found, self._lines(line, found))

    @property
    def chips(self) -> tuple[Chip, ...]:
        return self.bandwidth or CHIPS

    def _line(self) -> Any:
        """The round. Raises ValueError for what can't be read or does not fit."""
        from specmlx.evaluation import geometry
        from specmlx.evaluation.roofline import Roofline
        from specmlx.evaluation.tensors import scheme_named

        config, files = geometry.target_geometry(self.model)
        built_in = self.model.lower() in geometry.TARGETS
        # The demo's files are float16, and loaded as float32.
        stored = "fp32" if self.model == DEMO else "affine-4" if files is None else None
        scheme = scheme_named(self.weights or stored or geometry.stored_format(files))
        if self.kv not in KV and not self.kv.startswith("affine-"):
            raise click.BadParameter(f"{self.kv!r}: it can be {', '.join(KV)} or affine-BITS.", param_hint="--kv")
        if self.draft_kind and self.draft_model:
            raise click.UsageError("--draft-kind and --draft-model can't go together.")
        draft, kind = None, self.draft_kind or ("dflash2" if built_in else "none")
        if self.draft_model is not None:
            draft = geometry.drafter_geometry(self.draft_model)
        elif kind != "none":
            draft = geometry.published_drafter(kind, config)
        if draft and draft.hidden_size != config.hidden_size:
            raise ValueError(f"hidden size: the drafter's is {draft.hidden_size}, the target's {config.hidden_size}")
        most = draft.max_width if draft else 0
        if (self.width or 0) > most:
            raise click.BadParameter(f"{self.width}: this drafter proposes 0 to {most}.", param_hint="--width")
        packed = built_in and scheme.name.startswith("affine")
        splash = packed if self.layout is None else self.layout == "splash"
        # At width 0 no drafter runs.
        return Roofline(config, scheme, None if self.width == 0 else draft, self.kv, self.lanes, splash, self.width)

    def _claims(self, line: Any) -> list[tuple[float, float]]:
        """Each claimed speed with its tokens per pass. Raises ValueError for those that a round can't have."""
        found = []
        for speed, own in self.claim:
            tau = own if own is not None else self.tau if line.draft else 1.0
            if tau is None:
                how = f"pass --tau, or --claim {speed:g}@4.8"
                raise click.UsageError(f"--claim {speed:g} needs its tokens per pass: {how}.")
            found.append((speed, tau))
        for tau in (*([] if self.tau is None else [self.tau]), *(tau for _, tau in found)):
            line.check_tau(tau)
        return found

    def _object(self, line: Any, claims: list[tuple[float, float]]) -> dict[str, Any]:
        """Everything, for `--json`; bytes are whole numbers."""
        draft, names, claimed = line.draft, ("label", "kind", "shape", "parameters", "nbytes", "reads"), []
        for speed, tau in claims:
            for chip in self.chips:
                claim = line.claim(speed, tau, chip.bandwidth, self.context)
                share = {"share": claim.share, "impossible": claim.impossible}
                claimed.append(asdict(claim) | {"chip": chip.name or None} | share)
        return {
            "model": self.model,
            "weights": line.scheme.name,
            "layout": "splash" if line.splash else "tensors",
            "draft": draft and {n: getattr(draft, n) for n in DRAFT} | {"taps": len(draft.target_layer_ids)},
            "rows": line.rows,
            "lanes": line.lanes,
            "context": self.context,
            "target": [{name: getattr(group, name) for name in names} for group in line.target],
            "drafter": [{name: getattr(group, name) for name in names} for group in line.drafter],
            "target_parameters": sum(group.parameters for group in line.target),
            "target_nbytes": sum(group.nbytes for group in line.target),
            "kv": line.kv,
            "kv_token_bytes": line.kv_token_bytes,
            "state_bytes": line.state.nbytes,
            "round_bytes": line.round_bytes(self.context),
            "round_bytes_without_draft": line.round_bytes(self.context, drafting=False),
            "multiply_adds": line.multiply_adds(),
            "limits": [self._limit(line, chip) for chip in self.chips],
            "claims": claimed,
        }

    def _limit(self, line: Any, chip: Chip) -> dict[str, Any]:
        """The limits of a chip, by the given tokens per pass or all whole ones; without a drafter by none."""
        taus = [float(n + 1) for n in range(line.rows)] if self.tau is None else [self.tau]
        by_tau = []
        for tau in taus if line.draft else []:
            limit = line.ceiling(chip.bandwidth, tau, self.context)
            by_tau.append({"tau": tau, "byte_limit": limit, "arithmetic_limit": line.arithmetic_limit(chip, tau)})
        plain = line.ceiling(chip.bandwidth, 1.0, self.context, drafting=False)
        name = {"chip": chip.name or None, "bandwidth": chip.bandwidth}
        return name | {"byte_limit_without_draft": plain, "by_tau": by_tau}

    def _lines(self, line: Any, found: dict[str, Any]) -> Iterator[str]:
        """Tables of bytes, then the limits, then the claims."""
        from specmlx.cli.roofline_tables import lane_table, round_lines, tokens, weight_tables

        context = self.context or LONG
        yield _title(found)
        for rows in (*weight_tables(line), lane_table(line, context)):
            yield f"\n{table(rows)}"
        yield f"\n{round_lines(line, context)}"
        where = f"{tokens(self.context)} tokens of context" if self.context else "short prompt"
        yield (
            f"\nByte limit in tok/s, {where}: bandwidth / bytes × tokens per pass, every weight read once a round "
            "whatever its rows."
        )
        if line.draft:
            yield (
                f"Beside it the arithmetic limit of {line.rows} rows: {line.multiply_adds() / 1e12:.3f} T "
                "multiply-adds a round against cores × 128 × clock\n(from public figures; decoding the weights comes "
                "on top). The tensor units of M5 lift it."
            )
        yield table(_limits(found["limits"]))
        if self.tau is not None and (slots := line.rows - 1):
            share = f"{self.tau:.2f} = 1 + {slots} × {(self.tau - 1) / slots:.3f}"
            yield f"{share} tokens per pass: that share of the drafted tokens accepted."
        if found["claims"]:
            yield f"\n{_claimed(found)}"


def _title(found: dict[str, Any]) -> str:
    draft = f"{found['draft']['kind']} draft, {found['rows']} rows a round" if found["draft"] else "no draft"
    lanes = "" if found["lanes"] == 1 else f", {found['lanes']} lanes"
    return f"{found['model']}, {found['weights']}, {draft}, KV {found['kv']}{lanes}"


def _limits(limits: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A row a chip, the arithmetic limit beside the byte limit of the most tokens per pass."""
    taus = (f"at {each['tau']:.2f}" for each in limits[0]["by_tau"])
    yield "chip", "GB/s", "no draft", *taus, "arithmetic", "of byte limit"
    for limit in limits:
        arithmetic = ("", "")
        for last in limit["by_tau"][-1:]:
            arithmetic = ("tensor units" if limit["chip"] else "name a chip", "")
            if by_alus := last["arithmetic_limit"]:
                arithmetic = f"{by_alus:.1f}", f"{100 * by_alus / last['byte_limit']:.0f} %"
        speeds = (limit["byte_limit_without_draft"], *(each["byte_limit"] for each in limit["by_tau"]))
        yield limit["chip"] or "given", f"{limit['bandwidth']:g}", *(f"{speed:.1f}" for speed in speeds), *arithmetic


def _claimed(found: dict[str, Any]) -> str:
    """One chip has its share behind each claim, several have a table."""
    chips, total = len(found["limits"]), " aggregate" if found["lanes"] > 1 else ""
    of_chip, lines = [found["claims"][i::chips] for i in range(chips)], []
    for claim in of_chip[0]:
        of_bus = ""
        if chips == 1:
            chip = f" ({claim['chip']})" if claim["chip"] else ""
            impossible = ": impossible" if claim["impossible"] else ""
            of_bus = f": {100 * claim['share']:.0f} % of {claim['bandwidth']:g} GB/s{chip}{impossible}"
        lines.append(
            f"{claim['tokens_per_second']:g} tok/s{total} at {claim['tau']:.2f} tokens per pass is "
            f"{claim['bytes_per_second'] / 1e9:.0f} GB/s{of_bus}"
        )
    if chips > 1:
        claims = (f"{claim['tokens_per_second']:g} at {claim['tau']:.2f}" for claim in of_chip[0])
        rows = [("share of the bus", "GB/s", *claims)]
        for each in of_chip:
            shares = (f"{100 * claim['share']:.0f} %{' impossible' if claim['impossible'] else ''}" for claim in each)
            rows.append((each[0]["chip"], f"{each[0]['bandwidth']:g}", *shares))
        lines.append(table(rows))
    return "\n".join(lines)
