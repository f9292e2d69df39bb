"""`specmlx evaluate`: what a drafter is worth on the user's own prompts."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import click

from specmlx.cli.flags import command, like, report
from specmlx.cli.options import DRAFT_MODEL, JSON, ModelFlags, RequestFlags
from specmlx.cli.sampling import SamplingFlags
from specmlx.cli.tables import table
from specmlx.cli.template import TemplateFlags
from specmlx.cli.terminal import show_status
from specmlx.formats.values import option

ALL = "all"


@command(JSON)
class Evaluate:
    """Answer prompts plainly and with the drafter: acceptance by category and slot, and whether every text is the same.

    Exit code 1 where a text differs.

    \b
    specmlx evaluate --model my-fine-tune --draft-model my-drafter --data prompts.jsonl --held-out
    """

    target: ModelFlags
    draft_model: str = DRAFT_MODEL
    data: str = option(None, "JSONL, as specmlx train takes it.", required=True, metavar="FILE|HUB_DATASET")
    limit: int = option(100, "Most prompts.", least=1)
    held_out: bool = option(False, "Only the rows that specmlx train keeps apart for measuring.")
    max_tokens: int = like(RequestFlags, "max_tokens", 256)
    sampling: SamplingFlags
    chat_template_config: dict[str, Any] | None = like(TemplateFlags, "chat_template_config")
    chip: str | None = option(None, "Also estimate the byte limit on this chip, like 'M4 Max 40-core'.", metavar="NAME")

    def run(self) -> bool:
        if self.draft_model == "none":
            raise click.UsageError("--draft-model none leaves nothing to measure: name a drafter.")
        self.sampling.check(repeatable=True)
        from specmlx.evaluation.chips import chip_named
        from specmlx.training.dataset import find_rows

        on = None if self.chip is None else chip_named(self.chip)
        rows = [row for row in find_rows(self.data) if row.text is None and (row.held_out or not self.held_out)][
            : self.limit
        ]
        if not rows:
            raise ValueError(f"{self.data} holds no prompt{' that is held out' if self.held_out else ''}")
        from specmlx.evaluation import evaluation

        model, tokenizer = self.target.load(self.draft_model)
        drafter = model.draft_model
        if drafter is None:
            raise ValueError(f"there is no drafter to measure: {model.no_draft_reason}")
        prompts = [row.ids(tokenizer, self.chat_template_config) for row in rows]
        categories = [row.category or ALL for row in rows]
        sums = defaultdict(evaluation.Acceptance)
        settings = self.sampling.options(tokenizer) | {"max_tokens": self.max_tokens}
        for category, found in evaluation.evaluate(model, tokenizer, drafter, prompts, categories, **settings):
            for name in {category, ALL}:
                sums[name] += found
            show_status(f"{sums[ALL].prompts} of {len(prompts)} prompts")
        show_status("")
        estimate = None if on is None else evaluation.byte_limit(model, drafter, sums[ALL], on)
        found = {"categories": {name: _object(found) for name, found in sums.items()}, "estimate": estimate}
        report(found, _lines(found))
        return sums[ALL].identical == sums[ALL].prompts


def _object(found: Any) -> dict[str, Any]:
    """The figures of an `Acceptance`."""
    counts, names = found.sums, ("rounds", "acceptance_length", "accept_histogram")
    return {
        "prompts": found.prompts,
        "identical": found.identical,
        "tokens": counts.generation_tokens,
        **{name: getattr(counts, name) for name in names},
        "slots": found.slots(),
        "calibration": [dict(estimate=e, kept=k, count=n) for e, k, n in found.calibration()],
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    categories, limit = found["categories"], found["estimate"]
    rows = [("", "prompts", "tokens", "tokens per pass", "slot by slot, kept where those before were")]
    for name in sorted(categories, key=lambda name: (name != ALL, name)):
        each = categories[name]
        slots = " ".join(f"{share:.2f}" for share in each["slots"])
        rows.append((name, f"{each['prompts']}", f"{each['tokens']}", f"{each['acceptance_length']:.2f}", slots))
    yield table(rows)
    total = categories[ALL]
    if bins := total["calibration"]:
        yield "the drafter's own estimate, and how often such a token was kept:"
        yield "  " + "  ".join(f"{each['estimate']:.2f} → {each['kept']:.2f} ({each['count']})" for each in bins)
    yield f"parity: {total['identical']} of {total['prompts']} texts identical to plain decoding"
    if limit:
        yield (
            f"estimate for {limit['chip']} ({limit['bandwidth']:.0f} GB/s), by bytes alone, weights read once a pass: "
            f"at most {limit['speculative_tps']:.1f} tok/s, plain decoding {limit['plain_tps']:.1f} "
            f"({limit['ratio']:.2f} ×)"
        )
