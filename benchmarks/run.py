"""specmlx beside mlx-lm's plain decoding and, where they are installed, other speculative decoders, by turns.

`python benchmarks/run.py` uses the demo pair's files and its held-out questions; `benchmarks/peers.sh` makes the other
programs' environments in .peers/. Each program is a process of its own that only works when it is asked (worker.py).
A turn asks all of them for one prompt, one after the other and then backwards. The table has the median and quartiles
of the ratio to mlx-lm's speed in the same turn, end to end; a program whose tokens are not mlx-lm's has no ratio.
"""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import click
import mlx.core as mx
from worker import PROGRAMS

from specmlx import __version__
from specmlx.demo.export import write_demo
from specmlx.demo.tasks import held_out_examples
from specmlx.loading import load
from specmlx.receipts.machine import this_machine

REFERENCE = "mlx-lm"
PEERS = {"mlx-dspark dspark": "mlx-dspark", "mlx-dspark dflash": "mlx-dspark", "dflash": "dflash"}
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
        self.process.stdin.close()
        self.process.wait()

    @property
    def ready(self) -> bool:
        """Waits until it has loaded the pair; False where it can't."""
        return self.process.stdout.readline() == "ready\n"

    def ask(self, prompt: list[int], max_tokens: int) -> dict:
        print(json.dumps({"prompt": prompt, "max_tokens": max_tokens}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: run python benchmarks/worker.py '{self.name}' PAIR by hand")
        answer = json.loads(line)
        answer["tokens"] = answer["tokens"][:max_tokens]
        return answer


def compare(programs: list[Program], prompts: list[list[int]], runs: int, max_tokens: int) -> list[dict]:
    """A row a program. The first prompt is asked once more before, which doesn't count."""
    for program in programs:
        program.ask(prompts[0], max_tokens)
    turns = []
    for prompt in prompts:
        for _ in range(runs):
            turn: dict[str, list[dict]] = {program.name: [] for program in programs}
            for program in [*programs, *reversed(programs)]:
                turn[program.name].append(program.ask(prompt, max_tokens))
            turns.append(turn)
    return [_row(program.name, turns) for program in programs]


def _row(name: str, turns: list[dict[str, list[dict]]]) -> dict:
    answers = [answer for turn in turns for answer in turn[name]]
    same = all(answer["tokens"] == turn[REFERENCE][0]["tokens"] for turn in turns for answer in turn[name])
    ratios = [_seconds(turn[REFERENCE]) / _seconds(turn[name]) for turn in turns]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    tokens = sum(len(answer["tokens"]) for answer in answers)
    return {
        "program": name,
        "same_tokens": same,
        "ratio": {"median": middle, "low": low, "high": high} if same else None,
        "tokens_per_second": tokens / _seconds(answers),
        "ttft": statistics.median(answer["ttft"] for answer in answers),
        "tokens_per_pass": tokens / sum(answer["passes"] for answer in answers),
        "peak_memory": max(answer["peak_memory"] for answer in answers),
    }


def _seconds(answers: list[dict]) -> float:
    return sum(answer["seconds"] for answer in answers)


def _python(name: str) -> str | None:
    """The interpreter of a program's environment; None where it is not installed."""
    if name not in PEERS:
        return sys.executable
    python = HERE.parent / ".peers" / PEERS[name] / "bin" / "python"
    return str(python) if python.exists() else None


@click.command()
@click.option("--pair", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: the demo pair.")
@click.option("--prompts", default=8, show_default=True, help="How many of the held-out questions.")
@click.option("--runs", default=2, show_default=True, help="Turns for each prompt.")
@click.option("--max-tokens", "-m", default=96, show_default=True)
@click.option("--only", multiple=True, help="Some programs only; mlx-lm is always one of them.")
@click.option("--json", "as_json", is_flag=True)
def main(pair: Path | None, prompts: int, runs: int, max_tokens: int, only: tuple[str, ...], as_json: bool) -> None:
    """Print how fast specmlx and other programs answer, as ratios to mlx-lm's plain decoding."""
    with ExitStack() as stack:
        if pair is None:
            pair = write_demo(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "pair")
        _, tokenizer = load(str(pair), draft_model=None)
        questions = [example.question for example in held_out_examples(1)]
        chosen = questions[:: max(1, len(questions) // prompts)][:prompts]
        ids = [
            tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
            for question in chosen
        ]
        programs = []
        for name in PROGRAMS:
            if only and name != REFERENCE and name not in only:
                continue
            if (python := _python(name)) is None:
                click.echo(f"{name}: not installed (benchmarks/peers.sh)", err=True)
                continue
            program = stack.enter_context(Program(name, python, pair))
            if program.ready:
                programs.append(program)
            else:
                click.echo(f"{name}: can't load this pair", err=True)
        rows = compare(programs, ids, runs, max_tokens)
    machine = this_machine()
    about = (
        f"{machine.chip}, {machine.system}, {machine.backend}; Python {platform.python_version()}, mlx {mx.__version__}"
    )
    about += f", mlx-lm {version('mlx-lm')}, specmlx {__version__}"
    if as_json:
        click.echo(json.dumps({"machine": about, "prompts": len(ids), "runs": runs, "rows": rows}))
        return
    click.echo(about)
    click.echo(f"{len(ids)} prompts, {runs} turns, greedy, up to {max_tokens} tokens; ratios to mlx-lm, end to end\n")
    click.echo("| program | × mlx-lm (quartiles) | tok/s | first token, s | tokens a pass | peak memory, MB |")
    click.echo("|---|---|---|---|---|---|")
    for row in rows:
        ratio = row["ratio"]
        shown = "other tokens" if ratio is None else f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"
        click.echo(
            f"| {row['program']} | {shown} | {row['tokens_per_second']:.1f} | {row['ttft']:.3f} | "
            f"{row['tokens_per_pass']:.2f} | {1000 * row['peak_memory']:.0f} |"
        )


if __name__ == "__main__":
    sys.exit(main())
