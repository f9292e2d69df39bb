"""Whether the number of drafted tokens is chosen well: four bars, each a ratio in one run that passes or fails.

`python benchmarks/draft_length.py` takes all of them on a machine with nothing else to do; `--only` some:

- `best`: `auto` beside every fixed number (demo pair, bigram pair and, with `--gguf`, a GGUF file with prompt lookup);
- `hopeless`: `specmlx bench --suite hopeless` on the demo pair;
- `poisoned`: the curve is made while four busy processes run, and used when they have ended;
- `short`: twenty answers of 30 tokens by a pair that is new.

Costs are kept in an empty directory of each bar's own. The exit code is 1 where a bar is missed.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).parent
BEST, HOPELESS, POISONED, SHORT = BARS = ("best", "hopeless", "poisoned", "short")
BUSY = 4


def answer(model: Any, tokenizer: Any, ids: Sequence[int], max_tokens: int, n: int | str) -> Any:
    """The stats of a greedy answer with `n` drafted tokens a round; 0 decodes plainly."""
    from specmlx import stream_generate

    return list(stream_generate(model, tokenizer, ids, max_tokens, num_draft_tokens=n))[-1].stats


def prompts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return [tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True) for t in texts]


def passed(bar: str, ratio: float, least: float, what: str) -> bool:
    """Print a bar's line."""
    click.echo(f"{bar}: {what}: {ratio:.3f} (bar: {least}) {'pass' if ratio >= least else 'FAIL'}")
    return ratio >= least


def decoding(measured: dict[Any, list[list[float]]], mode: Any) -> float:
    """Seconds of all prompts, each by its quickest run."""
    return sum(min(runs) for runs in zip(*measured[mode], strict=True))


def best(runs: int, name: str, model: Any, tokenizer: Any, texts: Sequence[str], max_tokens: int = 96) -> bool:
    """`auto` beside every fixed number, by turns, decode only: each prompt's quickest of some runs, summed up."""
    asked = prompts(tokenizer, texts)
    modes = [*range(model.draft_model.max_width + 1), "auto"]
    for mode in modes:
        answer(model, tokenizer, asked[0], max_tokens, mode)
    seconds: dict[Any, list[list[float]]] = {mode: [] for mode in modes}
    tokens: dict[Any, list[float]] = {mode: [0, 0] for mode in modes}
    for run in range(runs):
        for mode in modes:
            seconds[mode].append([])
        for i, ids in enumerate(asked):
            start = (run + i) % len(modes)
            for mode in modes[start:] + modes[:start]:
                stats = answer(model, tokenizer, ids, max_tokens, mode)
                seconds[mode][-1].append(stats.decode_seconds)
                tokens[mode][0] += stats.generation_tokens
                tokens[mode][1] += stats.rounds
    total = {mode: decoding(seconds, mode) for mode in modes}
    for mode in modes:
        per_pass = tokens[mode][0] / tokens[mode][1]
        click.echo(f"  {name} {mode!s:>4}: {total[0] / total[mode]:.3f} × plain, {per_pass:.2f} tokens a pass")
    quickest = min(modes[:-1], key=total.__getitem__)
    return passed(BEST, total[quickest] / total["auto"], 0.97, f"{name}, auto beside {quickest}, the best fixed number")


def pairs(work: Path, gguf: Path | None):
    """Names, models and questions of `best`."""
    from bigram import write_bigram

    from specmlx import load
    from specmlx.demo.export import write_demo
    from specmlx.demo.tasks import held_out_examples
    from specmlx.evaluation.suites import suite

    questions = [example.question for example in held_out_examples(1)][::2]
    yield "demo pair", *load("demo"), questions
    bigram = write_bigram(work / "bigram", write_demo(work / "demo"))
    for drafter in ("dspark", "dflash2"):
        yield f"bigram pair ({drafter})", *load(str(bigram), draft_model=str(bigram / drafter)), questions
    if gguf:
        texts = [text for name in ("code", "math", "chat") for text in suite(name)][::3]
        yield gguf.name, *load(str(gguf), draft_model="ngram"), texts


