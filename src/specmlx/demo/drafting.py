"""How much each drafter of the demo saves, and what cheaper drafting costs: `python -m specmlx.demo.drafting`."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import mlx.core as mx

from specmlx.decoding.draft_length import FULL
from specmlx.decoding.policy import Policy
from specmlx.decoding.sampling import make_sampler
from specmlx.demo.tasks import held_out_examples
from specmlx.drafters.proposal import Drafter
from specmlx.targets.hybrid import Model

DRAFTERS = ("demo/dflash", "demo/dflash2", "demo/dspark", "demo/mtp", "ngram")
SETTINGS = (
    {"draft_quantize": "8"},
    {"draft_quantize": "4"},
    {"draft_quantize": "nvfp4"},
    {"draft_quantize": "mxfp4"},
    {"draft_vocab": 640},
    {"draft_vocab": 320},
    {"draft_markov_top_k": 64},
    {"draft_markov_top_k": 8},
)
TEMPERATURE, SEED, MAX_TOKENS = 0.8, 1, 160
BLOCKS = 200


@dataclass
class Run:
    """Answers to all prompts one way: their ids, and tokens per target pass (τ)."""

    texts: list[list[int]]
    tau: float


def run(model: Model, tokenizer: Any, prompts: list[list[int]], drafter: Drafter | None, mode: str) -> Run:
    """mode: "greedy", "sampled" (temperature 0.8, no seed) or "seeded" (the same with one)."""
    from specmlx.generation.generate import stream_generate

    texts, tokens, rounds = [], 0, 0
    for i, prompt in enumerate(prompts):
        sampler = None if mode == "greedy" else make_sampler(temp=TEMPERATURE)
        seed = SEED + i if mode == "seeded" else None
        options = dict(draft_model=drafter, num_draft_tokens=FULL if drafter else None, sampler=sampler, seed=seed)
        responses = list(stream_generate(model, tokenizer, prompt, MAX_TOKENS, **options))
        texts.append([response.token for response in responses])
        tokens += len(responses)
        rounds += responses[-1].stats.rounds
    return Run(texts, tokens / rounds)


def same_slots(model: Model, one: Drafter, other: Drafter, prompts: list[list[int]], texts: list[list[int]]) -> float:
    """The share of slots that two drafters with the same taps propose alike, greedily, over `BLOCKS` blocks."""
    same = slots = 0
    for context, rows, anchors in _blocks(model, one, prompts, texts):
        for drafter in (one, other):
            drafter.observe(context[drafter], *rows)
        a, b = (
            drafter.propose(context[drafter], anchors, one.max_width, Policy().at(0)).tokens for drafter in (one, other)
        )
        same += (a == b).sum().item()
        slots += a.size
    return same / slots


def _blocks(model: Model, one: Drafter, prompts: list[list[int]], texts: list[list[int]]) -> Iterator[tuple]:
    """Contexts by drafter, made when they are asked for, the rows to observe next, and the anchor: `BLOCKS` times.

    Every text has as many blocks as the others, spread over its tokens.
    """
    left = BLOCKS
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids = mx.array([prompt + text], dtype=mx.int32)
        _, features = model.features(ids, one.tap_ids)
        contexts, seen, count = _Contexts(), 0, min(-(-left // (len(prompts) - i)), len(text))
        for block in range(count):
            at = len(prompt) - 1 + block * len(text) // count
            yield contexts, (ids[:, seen:at], features[:, seen:at], at - seen), ids[:, at]
            seen = at
        left -= count


class _Contexts(dict):
    def __missing__(self, drafter: Drafter) -> Any:
        self[drafter] = drafter.new_context()
        return self[drafter]


def measure(
    model: Model,
    tokenizer: Any,
    prompts: list[list[int]],
    drafters: tuple[str, ...],
    cheaper: str,
    progress: Callable[[str], None] = lambda line: None,
) -> dict:
    """All figures. `identical` is whether every text is the plain one (what is sampled without a seed has none)."""
    from specmlx.loading.load import load_drafter

    progress("plain decoding")
    plain = {mode: run(model, tokenizer, prompts, None, mode).texts for mode in ("greedy", "seeded")}
    report: dict[str, Any] = {"prompts": len(prompts), "drafters": {}, "cheaper": cheaper, "settings": []}
    for name in drafters:
        progress(name)
        drafter = load_drafter(name, model, draft_quantize="none")
        runs = {mode: run(model, tokenizer, prompts, drafter, mode) for mode in ("greedy", "sampled", "seeded")}
        report["drafters"][name] = {
            **{mode: round(result.tau, 3) for mode, result in runs.items()},
            "identical": all(runs[mode].texts == plain[mode] for mode in plain),
        }
    if not cheaper:
        return report
    whole = load_drafter(cheaper, model, draft_quantize="none")
    for settings in SETTINGS:
        progress(f"{cheaper}, {settings}")
        drafter = load_drafter(cheaper, model, **{"draft_quantize": "none", **settings})
        result = run(model, tokenizer, prompts, drafter, "greedy")
        report["settings"].append(
            {
                **settings,
                "greedy": round(result.tau, 3),
                "same_slots": round(same_slots(model, whole, drafter, prompts, plain["greedy"]), 4),
                "identical": result.texts == plain["greedy"],
            }
        )
    return report


@click.command()
@click.option("--draft-model", "drafters", multiple=True, help="Default: every drafter of the demo, and ngram.")
@click.option("--cheaper", default="demo/dspark", show_default=True, help="Whose cheaper settings; empty for none.")
@click.option("--per-kind", default=7, show_default=True, help="Held-out questions of each of the 15 kinds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(drafters: tuple[str, ...], cheaper: str, per_kind: int, as_json: bool) -> None:
    """Tokens per target pass of the demo's drafters on the same held-out prompts: greedy, sampled and seeded."""
    from specmlx.loading.load import load

    model, tokenizer = load("demo", draft_model=None, dtype="float32")
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": example.question}], add_generation_prompt=True)
        for example in held_out_examples(per_kind)
    ]
    report = measure(model, tokenizer, prompts, drafters or DRAFTERS, cheaper, lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps(report))
        return
    click.echo(f"tokens per target pass (τ), {len(prompts)} held-out prompts, full width, temperature {TEMPERATURE}")
    click.echo(f"  {'drafter':<14} {'greedy':>7} {'sampled':>8} {'seeded':>7}  text")
    for name, f in report["drafters"].items():
        text = "as without drafter" if f["identical"] else "DIFFERS"
        click.echo(f"  {name:<14} {f['greedy']:>7.2f} {f['sampled']:>8.2f} {f['seeded']:>7.2f}  {text}")
    if report["settings"]:
        click.echo(f"{cheaper} made cheaper, greedy; slots that it proposes alike, of {BLOCKS} blocks")
    for f in report["settings"]:
        setting = ", ".join(f"{k} {v}" for k, v in f.items() if k.startswith("draft_"))
        text = "as without drafter" if f["identical"] else "DIFFERS"
        click.echo(f"  {setting:<24} τ {f['greedy']:>5.2f}  slots {f['same_slots']:>6.1%}  {text}")


if __name__ == "__main__":
    main()
