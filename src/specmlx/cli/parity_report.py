"""What `specmlx parity` prints."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specmlx.evaluation.parity import Difference, Verdict

# Follows a drafter's name where the kernels are those that run without --consistent.
DEFAULT = "by the default kernels"
COUNTS = ("rounds", "proposed", "accepted", "accept_histogram")


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
    from specmlx.evaluation.parity import total

    sums, passed = total(verdicts), sum(verdict.passed for verdict in verdicts)
    text = f"{passed} of {len(verdicts)} prompts pass, {_count(sums.generation_tokens, 'token')}"
    if not sums.rounds:
        return text
    histogram = ", ".join(f"{accepted}: {rounds}" for accepted, rounds in enumerate(sums.accept_histogram))
    return (
        f"{text}, {_count(sums.rounds, 'round')}, {sums.proposed} proposed, {sums.accepted} accepted, "
        f"{sums.acceptance_length:.2f} tokens a round; rounds by accepted tokens: {histogram}"
    )


def summary(results: "dict[str, list[Verdict]]", default: "dict[str, list[Verdict]]") -> Iterator[str]:
    """The last lines: sums by what was compared with plain decoding, with `consistent` and by the default choice."""
    for name, found in results.items():
        kernels = " with --consistent" if default else ""
        yield f"{name}{kernels}: {total_line(found)}"
    for name, found in default.items():
        yield f"{name} {DEFAULT}: {agreement(found)}"


def agreement(verdicts: "list[Verdict]") -> str:
    """How many decodings are identical, and the margins where the others part: they need not agree."""
    text = f"{sum(verdict.identical for verdict in verdicts)} of {len(verdicts)} prompts identical"
    parted = [verdict.difference for verdict in verdicts if verdict.difference is not None]
    if not parted:
        return text
    margin = max((found.margin for found in parted if found.margin is not None), default=0)
    first = min(found.index for found in parted)
    return f"{text}, first difference at token {first}, top-2 margins where they part up to {margin:.3g}"


def as_object(
    model: str,
    texts: list[str],
    results: "dict[str, list[Verdict]]",
    tokenizer: Any,
    default: "dict[str, list[Verdict]] | None" = None,
) -> dict[str, Any]:
    """Everything, for `--json`; `results` by what was compared with plain decoding.

    `default`: the same with the default choice of kernels, where `results` are those of `consistent`.
    """
    from specmlx.evaluation.parity import total

    def comparisons(results: "dict[str, list[Verdict]]") -> dict[str, Any]:
        found = {}
        for name, verdicts in results.items():
            sums, pairs = total(verdicts), zip(texts, verdicts, strict=True)
            prompts = [{"prompt": text} | _prompt_object(verdict, tokenizer) for text, verdict in pairs]
            counts = {name: getattr(sums, name) for name in (*COUNTS, "acceptance_length")}
            passed = sum(verdict.passed for verdict in verdicts)
            outcome = {"prompts": len(verdicts), "passed": passed, "tokens": sums.generation_tokens}
            found[name] = outcome | counts | {"by_prompt": prompts}
        return found

    passed = all(verdict.passed for verdicts in results.values() for verdict in verdicts)
    report = {"model": model, "passed": passed, "comparisons": comparisons(results)}
    return report | ({"default_choice": comparisons(default)} if default else {})


def _prompt_object(verdict: "Verdict", tokenizer: Any) -> dict[str, Any]:
    found = verdict.difference
    counts = {} if verdict.stats is None else {name: getattr(verdict.stats, name) for name in COUNTS}
    texts = found and {f"{of}_text": _text(getattr(found, of), tokenizer) for of in ("plain", "other")}
    outcome = {name: getattr(verdict, name) for name in ("tokens", "identical", "passed")}
    return outcome | counts | {"difference": found and asdict(found) | texts}


def _difference(found: "Difference", tokenizer: Any) -> str:
    def named(token: int | None) -> str:
        return "the end" if token is None else f"{token} {_text(token, tokenizer)!r}"

    margin = "" if found.margin is None else f"; top-2 margin {found.margin:.3g}"
    return f"differs at token {found.index}: plain {named(found.plain)}, here {named(found.other)}{margin}"


def _text(token: int | None, tokenizer: Any) -> str | None:
    return None if token is None else tokenizer.decode([token])


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
