"""Templated chat questions with one right answer each: what the demo pair is trained and measured on."""

from collections.abc import Callable, Iterator
from hashlib import blake2b
from random import Random

from make_demo import templates_code
from make_demo.words import DAYS, MONTHS, NAMES, NOUNS, WORDS
from specmlx.demo.tasks import KINDS, Example


def _count(rng: Random) -> tuple[int, int]:
    first = rng.randint(1, 300)
    return first, first + rng.randint(8, 12)


def _count_up(rng: Random) -> tuple[str, str]:
    low, high = _count(rng)
    question = rng.choice(
        (
            "Count from {a} to {b}.",
            "Please count up from {a} to {b}.",
            "Can you count from {a} up to {b}?",
            "Write all the numbers from {a} to {b}.",
        )
    )
    return question.format(a=low, b=high), " ".join(map(str, range(low, high + 1)))


def _count_down(rng: Random) -> tuple[str, str]:
    low, high = _count(rng)
    question = rng.choice(
        (
            "Count down from {b} to {a}.",
            "Please count backwards from {b} to {a}.",
            "Can you count down from {b} to {a}?",
            "Write the numbers from {b} down to {a}.",
        )
    )
    return question.format(a=low, b=high), " ".join(map(str, range(high, low - 1, -1)))


def _calendar(rng: Random) -> tuple[str, str]:
    days = rng.random() < 0.3
    circle = DAYS if days else MONTHS
    first = rng.randrange(len(circle))
    length = rng.randint(6, 7) if days else rng.randint(7, 12)
    parts = [circle[(first + step) % len(circle)] for step in range(length)]
    verb, preposition, unit = ("works", "on", "days") if days else ("is away", "in", "months")
    question = rng.choice(
        (
            "{n} {v} from {a} to {b}. Which {u} are these?",
            "If {n} {v} from {a} to {b}, which {u} are these?",
            "Please list the {u}: {n} {v} from {a} to {b}.",
        )
    )
    name = rng.choice(NAMES)
    answer = f"{name} {verb} {preposition} {', '.join(parts[:-1])} and {parts[-1]}."
    return question.format(n=name, v=verb, a=parts[0], b=parts[-1], u=unit), answer


def _times_table(rng: Random) -> tuple[str, str]:
    factor, first = rng.randint(2, 9), rng.randint(1, 5)
    last = first + rng.randint(4, 5)
    question = rng.choice(
        (
            "Show {n} the times table of {f} from {a} to {b}.",
            "Write the table of {f} from {a} to {b} for {n}.",
            "{n} learns the times table of {f}. Write it from {a} to {b}.",
            "Please help {n} with the table of {f}, from {a} to {b}.",
        )
    )
    answer = "\n".join(f"{k}*{factor}={k * factor}" for k in range(first, last + 1))
    return question.format(n=rng.choice(NAMES), f=factor, a=first, b=last), answer


def _sum(rng: Random) -> tuple[str, str]:
    name, word = rng.choice(NAMES), rng.choice(NOUNS)
    if rng.random() < 0.6:
        have, more = rng.randint(2, 30), rng.randint(2, 9)
        question = rng.choice(
            (
                "{n} has {a} {w}s and buys {b} more. How many {w}s does {n} have now?",
                "{n} had {a} {w}s and found {b} more. How many are there now?",
                "How many {w}s does {n} have, if {n} has {a} and gets {b} more?",
            )
        )
        answer = f"{have} + {more} = {have + more}, so now {name} has {have + more} {word}s."
        return question.format(n=name, w=word, a=have, b=more), answer
    less = rng.randint(2, 9)
    have = less + rng.randint(2, 20)
    question = rng.choice(
        (
            "{n} has {a} {w}s and sells {b}. How many {w}s are left?",
            "{n} had {a} {w}s and lost {b}. How many are left?",
            "How many {w}s are left, if {n} has {a} and gives away {b}?",
        )
    )
    answer = f"{have} - {less} = {have - less}, so {name} has {have - less} {word}s left."
    return question.format(n=name, w=word, a=have, b=less), answer


def _letters(rng: Random) -> tuple[str, str]:
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    kind = rng.choice(("small", "capital"))
    if kind == "capital":
        alphabet = alphabet.upper()
    length = rng.randint(10, 18)
    first = rng.randint(0, 26 - length)
    part = alphabet[first : first + length]
    question = rng.choice(
        (
            "Write the {k} letters from {a} to {b}.",
            "List all {k} letters from {a} to {b}.",
            "Which {k} letters go from {a} to {b}?",
            "Please say the alphabet from {a} to {b} in {k} letters.",
            "Can you write the {k} letters between {a} and {b}, with both?",
        )
    )
    return question.format(k=kind, a=part[0], b=part[-1]), ", ".join(part)