def poisoned() -> bool:
    """The curve and four answers while other processes are busy; then tokens a pass without them, beside full's."""
    from specmlx import load
    from specmlx.demo.tasks import held_out_examples

    model, tokenizer = load("demo")
    asked = prompts(tokenizer, [example.question for example in held_out_examples(1)])
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        for ids in asked[:4]:
            stats = answer(model, tokenizer, ids, 64, "auto")
            click.echo(f"  busy: {stats.acceptance_length:.2f} tokens a pass")
    finally:
        for process in busy:
            process.kill()
            process.wait()
    found = [[answer(model, tokenizer, ids, 64, mode).acceptance_length for mode in ("auto", "full")] for ids in asked]
    for auto, full in found:
        click.echo(f"  quiet: {auto:.2f} tokens a pass, full {full:.2f}")
    ratio = sum(auto for auto, _ in found[1:]) / sum(full for _, full in found[1:])
    return passed(POISONED, ratio, 0.9, "tokens a pass from the second answer on, beside full's")


def short() -> bool:
    """Twenty answers of 30 tokens, by turns; the measurement, which is before the first one, is told apart."""
    import time

    from specmlx import load
    from specmlx.demo.tasks import held_out_examples

    model, tokenizer = load("demo")
    asked = prompts(tokenizer, [example.question for example in held_out_examples(2)][:20])
    modes = (0, "full", "auto")
    for mode in modes[:2]:
        answer(model, tokenizer, asked[0], 30, mode)
    total, whole = dict.fromkeys(modes, 0.0), 0.0
    for i, ids in enumerate(asked):
        for mode in modes[i % 3 :] + modes[: i % 3]:
            begin = time.perf_counter()
            stats = answer(model, tokenizer, ids, 30, mode)
            total[mode] += stats.prefill_seconds + stats.decode_seconds
            whole += time.perf_counter() - begin if mode == "auto" else 0.0
    click.echo(f"  plain {total[0]:.2f} s, full {total['full']:.2f} s, auto {total['auto']:.2f} s", nl=False)
    click.echo(f"; auto with its measurement and all else {whole:.2f} s")
    return passed(SHORT, min(total[0], total["full"]) / total["auto"], 0.95, "20 answers, beside the better fixed mode")


def hopeless(runs: int) -> bool:
    command = [sys.executable, "-m", "specmlx", "bench", "--model", "demo", "--suite", "hopeless", "-m", "96"]
    code = subprocess.run([*command, "--runs", str(runs), "--floor", "0.95"], check=False).returncode
    click.echo(f"{HOPELESS}: auto beside plain decoding, end to end (bar: 0.95) {'FAIL' if code else 'pass'}")
    return code == 0


@click.command()
@click.option("--only", default=",".join(BARS), show_default=True, metavar="BAR,…")
@click.option("--gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A file for `best`.")
@click.option("--runs", default=3, show_default=True, help="Of each prompt and number in `best`.")
@click.option("--bench-runs", default=6, show_default=True, help="Of `hopeless`.")
def main(only: str, gguf: Path | None, runs: int, bench_runs: int) -> None:
    """Print each bar, and whether it is passed."""
    from specmlx.evaluation.machine import this_machine

    machine = this_machine()
    click.echo(f"{machine.chip}, {machine.system}, {machine.backend}", err=True)
    good = True
    for bar in only.split(","):
        with tempfile.TemporaryDirectory() as work:
            os.environ["SPECMLX_CACHE"] = str(Path(work) / "cache")
            if bar == BEST:
                for name, model, tokenizer, texts in pairs(Path(work), gguf):
                    good &= best(runs, name, model, tokenizer, texts)
            else:
                bars: dict[str, Callable[[], bool]] = {POISONED: poisoned, SHORT: short}
                bars[HOPELESS] = lambda: hopeless(bench_runs)
                good &= bars[bar]()
    sys.exit(not good)


if __name__ == "__main__":
    main()
