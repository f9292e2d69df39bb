"""`specmlx bench`: how fast plain and speculative decoding are on this machine, with what it takes to believe it."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from specmlx.cli import options
from specmlx.cli.flags import grouped, options_of
from specmlx.cli.terminal import answers, note, say
from specmlx.formats.atomic import check_folder

WRONG = "always wrong"
EPILOG = """\b
Examples:
  specmlx bench --model demo --runs 3 --output bench.json
  specmlx bench --model owner/name --draft-model owner/drafter --suite code,math --plot bench.png
"""


@click.command(short_help="Measure plain and speculative decoding by turns.", epilog=EPILOG)
@grouped("target", options.ModelFlags)
@options.draft_model_option
@click.option(
    "--suite",
    metavar="NAME,…",
    help="Of code, math, chat, long, hopeless and demo. Default: code,math,chat,long; with the demo pair, demo.",
)
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A file, one a line.")
@grouped("template", options.TemplateFlags)
@click.option("--runs", type=click.IntRange(min=1), default=3, show_default=True, help="Turns; each answers twice.")
@options_of(options.RequestFlags, "max_tokens", max_tokens=128)
@click.option("--floor", type=float, metavar="X", help="Exit code 1 where auto is not X times plain, end to end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the JSON, too.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="A picture: .png, .svg.")
def bench(
    target: options.ModelFlags,
    template: options.TemplateFlags,
    draft_model: str,
    suite: str | None,
    prompts: Path | None,
    runs: int,
    max_tokens: int,
    floor: float | None,
    as_json: bool,
    output: Path | None,
    plot: Path | None,
) -> None:
    """Answer the prompts of each suite greedily: plainly, with all that the drafter proposes, and with as much as is
    fastest, by turns (ABBA). Speed-ups are printed only if all answers are the same; the exit code is 1 if they aren't.
    The suites' prompts were written for specmlx, under its licence.
    """
    texts = _texts(target.model, suite, prompts)
    check_folder("--output", output)
    if plot is not None:
        from specmlx.evaluation.plot import check_plot

        check_plot(plot)
    with answers() as out:
        model, tokenizer = target.load(draft_model)
        if model.draft_model is None:
            raise ValueError(f"there is nothing to compare, since there is no drafter: {model.no_draft_reason}")
        report, rows = _run(target, model, tokenizer, template, texts, runs, max_tokens)
        if as_json:
            say(json.dumps(report), out)
        else:
            from specmlx.cli.bench_report import lines

            say("\n".join(lines(report)), out)
    if output is not None:
        output.write_text(json.dumps(report, indent=1))
    if plot is not None:
        from specmlx.evaluation.plot import plot_speeds

        plot_speeds(rows, plot, f"{report['model']['name']} on {report['machine']['chip']}")
    auto = {name: row.end_to_end_ratio for name, found in rows.items() for row in found if row.mode == "auto"}
    slow = [] if floor is None else [name for name, ratio in auto.items() if ratio and not ratio.median >= floor]
    for name in slow:
        note(f"{name}: {auto[name].median:.3f} times plain decoding end to end, less than {floor:g}")
    if slow or report["differing"]:
        sys.exit(1)


def _texts(model: str, suites: str | None, prompts: Path | None) -> dict[str, list[str]]:
    """Prompts by suite. Raises ValueError for a name that there is not, and for an empty file."""
    from specmlx.evaluation.suites import suite

    if prompts is not None:
        if suites is not None:
            raise ValueError("--suite and --prompts: give one of them")
        return {prompts.name: options.prompt_lines(prompts)}
    names = suites or ("demo" if model == "demo" else "code,math,chat,long")
    return {name: list(suite(name)) for name in names.split(",")}


def _run(target, model, tokenizer, template, texts, runs, max_tokens) -> tuple[dict[str, Any], dict[str, Any]]:
    from specmlx.evaluation.bench import AlwaysWrong, differing, measure, table
    from specmlx.evaluation.suites import HOPELESS

    instead: dict[str, Any] = {}
    if HOPELESS in texts:
        texts[WRONG] = texts[HOPELESS][:2]
        instead[WRONG] = AlwaysWrong(model.vocab_size)
    answers_in_all = sum(len(prompts) for prompts in texts.values()) * runs * 6
    measured, everything = {}, []
    with click.progressbar(length=answers_in_all, label="answers", file=sys.stderr) as bar:
        for name, prompts in texts.items():
            ids = [template.ids(tokenizer, text) for text in prompts]
            turns = dict(runs=runs, max_tokens=max_tokens, progress=lambda: bar.update(1))
            pair = model, tokenizer, model.draft_model
            measured[name] = measure(*pair, ids, on_proposal=instead.get(name), **turns)
            if name != WRONG:
                everything += measured[name]
    rows = {name: table(found) for name, found in measured.items()}
    if len(rows) > 1 and everything:
        rows["all"] = table(everything)
    wrong = {name: [texts[name][i] for i in differing(found)] for name, found in measured.items()}
    report = _environment(target, model, max_tokens, runs) | {
        "differing": {name: prompts for name, prompts in wrong.items() if prompts},
        "suites": {name: [asdict(row) for row in found] for name, found in rows.items()},
    }
    return report, rows


def _environment(target, model, max_tokens: int, runs: int) -> dict[str, Any]:
    import mlx.core as mx

    from specmlx.drafters.proposal import Fingerprinted
    from specmlx.evaluation.machine import this_machine, versions

    drafter = model.draft_model
    return {
        "machine": asdict(this_machine()),
        "versions": versions("mlx", "mlx-lm"),
        "model": {"name": target.model, "fingerprint": model.fingerprint},
        "draft_model": {
            "kind": type(drafter).__name__,
            "width": drafter.max_width,
            "fingerprint": drafter.fingerprint if isinstance(drafter, Fingerprinted) else None,
        },
        "max_tokens": max_tokens,
        "runs": runs,
        "peak_memory_gb": mx.get_peak_memory() / 1e9,
    }
