"""What `specmlx parity` prints."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specmlx.receipts.parity import Difference, Verdict

# What stands behind a drafter's name where the kernels are those that serve without --consistent.
DEFAULT = "by the default kernels"


def line(verdict: "Verdict", tokenizer: Any) -> str:
    """One prompt: identical with its counts, or where it parts."""
    if verdict.difference is not None:
        return _difference(verdict.difference, tokenizer)
    tokens, stats = _count(verdict.tokens, "token"), verdict.stats
    if stats is None:
        return f"identical, {tokens}"
    if not verdict.passed:
        return f"no pass: nothing was proposed for {tokens}"
    return f"identical, {tokens}, {_count(stats.rounds, 'round')}, {stats.proposed} proposed, {stats.accepted} accepted"


def total_line(verdicts: "list[Verdict]") -> str:
    """Sums over all prompts, with the histogram of accepted tokens."""
    from specmlx.receipts.parity import total

    sums = total(verdicts)
    text = f"{sums.passed} of {sums.prompts} prompts pass, {_count(sums.tokens, 'token')}"
    if not sums.rounds:
        return text
    histogram = ", ".join(f"{accepted}: {rounds}" for accepted, rounds in enumerate(sums.accept_histogram))
    return (
        f"{text}, {_count(sums.rounds, 'round')}, {sums.proposed} proposed, {sums.accepted} accepted, "
        f"{sums.acceptance_length:.2f} tokens a round; rounds by accepted tokens: {histogram}"
    )


def summary(results: "dict[str, list[Verdict]]", default: "dict[str, list[Verdict]]") -> Iterator[str]:
    """The last lines: sums by what was held against plain decoding, with `consistent` and by the default choice."""
    for name, found in results.items():
        kernels = " with --consistent" if default else ""
        yield f"{name}{kernels}: {total_line(found)}"
    for name, found in default.items():
        yield f"{name} {DEFAULT}: {agreement(found)}"


def agreement(verdicts: "list[Verdict]") -> str:
    """How far decodings that needn't agree do: how many are identical, and at which margins the others part."""
    margins = [v.difference.margin for v in verdicts if v.difference is not None and v.difference.margin is not None]
    first = min((v.difference.index for v in verdicts if v.difference is not None), default=None)
    text = f"{sum(verdict.identical for verdict in verdicts)} of {len(verdicts)} prompts identical"
    if first is None:
        return text
    return (
        f"{text}, first difference at token {first}, top-2 margins where they part up to {max(margins, default=0):.3g}"
    )


def as_object(
    model: str,
    texts: list[str],
    results: "dict[str, list[Verdict]]",
    tokenizer: Any,
    default: "dict[str, list[Verdict]] | None" = None,
) -> dict[str, Any]:
    """Everything, for `--json`; `results` by what was held against plain decoding.

    `default`: the same with the default choice of kernels, where `results` are those of `consistent`.
    """
    passed = all(verdict.passed for verdicts in results.values() for verdict in verdicts)
    report = {"model": model, "passed": passed, "comparisons": _comparisons(texts, results, tokenizer)}
    return report | ({"default_choice": _comparisons(texts, default, tokenizer)} if default else {})


def _comparisons(texts: list[str], results: "dict[str, list[Verdict]]", tokenizer: Any) -> dict[str, Any]:
    from specmlx.receipts.parity import total

    comparisons = {}
    for name, verdicts in results.items():
        sums = total(verdicts)
        prompts = [
            {"prompt": text} | _prompt_object(verdict, tokenizer) for text, verdict in zip(texts, verdicts, strict=True)
        ]
        comparisons[name] = asdict(sums) | {"acceptance_length": sums.acceptance_length, "by_prompt": prompts}
    return comparisons


def _prompt_object(verdict: "Verdict", tokenizer: Any) -> dict[str, Any]:
    stats, found = verdict.stats, verdict.difference
    counts = ("rounds", "proposed", "accepted", "accept_histogram")
    difference = None
    if found is not None:
        texts = {"plain_text": _text(found.plain, tokenizer), "other_text": _text(found.other, tokenizer)}
        difference = asdict(found) | texts
    return {
        "tokens": verdict.tokens,
        "identical": verdict.identical,
        "passed": verdict.passed,
        **({} if stats is None else {name: getattr(stats, name) for name in counts}),
        "difference": difference,
    }


def _difference(found: "Difference", tokenizer: Any) -> str:
    def named(token: int | None) -> str:
        return "the end" if token is None else f"{token} {_text(token, tokenizer)!r}"

    margin = "" if found.margin is None else f"; top-2 margin {found.margin:.3g}"
    return f"differs at token {found.index}: plain {named(found.plain)}, here {named(found.other)}{margin}"


def _text(token: int | None, tokenizer: Any) -> str | None:
    return None if token is None else tokenizer.decode([token])


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
