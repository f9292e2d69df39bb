"""`specmlx evaluate`: what a drafter is worth on the user's own prompts."""

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import click

from specmlx.cli import options
from specmlx.cli.flags import grouped, options_of
from specmlx.cli.sampling import SamplingFlags
from specmlx.cli.tables import table
from specmlx.cli.terminal import answers, say, show_status

if TYPE_CHECKING:
    from specmlx.evaluation.evaluation import Acceptance

ALL = "all"


@click.command(short_help="Measure a drafter on prompts of your own.")
@grouped("target", options.ModelFlags)
@options.draft_model_option
@click.option("--data", required=True, metavar="FILE|HUB_DATASET", help="JSONL, as specmlx train takes it.")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Most prompts.")
@click.option("--held-out", is_flag=True, help="Only the rows that specmlx train keeps apart for measuring.")
@options_of(options.RequestFlags, "max_tokens", max_tokens=256)
@grouped("sampling", SamplingFlags)
@options_of(options.TemplateFlags, "chat_template_config")
@click.option("--chip", metavar="NAME", help="Also estimate the byte limit on this chip, like 'M4 Max 40-core'.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    target: options.ModelFlags,
    sampling: SamplingFlags,
    draft_model: str,
    data: str,
    limit: int,
    held_out: bool,
    max_tokens: int,
    chat_template_config: dict[str, Any] | None,
    chip: str | None,
    as_json: bool,
) -> None:
    """Answer prompts plainly and with the drafter: acceptance by category and slot, and whether every text is the same.

    Exit code 1 where a text differs.

    \b
    specmlx evaluate --model my-fine-tune --draft-model my-drafter --data prompts.jsonl --held-out
    """
    if draft_model == "none":
        raise click.UsageError("--draft-model none leaves nothing to measure: name a drafter.")
    sampling.check(repeatable=True)
    from specmlx.evaluation.chips import chip_named
    from specmlx.training.dataset import find_rows

    on = None if chip is None else chip_named(chip)
    rows = [row for row in find_rows(data) if row.text is None and (row.held_out or not held_out)][:limit]
    if not rows:
        raise ValueError(f"{data} holds no prompt{' that is held out' if held_out else ''}")
    with answers() as out:
        from specmlx.evaluation import evaluation

        model, tokenizer = target.load(draft_model)
        drafter = model.draft_model
        if drafter is None:
            raise ValueError(f"there is no drafter to measure: {model.no_draft_reason}")
        prompts = [row.ids(tokenizer, chat_template_config) for row in rows]
        categories = [row.category or ALL for row in rows]
        sums: dict[str, Acceptance] = defaultdict(evaluation.Acceptance)
        settings = dict(
            max_tokens=max_tokens,
            sampler=sampling.sampler(tokenizer),
            seed=sampling.seed,
            logits_processors=sampling.processors(),
        )
        for category, found in evaluation.evaluate(model, tokenizer, drafter, prompts, categories, **settings):
            if category != ALL:
                sums[category] += found
            sums[ALL] += found
            show_status(f"{sums[ALL].prompts} of {len(prompts)} prompts")
        show_status("")
        limit_on = None if on is None else evaluation.byte_limit(model, drafter, sums[ALL], on)
        if as_json:
            say(json.dumps(_object(sums, limit_on)), out)
        else:
            for line in _lines(sums, limit_on):
                say(line, out)
    click.get_current_context().exit(0 if sums[ALL].identical == sums[ALL].prompts else 1)


def _lines(sums: "dict[str, Acceptance]", limit: dict[str, Any] | None):
    total = sums[ALL]
    rows = [("", "prompts", "tokens", "tokens per pass", "slot by slot, kept where those before were")]
    for name in sorted(sums, key=lambda name: (name != ALL, name)):
        found, counts = sums[name], sums[name].sums
        slots = " ".join(f"{share:.2f}" for share in found.slots())
        rows.append((name, f"{found.prompts}", f"{counts.generation_tokens}", f"{counts.acceptance_length:.2f}", slots))
    yield from table(rows).splitlines()
    if bins := total.calibration():
        yield "the drafter's own estimate, and how often such a token was kept:"
        yield "  " + "  ".join(f"{estimate:.2f} → {kept:.2f} ({n})" for estimate, kept, n in bins)
    yield f"parity: {total.identical} of {total.prompts} texts identical to plain decoding"
    if limit:
        yield (
            f"estimate for {limit['chip']} ({limit['bandwidth']:.0f} GB/s), by bytes alone, weights read once a pass: "
            f"at most {limit['speculative_tps']:.1f} tok/s, plain decoding {limit['plain_tps']:.1f} "
            f"({limit['ratio']:.2f} ×)"
        )


def _object(sums: "dict[str, Acceptance]", limit: dict[str, Any] | None) -> dict[str, Any]:
    categories = {}
    for name, found in sums.items():
        counts = found.sums
        categories[name] = {
            "prompts": found.prompts,
            "identical": found.identical,
            "tokens": counts.generation_tokens,
            "rounds": counts.rounds,
            "acceptance_length": counts.acceptance_length,
            "accept_histogram": counts.accept_histogram,
            "slots": found.slots(),
            "calibration": [dict(estimate=e, kept=k, count=n) for e, k, n in found.calibration()],
        }
    return {"categories": categories, "estimate": limit}
