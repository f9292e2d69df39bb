"""What `specmlx parity` prints."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specmlx.receipts.parity import Difference, Verdict


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


def as_object(model: str, texts: list[str], results: "dict[str, list[Verdict]]", tokenizer: Any) -> dict[str, Any]:
    """Everything, for `--json`; `results` by what was held against plain decoding."""
    from specmlx.receipts.parity import total

    comparisons = {}
    for name, verdicts in results.items():
        sums = total(verdicts)
        prompts = [
            {"prompt": text} | _prompt_object(verdict, tokenizer) for text, verdict in zip(texts, verdicts, strict=True)
        ]
        comparisons[name] = asdict(sums) | {"acceptance_length": sums.acceptance_length, "by_prompt": prompts}
    passed = all(verdict.passed for verdicts in results.values() for verdict in verdicts)
    return {"model": model, "passed": passed, "comparisons": comparisons}


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
