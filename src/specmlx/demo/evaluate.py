"""What the embedded pair does on held-out questions: `python -m specmlx.demo.evaluate` prints the README's figures."""

import json

import click

from specmlx.decoding.stats import summed
from specmlx.demo.tasks import KINDS, held_out_examples
from specmlx.evaluation.answer import Answer, answer, chat_prompts
from specmlx.generation.scheduler import Scheduler
from specmlx.loading.load import load, load_drafter
from specmlx.training.answers import distinct_3grams


def figures(right: list[bool], answers: list[Answer]) -> dict[str, float]:
    """Shares and means: exactly right, tokens an answer, distinct 3-grams, tokens per target pass (τ)."""
    sums, n = summed(each.stats for each in answers), max(len(answers), 1)
    return {
        "questions": len(answers),
        "right": round(sum(right) / n, 4),
        "mean_tokens": round(sums.generation_tokens / n, 2),
        "distinct_3grams": round(sum(distinct_3grams(each.tokens) for each in answers) / n, 4),
        "acceptance_length": round(sums.acceptance_length, 3),
    }


@click.command()
@click.option("--model", default="demo", show_default=True, help="A directory with the demo's tokenizer.")
@click.option("--draft-model", "drafters", multiple=True, help="Default: demo/dflash and demo/dspark; none is plain.")
@click.option("--per-kind", default=40, show_default=True, help="Held-out questions of each kind.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(model: str, drafters: tuple[str, ...], per_kind: int, as_json: bool) -> None:
    """Answer held-out questions with each drafter at full width, and print how often they are right and at what τ."""
    target, tokenizer = load(model, draft_model=None, dtype="float32")
    examples = held_out_examples(per_kind)
    prompts = chat_prompts(tokenizer, [example.question for example in examples])
    report = {}
    for name in drafters or ("demo/dflash", "demo/dspark"):
        drafter = None if name == "none" else load_drafter(name, target)
        scheduler = Scheduler(target, tokenizer, drafter, "full")
        answers = [answer(scheduler, prompt, 160) for prompt in prompts]
        pairs = zip(examples, answers, strict=True)
        right = [found.text == example.answer and found.finish_reason == "stop" for example, found in pairs]
        report[name] = {"all": figures(right, answers)}
        for i, kind in enumerate(KINDS):
            of_kind = slice(i * per_kind, (i + 1) * per_kind)
            report[name][kind] = figures(right[of_kind], answers[of_kind])
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
