"""specmlx beside mlx-lm's plain decoding and, where they are installed, other speculative decoders, by turns.

`python benchmarks/run.py` takes the demo pair's held-out questions to the demo pair's files, and to a pair that nobody
trained (bigram.py); `benchmarks/peers.sh` makes the other programs' environments in .peers/. Each program is a process
of its own that only works when it is asked (worker.py). A turn asks mlx-lm, the program twice, and mlx-lm. The table
has the median and quartiles of the ratio to mlx-lm's speed in the same turn, end to end (mlx-lm's own row is its last
answer against its first: how steady the machine is); a program whose tokens are not mlx-lm's has no ratio. One that is
not installed or fails is told in a line.
"""

import contextlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from threading import Timer

import click
import mlx.core as mx
from bigram import write_bigram
from worker import programs

from specmlx import __version__
from specmlx.demo.export import write_demo
from specmlx.demo.tasks import held_out_examples
from specmlx.evaluation.bench import Spread
from specmlx.evaluation.machine import this_machine
from specmlx.loading.load import load

REFERENCE = "mlx-lm"
PEERS = ("mlx-dspark", "dflash", "mlx-vlm")
# Seconds after which an answer is given up.
_PATIENCE = 120
HERE = Path(__file__).parent


class Program:
    """A worker that is under way."""

    def __init__(self, name: str, python: str, pair: Path):
        self.name = name
        self.answers: list[dict] = []
        self.process = subprocess.Popen(
            [python, str(HERE / "worker.py"), name, str(pair)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()

    @property
    def ready(self) -> bool:
        """Waits until it has loaded the pair; False where it can't."""
        return self._line() == "ready\n"

    def ask(self, prompt: list[int], max_tokens: int) -> dict | None:
        """Its answer; None where it failed, and ever after."""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"prompt": prompt, "max_tokens": max_tokens}), file=self.process.stdin, flush=True)
        if not (line := self._line()):
            return None
        answer = json.loads(line)
        answer["tokens"] = answer["tokens"][:max_tokens]
        return answer

    def _line(self) -> str:
        timer = Timer(_PATIENCE, self.process.kill)
        timer.start()
        try:
            return self.process.stdout.readline()
        finally:
            timer.cancel()


Turn = tuple[list[dict], list[dict]]
"""Answers of the reference, and of a program."""


def compare(running: list[Program], prompts: list[list[int]], runs: int, max_tokens: int) -> list[dict]:
    """A row a program that answered everything. The first prompt is asked once more before, which doesn't count."""
    reference = next((program for program in running if program.name == REFERENCE), None)
    if reference is None or len(running) < 2:
        raise click.ClickException(f"there is nothing to compare: {REFERENCE} and one more program must run")
    failed = {program.name for program in running if program.ask(prompts[0], max_tokens) is None}
    turns: dict[str, list[Turn]] = {program.name: [] for program in running if program is not reference}
    for prompt in prompts * runs:
        for program in running:
            if program is reference or {program.name, REFERENCE} & failed:
                continue
            order = (reference, program, program, reference)
            answers = [each.ask(prompt, max_tokens) for each in order]
            failed |= {each.name for each, answer in zip(order, answers, strict=True) if answer is None}
            turns[program.name].append((answers[::3], answers[1:3]))
    for name in sorted(failed):
        click.echo(f"{name}: failed while answering (python benchmarks/worker.py '{name}' PAIR shows why)", err=True)
    whole = {name: of_it for name, of_it in turns.items() if not {name, REFERENCE} & failed}
    if not whole:
        raise click.ClickException("there is nothing to compare: see above")
    # The reference against itself, before and after the other's answers: how steady the machine is.
    own = [([before], [after]) for of_it in whole.values() for (before, after), _ in of_it]
    return [_row(REFERENCE, own), *(_row(name, of_it) for name, of_it in whole.items())]


