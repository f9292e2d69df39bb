"""Prompts to measure with, by kind. Written for specmlx, under its licence."""

import json
import random
from importlib.resources import files

PROMPTS: dict[str, list[str]] = json.loads(files(__package__).joinpath("prompts.json").read_text(encoding="utf-8"))
HOPELESS = "hopeless"
"""The suite on which no drafter should be of use: random text, and languages that drafters have seldom seen."""


def long_prompts(records: int = 120) -> tuple[str, ...]:
    """A register of a few thousand tokens with a question about it, and another with a summary to write."""
    rng = random.Random(20)
    goods = ("lamps", "maps", "ropes", "clocks", "kettles", "pictures", "blankets", "radios")
    towns = ("Arden", "Borso", "Celm", "Dunwick", "Elvas", "Fenholt")
    lines = [
        f"Record {number}: on day {rng.randint(1, 28)}, {rng.choice(towns)} received {rng.randint(2, 90)} "
        f"{rng.choice(goods)} from {rng.choice(towns)}, and paid {rng.randint(20, 900)} crowns."
        for number in range(1, records + 1)
    ]
    register = "\n".join(lines)
    return (
        f"{register}\n\nList the records in which {towns[0]} received {goods[0]}, word for word, then count them.",
        f"{register}\n\nSummarise this register: which town received most often, and which goods travelled most?",
    )


def random_text(count: int = 3) -> tuple[str, ...]:
    """Prompts of letters that nobody has seen in this order."""
    rng = random.Random(7)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789 #/+;"
    return tuple("".join(rng.choices(letters, k=200)) for _ in range(count))


def suite(name: str) -> tuple[str, ...]:
    """The prompts of a suite; ValueError, with the names that there are, for another."""
    if name == "demo":
        from specmlx.demo.tasks import held_out_examples

        return tuple(example.question for example in held_out_examples(1))
    if name not in SUITES:
        raise ValueError(f"there is no suite {name}: choose from {', '.join([*SUITES, 'demo'])}")
    return SUITES[name]


SUITES = {name: tuple(PROMPTS[name]) for name in ("code", "math", "chat")}
SUITES |= {"long": long_prompts(), HOPELESS: (*random_text(), *PROMPTS["no_english"])}
