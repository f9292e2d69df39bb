"""Speed of the embedded pair by width, against plain decoding of the same target in the same run.

`python benchmarks/demo_speed.py` prints, for each drafter and width, τ and the ratio of its tokens per second to plain
decoding's, decode-only and end to end. Every question is answered at every width, in an order that turns from question
to question; the text must be the same at all of them, or no ratio is printed. On Linux, `LD_PRELOAD=…/libblas.so.3` of
OpenBLAS (OPENBLAS_NUM_THREADS=1) puts another BLAS under mlx.
"""

import json
import platform
import statistics
import sys
from collections import defaultdict
from importlib.metadata import version

import click
import mlx.core as mx

from specmlx import __version__
from specmlx.demo.tasks import held_out_examples
from specmlx.loading.load import load, load_drafter


def measure(target, tokenizer, drafters: dict, questions: list[str], max_tokens: int) -> dict:
    """Tokens, rounds and seconds of every question, by (drafter, width); raises SystemExit where texts differ."""
    from specmlx.generation.generate import stream_generate

    runs = [("plain", 0, None)]
    runs += [(name, w, d) for name, d in drafters.items() for w in range(1, d.max_width + 1)]
    samples = defaultdict(list)
    for turn, question in enumerate([questions[0], *questions]):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        texts = set()
        start = turn % len(runs)
        for name, width, drafter in runs[start:] + runs[:start]:
            options = {"draft_model": drafter} | ({"num_draft_tokens": width} if drafter else {})
            ids = []
            for response in stream_generate(target, tokenizer, prompt, max_tokens, **options):
                ids.append(response.token)
            texts.add(tuple(ids))
            s = response.stats
            if turn:  # The first question warms up.
                samples[name, width].append((len(ids), s.rounds, s.decode_seconds, s.prefill_seconds))
        if len(texts) > 1:
            raise SystemExit(f"no figures: the widths answered {question!r} differently")
    return samples


def ratios(samples: dict) -> list[dict]:
    """τ, the median over questions of the speed ratio to plain, and its quartiles."""
    plain = samples["plain", 0]
    rows = []
    for (name, width), runs in samples.items():
        decode = [p[2] / r[2] for p, r in zip(plain, runs, strict=True)]
        whole = [(p[2] + p[3]) / (r[2] + r[3]) for p, r in zip(plain, runs, strict=True)]
        low, middle, high = statistics.quantiles(decode, n=4)
        rows.append(
            {
                "drafter": name,
                "width": width,
                "acceptance_length": round(sum(r[0] for r in runs) / sum(r[1] for r in runs), 2),
                "decode_tps": round(sum(r[0] for r in runs) / sum(r[2] for r in runs), 1),
                "decode_ratio": round(middle, 2),
                "quartiles": [round(low, 2), round(high, 2)],
                "end_to_end_ratio": round(statistics.median(whole), 2),
            }
        )
    return rows


@click.command()
@click.option("--per-kind", default=3, show_default=True, help="Held-out questions of each kind.")
@click.option("--max-tokens", "-m", default=96, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(per_kind: int, max_tokens: int, as_json: bool) -> None:
    """Print the demo pair's speed by width as ratios to plain decoding."""
    target, tokenizer = load("demo", draft_model=None)
    drafters = {name: load_drafter(f"demo/{name}", target) for name in ("dflash", "dspark")}
    questions = [example.question for example in held_out_examples(per_kind)]
    rows = ratios(measure(target, tokenizer, drafters, questions, max_tokens))
    machine = {
        "machine": f"{platform.system()} {platform.machine()}, {mx.device_info().get('device_name', 'cpu')}",
        "device": str(mx.default_device()),
        "python": platform.python_version(),
        **{package: version(package) for package in ("mlx", "mlx-lm")},
        "specmlx": __version__,
    }
    if as_json:
        click.echo(json.dumps({"machine": machine, "questions": len(questions), "widths": rows}))
        return
    click.echo(", ".join(f"{k} {v}" for k, v in machine.items()), err=True)
    click.echo(f"{len(questions)} held-out questions, greedy, up to {max_tokens} tokens; same text at every width")
    click.echo("drafter   width     τ   decode tok/s   × plain (quartiles)   end to end")
    for r in rows:
        low, high = r["quartiles"]
        click.echo(
            f"{r['drafter']:<9} {r['width']:>5} {r['acceptance_length']:>5.2f} {r['decode_tps']:>14.1f} "
            f"{r['decode_ratio']:>9.2f} ({low:.2f}–{high:.2f}) {r['end_to_end_ratio']:>12.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