def _row(name: str, turns: list[Turn]) -> dict:
    answers = [answer for _, its in turns for answer in its]
    same = all(answer["tokens"] == theirs[0]["tokens"] for theirs, its in turns for answer in its)
    ratios = [_seconds(theirs) / _seconds(its) for theirs, its in turns]
    tokens = sum(len(answer["tokens"]) for answer in answers)
    return {
        "program": name,
        "same_tokens": same,
        "ratio": asdict(Spread.of(ratios)) if same else None,
        "tokens_per_second": tokens / _seconds(answers),
        "ttft": statistics.median(answer["ttft"] for answer in answers),
        "tokens_per_pass": tokens / sum(answer["passes"] for answer in answers),
        "peak_memory": max(answer["peak_memory"] for answer in answers),
    }


def _seconds(answers: list[dict]) -> float:
    return sum(answer["seconds"] for answer in answers)


def _python(name: str) -> str | None:
    """The interpreter of a program's environment; None where it is not installed."""
    peer = name.split()[0]
    if peer not in PEERS:
        return sys.executable
    python = HERE.parent / ".peers" / peer / "bin" / "python"
    return str(python) if python.exists() else None


@click.command()
@click.option("--pair", "pairs", multiple=True, metavar="demo|bigram|DIR", help="May be repeated; default: both.")
@click.option(
    "--prompts", type=click.IntRange(min=1), default=6, show_default=True, help="How many of the held-out questions."
)
@click.option("--runs", type=click.IntRange(min=1), default=1, show_default=True, help="Turns for each prompt.")
@click.option("--max-tokens", "-m", default=96, show_default=True)
@click.option("--only", multiple=True, help="Some programs only; mlx-lm is always one of them.")
@click.option("--json", "as_json", is_flag=True)
def main(
    pairs: tuple[str, ...], prompts: int, runs: int, max_tokens: int, only: tuple[str, ...], as_json: bool
) -> None:
    """Print how fast specmlx and other programs answer, as ratios to mlx-lm's plain decoding."""
    tables = {}
    with tempfile.TemporaryDirectory() as work:
        demo = write_demo(Path(work) / "demo")
        for pair in pairs or ("demo", "bigram"):
            folder = demo if pair == "demo" else Path(pair)
            if pair == "bigram":
                folder = write_bigram(Path(work) / "bigram", demo)
            if not folder.is_dir():
                raise click.BadParameter(f"{pair}: there is no such directory", param_hint="--pair")
            tables[pair] = _measure(folder, prompts, runs, max_tokens, only)
    machine = this_machine()
    about = (
        f"{machine.chip}, {machine.system}, {machine.backend}; Python {platform.python_version()}, mlx {mx.__version__}"
    )
    about += f", mlx-lm {version('mlx-lm')}, specmlx {__version__}"
    if as_json:
        click.echo(json.dumps({"machine": about, "prompts": prompts, "runs": runs, "pairs": tables}))
        return
    click.echo(about)
    click.echo(f"{prompts} prompts, {runs} turns, greedy, up to {max_tokens} tokens; ratios to mlx-lm, end to end")
    for pair, rows in tables.items():
        click.echo(
            f"\n| {pair} pair | × mlx-lm (quartiles) | tok/s | first token, s | tokens a pass | peak memory, MB |"
        )
        click.echo("|---|---|---|---|---|---|")
        for row in rows:
            ratio = row["ratio"]
            shown = "other tokens"
            if ratio is not None:
                shown = f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"
            click.echo(
                f"| {row['program']} | {shown} | {row['tokens_per_second']:.1f} | {row['ttft']:.3f} | "
                f"{row['tokens_per_pass']:.2f} | {1000 * row['peak_memory']:.0f} |"
            )


def _measure(pair: Path, prompts: int, runs: int, max_tokens: int, only: tuple[str, ...]) -> list[dict]:
    _, tokenizer = load(str(pair), draft_model=None)
    questions = [example.question for example in held_out_examples(1)]
    chosen = questions[:: max(1, len(questions) // prompts)][:prompts]
    ids = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in chosen
    ]
    with ExitStack() as stack:
        running = []
        for name in programs(pair):
            if only and name != REFERENCE and name not in only:
                continue
            if (python := _python(name)) is None:
                click.echo(f"{name}: not installed (benchmarks/peers.sh)", err=True)
                continue
            program = stack.enter_context(Program(name, python, pair))
            if program.ready:
                running.append(program)
            else:
                click.echo(f"{name}: can't load this pair", err=True)
        return compare(running, ids, runs, max_tokens)


if __name__ == "__main__":
    sys.exit(main())
