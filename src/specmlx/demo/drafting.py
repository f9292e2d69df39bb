"""How much each drafter of the demo saves, and what cheaper drafting costs: `python -m specmlx.demo.drafting`."""

import json
from collections.abc import Callable
from typing import Any

import click
import mlx.core as mx

from specmlx.decoding.draft_length import FULL
from specmlx.decoding.policy import Policy
from specmlx.decoding.sampling import make_sampler
from specmlx.decoding.stats import summed
from specmlx.demo.tasks import held_out_examples
from specmlx.drafters.proposal import Drafter
from specmlx.evaluation.answer import answer, chat_prompts
from specmlx.generation.scheduler import Scheduler
from specmlx.loading.load import load, load_drafter
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


def run(
    model: Model, tokenizer: Any, prompts: list[list[int]], drafter: Drafter | None, mode: str
) -> tuple[list[list[int]], float]:
    """The ids of the answers to all prompts, and the tokens per target pass (τ).

    mode: "greedy", "sampled" (temperature 0.8, no seed) or "seeded" (the same with one).
    """
    scheduler = Scheduler(model, tokenizer, drafter, FULL if drafter else None)
    sampler = None if mode == "greedy" else make_sampler(temp=TEMPERATURE)
    seeds = range(SEED, SEED + len(prompts)) if mode == "seeded" else [None] * len(prompts)
    pairs = zip(prompts, seeds, strict=True)
    answers = [answer(scheduler, prompt, MAX_TOKENS, seed=seed, sampler=sampler) for prompt, seed in pairs]
    return [list(each.tokens) for each in answers], summed(each.stats for each in answers).acceptance_length


def same_slots(model: Model, one: Drafter, other: Drafter, prompts: list[list[int]], texts: list[list[int]]) -> float:
    """The share of slots that two drafters with the same taps propose alike, greedily, over `BLOCKS` blocks.

    Every text has as many blocks as the others, spread over its tokens.
    """
    same = slots = 0
    left, policy = BLOCKS, Policy().at(0)
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids = mx.array([prompt + text], dtype=mx.int32)
        _, features = model.features(ids, one.tap_ids)
        pair = [(drafter, drafter.new_context()) for drafter in (one, other)]
        seen, count = 0, min(-(-left // (len(prompts) - i)), len(text))
        for block in range(count):
            at = len(prompt) - 1 + block * len(text) // count
            for drafter, context in pair:
                drafter.observe(context, ids[:, seen:at], features[:, seen:at], at - seen)
            a, b = (drafter.propose(context, ids[:, at], one.max_width, policy).tokens for drafter, context in pair)
            same += (a == b).sum().item()
            slots += a.size
            seen = at
        left -= count
    return same / slots


def measure(
    model: Model,
    tokenizer: Any,
    prompts: list[list[int]],
    drafters: tuple[str, ...],
    cheaper: str,
    progress: Callable[[str], None] = lambda line: None,
) -> dict:
    """All figures. `identical` is whether every text is the plain one (what is sampled without a seed has none)."""
    progress("plain decoding")
    plain = {mode: run(model, tokenizer, prompts, None, mode)[0] for mode in ("greedy", "seeded")}
    report: dict[str, Any] = {"prompts": len(prompts), "drafters": {}, "cheaper": cheaper, "settings": []}
    for name in drafters:
        progress(name)
        drafter = load_drafter(name, model, draft_quantize="none")
        runs = {mode: run(model, tokenizer, prompts, drafter, mode) for mode in ("greedy", "sampled", "seeded")}
        figures = {mode: round(tau, 3) for mode, (_, tau) in runs.items()}
        report["drafters"][name] = figures | {"identical": all(runs[mode][0] == plain[mode] for mode in plain)}
    if not cheaper:
        return report
    whole = load_drafter(cheaper, model, draft_quantize="none")
    for settings in SETTINGS:
        progress(f"{cheaper}, {settings}")
        drafter = load_drafter(cheaper, model, **{"draft_quantize": "none", **settings})
        texts, tau = run(model, tokenizer, prompts, drafter, "greedy")
        alike = round(same_slots(model, whole, drafter, prompts, plain["greedy"]), 4)
        figures = {"greedy": round(tau, 3), "same_slots": alike, "identical": texts == plain["greedy"]}
        report["settings"].append(settings | figures)
    return report


@click.command()
@click.option("--draft-model", "drafters", multiple=True, help="Default: every drafter of the demo, and ngram.")
@click.option("--cheaper", default="demo/dspark", show_default=True, help="Whose cheaper settings; empty for none.")
@click.option("--per-kind", default=7, show_default=True, help="Held-out questions of each of the 15 kinds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(drafters: tuple[str, ...], cheaper: str, per_kind: int, as_json: bool) -> None:
    """Tokens per target pass of the demo's drafters on the same held-out prompts: greedy, sampled and seeded."""
    model, tokenizer = load("demo", draft_model=None, dtype="float32")
    prompts = chat_prompts(tokenizer, [example.question for example in held_out_examples(per_kind)])
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
