"""`specmlx bench`: how fast plain and speculative decoding are on this machine, with what it takes to believe it."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import Any

import click

from specmlx.cli.flags import command, like, report, written
from specmlx.cli.options import DEMO, DRAFT_MODEL, JSON, PROMPTS, ModelFlags, RequestFlags, plot_option, prompt_lines
from specmlx.cli.tables import table
from specmlx.cli.template import TemplateFlags
from specmlx.cli.terminal import note
from specmlx.formats.values import option

WRONG = "always wrong"
# Turns below which a spread says nothing.
_FEWEST = 3


@command(JSON)
class Bench:
    """Answer the prompts of each suite greedily: plainly, with all that the drafter proposes, and with as much as is
    fastest, by turns (ABBA). Speed-ups are printed only if all answers are the same; the exit code is 1 if they aren't.
    The suites' prompts were written for specmlx, under its licence.

    \b
    Examples:
      specmlx bench --model demo --runs 3 --output bench.json
      specmlx bench --model owner/name --draft-model owner/drafter --suite code,math --plot bench.png
    """

    target: ModelFlags
    draft_model: str = DRAFT_MODEL
    suite: str | None = option(
        None,
        "Of code, math, chat, long, hopeless and demo. Default: code,math,chat,long; with the demo pair, demo.",
        metavar="NAME,…",
    )
    prompts: Path | None = PROMPTS
    template: TemplateFlags
    runs: int = option(3, "Turns; each answers twice.", least=1)
    max_tokens: int = like(RequestFlags, "max_tokens", 128)
    floor: float | None = option(None, "Exit code 1 where auto is not X times plain, end to end.", metavar="X")
    output: Path | None = option(None, "Write the JSON, too.", metavar="FILE", callback=written)
    plot: Path | None = plot_option("A picture: .png, .svg.")

    def run(self) -> bool:
        texts = self._texts()
        model, tokenizer = self.target.load(self.draft_model)
        if model.draft_model is None:
            raise ValueError(f"there is nothing to compare, since there is no drafter: {model.no_draft_reason}")
        found, rows = self._measure(model, tokenizer, texts)
        report(found, lines(found))
        if self.output is not None:
            self.output.write_text(json.dumps(found, indent=1))
        if self.plot is not None:
            from specmlx.evaluation.plot import plot_speeds

            plot_speeds(rows, self.plot, f"{found['model']['name']} on {found['machine']['chip']}")
        auto = {name: row.end_to_end_ratio for name, suite in rows.items() for row in suite if row.mode == "auto"}
        slow = [
            name for name, ratio in auto.items() if self.floor is not None and ratio and not ratio.median >= self.floor
        ]
        for name in slow:
            note(f"{name}: {auto[name].median:.3f} times plain decoding end to end, less than {self.floor:g}")
        return not (slow or found["differing"])

    def _texts(self) -> dict[str, list[str]]:
        """Prompts by suite. Raises ValueError for a name that there is not, and for an empty file."""
        from specmlx.evaluation.suites import suite

        if self.prompts is not None:
            if self.suite is not None:
                raise ValueError("--suite and --prompts: give one of them")
            return {self.prompts.name: prompt_lines(self.prompts)}
        names = self.suite or ("demo" if self.target.model == DEMO else "code,math,chat,long")
        return {name: list(suite(name)) for name in names.split(",")}

    def _measure(self, model: Any, tokenizer: Any, texts: dict[str, list[str]]) -> tuple[dict[str, Any], dict]:
        """The report, and its rows by suite."""
        import mlx.core as mx

        from specmlx.evaluation import bench
        from specmlx.evaluation.machine import this_machine, versions
        from specmlx.evaluation.suites import HOPELESS

        if HOPELESS in texts:
            texts[WRONG] = texts[HOPELESS][:2]
        drafter, measured = model.draft_model, {}
        answers = sum(len(prompts) for prompts in texts.values()) * self.runs * 6
        with click.progressbar(length=answers, label="answers", file=sys.stderr) as bar:
            for name, prompts in texts.items():
                measured[name] = bench.measure(
                    model,
                    tokenizer,
                    drafter,
                    [self.template.ids(tokenizer, text) for text in prompts],
                    runs=self.runs,
                    max_tokens=self.max_tokens,
                    progress=lambda: bar.update(1),
                    on_proposal=bench.AlwaysWrong(model.vocab_size) if name == WRONG else None,
                )
        rows = {name: bench.table(found) for name, found in measured.items()}
        everything = [turns for name, found in measured.items() if name != WRONG for turns in found]
        if len(rows) > 1:
            rows["all"] = bench.table(everything)
        wrong = {name: [texts[name][i] for i in bench.differing(found)] for name, found in measured.items()}
        found = {
            "machine": asdict(this_machine()),
            "versions": versions("mlx", "mlx-lm"),
            "model": {"name": self.target.model, "fingerprint": model.fingerprint},
            "draft_model": {
                "kind": type(drafter).__name__,
                "width": drafter.max_width,
                "fingerprint": getattr(drafter, "fingerprint", None),
            },
            "max_tokens": self.max_tokens,
            "runs": self.runs,
            "peak_memory_gb": mx.get_peak_memory() / 1e9,
            "differing": {name: prompts for name, prompts in wrong.items() if prompts},
            "suites": {name: [asdict(row) for row in found] for name, found in rows.items()},
        }
        return found, rows


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The machine, a table a suite, and what the figures are worth."""
    machine, drafter = report["machine"], report["draft_model"]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    yield f"{machine['chip']}, {machine['system']}, {machine['backend']}; {versions}"
    yield (
        f"{report['model']['name']} with {drafter['kind']} (up to {drafter['width']} drafted tokens a pass), greedy, "
        f"up to {report['max_tokens']} tokens, {report['runs']} turns of ABBA; median (quartiles)"
    )
    for name, rows in report["suites"].items():
        yield f"\n{name}: {rows[0]['answers']} answers a mode, time to first token {rows[0]['ttft']['median']:.3f} s"
        speeds = ("decode tok/s", "× plain", "end to end tok/s", "× plain")
        shown = [("width", "tokens per pass", "plain rounds", *speeds, "")]
        for row in rows:
            figures = [
                _spread(row[f"{of}_{what}"], digits)
                for of in ("decode", "end_to_end")
                for what, digits in (("tps", 1), ("ratio", 2))
            ]
            counts = f"{row['acceptance_length']:.2f}", f"{row['plain_rounds']:.0%}"
            shown.append((row["mode"], *counts, *figures, _doubt(row)))
        yield from indent(table(shown), "  ").splitlines()
        for row in rows:
            if row["mode"] == "full" and row["acceptance"]:
                yield "  full: rounds by accepted tokens " + " ".join(map(str, row["accept_histogram"]))
                yield "  full: slots delivered " + " ".join(f"{share:.0%}" for share in row["acceptance"])
    if report["differing"]:
        found = sum(len(prompts) for prompts in report["differing"].values())
        yield f"\nThe answers to {found} prompts differ between modes, so no speed-up is reported: see specmlx parity."
    else:
        yield "\nEvery answer was the same in all modes."


def _spread(spread: dict[str, float] | None, digits: int) -> str:
    if spread is None:
        return "–"
    return f"{spread['median']:.{digits}f} ({spread['low']:.{digits}f}–{spread['high']:.{digits}f})"


def _doubt(row: dict[str, Any]) -> str:
    """Which ratios lie no further from 1 than their quartiles from one another, or are of too few turns to have any."""
    from specmlx.evaluation.bench import Spread

    ratios = {"decode": row["decode_ratio"], "end to end": row["end_to_end_ratio"]}
    few = row["answers"] < 2 * _FEWEST
    found = [name for name, ratio in ratios.items() if ratio and (few or not Spread(**ratio).conclusive)]
    return f"inconclusive: {', '.join(found)}" if found else ""
