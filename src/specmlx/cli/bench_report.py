"""What `specmlx bench` prints of its figures."""

from collections.abc import Iterator
from textwrap import indent
from typing import Any

from specmlx.cli.tables import table
from specmlx.evaluation.bench import Spread

FIGURES = (("tps", 1), ("ratio", 2))
# Turns below which a spread says nothing.
_FEWEST = 3


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The machine, a table a suite, and what the figures are worth."""
    machine, versions = report["machine"], report["versions"]
    yield f"{machine['chip']}, {machine['system']}, {machine['backend']}; " + ", ".join(
        f"{name} {number}" for name, number in versions.items()
    )
    drafter = report["draft_model"]
    yield (
        f"{report['model']['name']} with {drafter['kind']} (up to {drafter['width']} drafted tokens a pass), greedy, "
        f"up to {report['max_tokens']} tokens, {report['runs']} turns of ABBA; median (quartiles)"
    )
    for name, rows in report["suites"].items():
        yield ""
        yield f"{name}: {rows[0]['answers']} answers a mode, time to first token {rows[0]['ttft']['median']:.3f} s"
        shown = [
            ("width", "tokens per pass", "plain rounds", "decode tok/s", "× plain", "end to end tok/s", "× plain", "")
        ]
        for row in rows:
            speeds = [
                _spread(row[f"{of}_{what}"], digits) for of in ("decode", "end_to_end") for what, digits in FIGURES
            ]
            shown.append(
                (row["mode"], f"{row['acceptance_length']:.2f}", f"{row['plain_rounds']:.0%}", *speeds, _doubt(row))
            )
        yield from indent(table(shown), "  ").splitlines()
        full = next((row for row in rows if row["mode"] == "full"), None)
        if full and full["acceptance"]:
            yield "  full: rounds by accepted tokens " + " ".join(map(str, full["accept_histogram"]))
            yield "  full: slots delivered " + " ".join(f"{share:.0%}" for share in full["acceptance"])
    yield ""
    if report["differing"]:
        count = sum(len(prompts) for prompts in report["differing"].values())
        yield f"The answers to {count} prompts differ between modes, so no speed-up is reported: see specmlx parity."
    else:
        yield "Every answer was the same in all modes."


def _spread(spread: dict[str, float] | None, digits: int) -> str:
    if spread is None:
        return "–"
    return f"{spread['median']:.{digits}f} ({spread['low']:.{digits}f}–{spread['high']:.{digits}f})"


def _doubt(row: dict[str, Any]) -> str:
    """Which ratios lie no further from 1 than their quartiles from one another, or are of too few turns to have any."""
    ratios = {"decode": row["decode_ratio"], "end to end": row["end_to_end_ratio"]}
    few = row["answers"] < 2 * _FEWEST
    found = [name for name, ratio in ratios.items() if ratio and (few or not Spread(**ratio).conclusive)]
    return f"inconclusive: {', '.join(found)}" if found else ""