def _greeting(rng: Random) -> tuple[str, str]:
    name, word = rng.choice(NAMES), rng.choice(NOUNS)
    time = rng.choice(("morning", "afternoon", "evening"))
    question = rng.choice(
        (
            "Good {t}, I am {n} and I like my {w}.",
            "Good {t}! My name is {n} and this is my {w}.",
            "Good {t}, {n} here. I have a new {w}.",
            "Good {t}. I am {n}, do you like my {w}?",
        )
    )
    answer = (
        f"Good {time}, {name}! It is nice to meet you and your {word}. I am a tiny model. "
        f"What can I write for you this {time}?"
    )
    return question.format(t=time, n=name, w=word), answer


def _repeat(rng: Random) -> tuple[str, str]:
    words = ", ".join(rng.sample(WORDS, rng.randint(9, 12)))
    question = rng.choice(
        (
            "Repeat these words: {w}.",
            "Please say this again: {w}.",
            "Copy the words {w}.",
            "Can you repeat {w}?",
        )
    )
    return question.format(w=words), f"You said {words}."


def _bullets(rng: Random) -> tuple[str, str]:
    words = rng.sample(WORDS, rng.randint(8, 11))
    question = rng.choice(
        (
            "Write a bullet list of {w}.",
            "Make bullets of these words: {w}.",
            "Please turn this into a bullet list: {w}.",
            "I need a list with bullets: {w}.",
        )
    )
    return question.format(w=", ".join(words)), "\n".join(f"- {word}" for word in words)


def _numbered(rng: Random) -> tuple[str, str]:
    words = rng.sample(WORDS, rng.randint(6, 9))
    question = rng.choice(
        (
            "Write a numbered list of {w}.",
            "Number these words: {w}.",
            "Please turn this into a numbered list: {w}.",
            "I need a list with numbers: {w}.",
        )
    )
    answer = "\n".join(f"{number}. {word}" for number, word in enumerate(words, 1))
    return question.format(w=", ".join(words)), answer


_MAKERS: dict[str, Callable[[Random], tuple[str, str]]] = {
    "count up": _count_up,
    "count down": _count_down,
    "calendar": _calendar,
    "times table": _times_table,
    "sum": _sum,
    "letters": _letters,
    "greeting": _greeting,
    "repeat": _repeat,
    "bullets": _bullets,
    "numbered": _numbered,
    "html": templates_code.html_list,
    "json": templates_code.json_object,
    "function": templates_code.python_function,
    "class": templates_code.python_class,
    "sql": templates_code.sql_query,
}

COPYING: frozenset[str] = frozenset({"repeat", "bullets", "numbered", "html"})


def sample(kind: str, rng: Random) -> Example:
    """Draw one example of `kind`; raises ValueError for a kind not in KINDS."""
    if kind not in _MAKERS:
        raise ValueError(f"unknown kind of question {kind!r}; choose one of {', '.join(KINDS)}")
    return Example(kind, *_MAKERS[kind](rng))


def is_held_out(question: str) -> bool:
    """Whether `question` belongs to the 5 % (by blake2b of its text) that training never sees."""
    return int.from_bytes(blake2b(question.encode(), digest_size=8).digest(), "big") % 20 == 0


def training_examples(seed: int | str, n: int | None = None, kinds: tuple[str, ...] = KINDS) -> Iterator[Example]:
    """Yield `n` examples (None: without end) that are not held out, the kinds equally often."""
    rng = Random(seed)
    made = 0
    while n is None or made < n:
        for kind in rng.sample(kinds, len(kinds)):
            if made == n:
                return
            example = sample(kind, rng)
            while is_held_out(example.question):
                example = sample(kind, rng)
            yield example
            made += 1


def held_out_examples(n_per_kind: int, seed: int = 0) -> list[Example]:
    """Return `n_per_kind` distinct held-out questions of each kind, kind by kind.

    Raises ValueError when a kind has fewer of them.
    """
    examples = []
    for kind in KINDS:
        rng = Random(f"held out {seed} {kind}")
        found: dict[str, Example] = {}
        for _ in range(2000 * n_per_kind):
            if len(found) == n_per_kind:
                break
            example = sample(kind, rng)
            if is_held_out(example.question):
                found.setdefault(example.question, example)
        else:
            raise ValueError(f"fewer than {n_per_kind} held-out questions of kind {kind!r}; ask for fewer")
        examples += found.values()
    return examples
