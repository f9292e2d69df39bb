"""What `specmlx bench` prints of its figures."""

from collections.abc import Iterator
from typing import Any

# Turns below which a spread tells nothing.
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
        heads = ("decode tok/s", "× plain", "end to end tok/s", "× plain")
        yield "  width        τ  plain rounds {:>20} {:>18} {:>20} {:>18}".format(*heads)
        for row in rows:
            yield (
                f"  {row['mode']:<7} {row['acceptance_length']:>6.2f} {row['plain_rounds']:>13.0%} "
                f"{_spread(row['decode_tps'], 1):>20} {_ratio(row['decode_ratio']):>18} "
                f"{_spread(row['end_to_end_tps'], 1):>20} {_ratio(row['end_to_end_ratio']):>18}"
                f"{_doubt(row)}"
            )
        full = next((row for row in rows if row["mode"] == "full"), None)
        if full and full["acceptance"]:
            yield "  full: rounds by accepted tokens " + " ".join(map(str, full["accept_histogram"]))
            yield "  full: slots delivered " + " ".join(f"{share:.0%}" for share in full["acceptance"])
    yield ""
    if report["differing"]:
        count = sum(len(prompts) for prompts in report["differing"].values())
        yield f"The answers to {count} prompts differ between modes, so no speed-up is told: see specmlx parity."
    else:
        yield "Every answer was the same in all modes."


def _spread(spread: dict[str, float], digits: int) -> str:
    return f"{spread['median']:.{digits}f} ({spread['low']:.{digits}f}–{spread['high']:.{digits}f})"


def _ratio(spread: dict[str, float] | None) -> str:
    return "–" if spread is None else _spread(spread, 2)


def _doubt(row: dict[str, Any]) -> str:
    """Which ratios lie no further from 1 than their quartiles from one another, or are of too few turns to have any."""
    ratios = {"decode": row["decode_ratio"], "end to end": row["end_to_end_ratio"]}
    few = row["answers"] < 2 * _FEWEST
    found = [name for name, r in ratios.items() if r and (few or abs(r["median"] - 1) <= r["high"] - r["low"])]
    return f"  inconclusive: {', '.join(found)}" if found else ""
