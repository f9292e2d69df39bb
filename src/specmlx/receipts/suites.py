"""Prompts to measure with, by kind. Written for specmlx, under its licence."""

import random

CODE = (
    "Write a Python function that merges two sorted lists into one sorted list, without using sorted().",
    "Write a Python class for a bank account with deposit, withdraw and a history of transactions.",
    "Write a function in JavaScript that returns the n-th Fibonacci number with memoization, and two tests for it.",
    "Translate this loop into a list comprehension and explain it: result = []; for x in data: if x > 0: "
    "result.append(x * x)",
    "Write a SQL query that lists each customer's name with the number and the total value of their orders in 2025.",
    "Write a Python script that reads a CSV file and prints the mean and the median of every numeric column.",
)
MATH = (
    "A train leaves at 9:40 and travels 186 km at 62 km/h. When does it arrive? Show each step.",
    "Solve the system 3x + 2y = 16 and 5x - y = 5 step by step.",
    "What is the sum of all multiples of 3 or 7 below 100? Show how you count those that are multiples of both.",
    "A shirt costs 48 euros after a discount of 20 %. What did it cost before? Then add 19 % tax. Explain each step.",
    "Count from 1 to 40 in steps of 3, then give the sum of the numbers that you named.",
    "A rectangle's length is 5 more than twice its width, and its area is 168. Find both sides, step by step.",
)
CHAT = (
    "I have three days in a city by the sea in November. What would you do there when it rains?",
    "Explain to a ten-year-old why the moon changes its shape.",
    "Write a short, friendly message to a neighbour whose dog barks at night.",
    "What are good and bad reasons to change one's job every two years?",
    "Tell me a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Give me a plan for learning to cook ten simple dishes in two months.",
)
NO_ENGLISH = (
    "Napiš krátkou pohádku o třech kamenech, které chtěly vidět moře.",
    "Kerro lyhyesti, miten järvi jäätyy ja miksi jää kelluu.",
    "Írj négy mondatot arról, hogyan telik egy nap egy hegyi faluban.",
)
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


SUITES = {"code": CODE, "math": MATH, "chat": CHAT, "long": long_prompts(), HOPELESS: (*random_text(), *NO_ENGLISH)}
