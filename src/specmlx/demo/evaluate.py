"""What the embedded pair does on held-out questions: `python -m specmlx.demo.evaluate` prints the README's figures."""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass

import click

from specmlx.demo.tasks import KINDS, Example, held_out_examples
from specmlx.training.answers import distinct_3grams

PER_KIND = 40


@dataclass
class Answers:
    """Sums over the answers of one kind of question."""

    questions: int = 0
    right: int = 0
    tokens: int = 0
    rounds: int = 0
    distinct_3grams: float = 0.0

    def figures(self) -> dict[str, float]:
        """Shares and means: exactly right, tokens an answer, distinct 3-grams, tokens per target pass (τ)."""
        n = max(self.questions, 1)
        return {
            "questions": self.questions,
            "right": round(self.right / n, 4),
            "mean_tokens": round(self.tokens / n, 2),
            "distinct_3grams": round(self.distinct_3grams / n, 4),
            "acceptance_length": round(self.tokens / max(self.rounds, 1), 3),
        }

    def __add__(self, other: "Answers") -> "Answers":
        return Answers(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


def answer(model, tokenizer, examples: list[Example], max_tokens: int = 160, **options) -> dict[str, Answers]:
    """Answer each question greedily by the real loop; figures added up by kind. Options: stream_generate's."""
    from specmlx.generation.generate import stream_generate

    answers: dict[str, Answers] = defaultdict(Answers)
    for example in examples:
        messages = [{"role": "user", "content": example.question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        text, ids = "", []
        for response in stream_generate(model, tokenizer, prompt, max_tokens, num_draft_tokens="full", **options):
            text += response.text
            ids.append(response.token)
        right = text == example.answer and response.finish_reason == "stop"
        answers[example.kind] += Answers(1, right, len(ids), response.stats.rounds, distinct_3grams(ids))
    return answers


@click.command()
@click.option("--model", default="demo", show_default=True, help="A directory with the demo's tokenizer.")
@click.option("--draft-model", "drafters", multiple=True, help="Default: demo/dflash and demo/dspark; none is plain.")
@click.option("--per-kind", default=PER_KIND, show_default=True, help="Held-out questions of each kind.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(model: str, drafters: tuple[str, ...], per_kind: int, as_json: bool) -> None:
    """Answer held-out questions with each drafter at full width, and print how often they are right and at what τ."""
    from specmlx.loading.load import load, load_drafter

    target, tokenizer = load(model, draft_model=None, dtype="float32")
    examples = held_out_examples(per_kind)
    report = {}
    for name in drafters or ("demo/dflash", "demo/dspark"):
        drafter = None if name == "none" else load_drafter(name, target)
        answers = answer(target, tokenizer, examples, draft_model=drafter)
        total = sum((answers[kind] for kind in KINDS), Answers())
        report[name] = {"all": total.figures(), **{kind: answers[kind].figures() for kind in KINDS}}
    if as_json:
        click.echo(json.dumps(report))
        return
    for name, by_kind in report.items():
        click.echo(f"{name}, greedy, full width, {len(examples)} held-out questions")
        click.echo(f"  {'kind':<12} {'right':>7} {'tokens':>7} {'distinct 3-grams':>17} {'τ':>6}")
        for kind, f in by_kind.items():
            click.echo(
                f"  {kind:<12} {f['right']:>7.1%} {f['mean_tokens']:>7.1f} {f['distinct_3grams']:>17.3f} "
                f"{f['acceptance_length']:>6.2f}"
            )


if __name__ == "__main__":
    main()
