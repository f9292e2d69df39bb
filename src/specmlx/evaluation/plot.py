"""Byte limits over the tokens per pass, the speeds of a benchmark, the course of a training. Needs matplotlib."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specmlx.evaluation.bench import Row
from specmlx.evaluation.chips import Chip
from specmlx.evaluation.roofline import Roofline
from specmlx.formats.atomic import check_folder

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raises ValueError for a file that is neither PNG nor SVG or has no folder, and where matplotlib is missing."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--plot {path}: the file's name must end in {' or '.join(SUFFIXES)}")
    check_folder("--plot", path)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'specmlx[plot]'") from None


@contextlib.contextmanager
def _axes(path: Path, title: str, height: float) -> Iterator[Any]:
    """Axes to draw into; the figure is written at the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.add_subplot()
    yield axes
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=150)


def plot_ceilings(
    line: Roofline,
    path: Path,
    chips: Sequence[Chip],
    context: int = 0,
    points: Sequence[tuple[float, float]] = (),
    title: str = "",
) -> None:
    """Write the byte limits of chips for 1 to the round's rows tokens per pass; `points` are (tok/s, tokens)."""
    with _axes(path, title, 5.5) as axes:
        taus = [1.0, float(max(line.rows, 2))]
        # Chips of one bandwidth have one line.
        for i, bandwidth in enumerate(sorted({chip.bandwidth for chip in chips}, reverse=True)):
            names = ", ".join(chip.name for chip in chips if chip.bandwidth == bandwidth)
            limits = [line.ceiling(bandwidth, tau, context) for tau in taus]
            label = f"{names} {bandwidth:g} GB/s".strip()
            axes.plot(taus, limits, label=label, linewidth=1.2, linestyle="-" if i < 10 else "--")
        for speed, tau in points:
            axes.plot([tau], [speed], "ko", markersize=5)
            axes.annotate(f"{speed:g} tok/s", (tau, speed), textcoords="offset points", xytext=(6, -4), fontsize=8)
        axes.set(xlabel="tokens per pass", ylabel="tok/s, at most (byte limit)", xlim=taus)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def plot_speeds(suites: Mapping[str, Sequence[Row]], path: Path, title: str = "") -> None:
    """Write the decoding speed of each mode by suite, with quartiles; ratios above the bars where there are any."""
    modes = [row.mode for row in next(iter(suites.values()))]
    with _axes(path, title, 4.5) as axes:
        for i, mode in enumerate(modes):
            at = [x + (i - (len(modes) - 1) / 2) * 0.27 for x in range(len(suites))]
            rows = [next(row for row in rows if row.mode == mode) for rows in suites.values()]
            tps = [row.decode_tps for row in rows]
            errors = [[each.median - each.low for each in tps], [each.high - each.median for each in tps]]
            axes.bar(at, [each.median for each in tps], 0.25, yerr=errors, capsize=2, label=mode)
            for x, row in zip(at, rows, strict=True):
                if row.decode_ratio is not None:
                    axes.annotate(f"{row.decode_ratio.median:.2f}×", (x, row.decode_tps.high), ha="center", fontsize=7)
        axes.set_xticks(range(len(suites)), list(suites))
        axes.set_ylabel("tok/s, decoding")
        axes.legend(fontsize=8)


def plot_training(log: Path, path: Path) -> None:
    """Write loss and tokens per pass by step, from the log of a training."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    with _axes(path, "", 4) as loss:
        loss.set(xlabel="step", ylabel="loss")
        tau = loss.twinx()
        tau.set_ylabel("tokens per pass")
        for axes, name, style, label in (
            (loss, "loss", "C0-", "loss"),
            (tau, "tau", "C1-", "tokens per pass on the batch"),
            (tau, "held_out_tau", "C2o-", "on held-out rows"),
        ):
            measured = [record for record in records if name in record]
            steps, values = ([record[key] for record in measured] for key in ("step", name))
            axes.plot(steps, values, style, label=label)
        loss.figure.legend(loc="outside upper center", ncols=3, frameon=False)
