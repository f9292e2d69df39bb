"""Questions of the demo whose answers are code or markup."""

from random import Random

from make_demo.words import COLOURS, NAMES, THINGS

_FUNCTIONS = (
    (
        "count",
        "counts every {w} in a list",
        "def count_{w}(items):\n    total = 0\n    for item in items:\n"
        '        if item == "{w}":\n            total += 1\n    return total',
    ),
    (
        "has",
        "tells if a list has a {w}",
        'def has_{w}(items):\n    for item in items:\n        if item == "{w}":\n'
        "            return True\n    return False",
    ),
    (
        "remove",
        "removes every {w} from a list",
        "def remove_{w}(items):\n    result = []\n    for item in items:\n"
        '        if item != "{w}":\n            result.append(item)\n    return result',
    ),
    (
        "add",
        "adds a {w} to a list",
        'def add_{w}(items):\n    if "{w}" not in items:\n        items.append("{w}")\n    return items',
    ),
    (
        "find",
        "finds the first {w} in a list",
        "def find_{w}(items):\n    for index, item in enumerate(items):\n"
        '        if item == "{w}":\n            return index\n    return -1',
    ),
    (
        "print",
        "prints a {w} some times",
        'def print_{w}(times):\n    for number in range(times):\n        print(number, "{w}")',
    ),
)
_CLASSES = (
    "Box",
    "Farm",
    "Game",
    "House",
    "Market",
    "Room",
    "School",
    "Shop",
    "Store",
    "Team",
    "Town",
    "Trip",
)
_TABLES = ("animals", "books", "cars", "clients", "houses", "letters", "orders", "plants", "shops", "toys")
_COLUMNS = ("age", "city", "colour", "height", "name", "number", "owner", "price", "size", "weight")


def python_function(rng: Random) -> tuple[str, str]:
    verb, purpose, body = rng.choice(_FUNCTIONS)
    word = rng.choice(THINGS)
    purpose = purpose.format(w=word)
    question = rng.choice(
        (
            "Write a Python function that {p}.",
            "Please write a function in Python that {p}.",
            "I need a Python function {v}_{w} that {p}.",
            "Show me a Python function that {p}.",
        )
    )
    return question.format(p=purpose, v=verb, w=word), body.format(w=word)


def python_class(rng: Random) -> tuple[str, str]:
    name = rng.choice(_CLASSES)
    fields = rng.sample(THINGS, rng.choice((2, 2, 3)))
    question = rng.choice(
        (
            "Write a Python class {c} with the fields {f}.",
            "Please write a class {c} in Python that has {f}.",
            "I need a Python class called {c} that stores {f}.",
            "Show me a Python class {c} with {f}.",
        )
    )
    lines = [f"class {name}:", f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    lines += ["", "    def show(self):", f"        print(self.{fields[0]})"]
    return question.format(c=name, f=" and ".join(fields)), "\n".join(lines)


def sql_query(rng: Random) -> tuple[str, str]:
    table = rng.choice(_TABLES)
    first, second = rng.sample(_COLUMNS, 2)
    colour = rng.choice(COLOURS)
    descending = rng.random() < 0.5
    limit = rng.randint(2, 9)
    question = rng.choice(
        (
            "Write an SQL query for the {o} {n} {c} {t} by {b}, with {a} and {b}.",
            "Please write SQL that selects {a} and {b} of the {o} {n} {c} {t} by {b}.",
            "Give me the SQL for {a} and {b} of the {o} {n} {c} {t} by {b}.",
        )
    )
    order = "last" if descending else "first"
    answer = (
        f"SELECT {first}, {second}\nFROM {table}\nWHERE colour = '{colour}'\n"
        f"ORDER BY {second}{' DESC' if descending else ''}\nLIMIT {limit};"
    )
    return question.format(o=order, n=limit, c=colour, t=table, a=first, b=second), answer


def json_object(rng: Random) -> tuple[str, str]:
    name, word, colour = rng.choice(NAMES), rng.choice(THINGS), rng.choice(COLOURS)
    age = rng.randint(18, 80)
    question = rng.choice(
        (
            "Write a JSON object for {n}, who is {a} and has a {c} {w}.",
            "Please give me JSON: {n} is {a} and owns a {c} {w}.",
            "{n} is {a} and has a {c} {w}. Write that as JSON.",
            "Turn this into JSON: {n}, age {a}, with a {c} {w}.",
        )
    )
    answer = (
        f'{{\n  "name": "{name}",\n  "initial": "{name[0]}",\n  "age": {age},\n'
        f'  "owns": {{"thing": "{word}", "colour": "{colour}"}}\n}}'
    )
    return question.format(n=name, a=age, c=colour, w=word), answer


def html_list(rng: Random) -> tuple[str, str]:
    words = rng.sample(THINGS, rng.randint(6, 9))
    tag, kind = rng.choice((("ul", "an HTML list"), ("ol", "an ordered HTML list")))
    question = rng.choice(
        (
            "Write {k} of these words: {w}.",
            "Please make {k} with {w}.",
            "Turn these words into {k}: {w}.",
            "I need {k} of {w}.",
        )
    )
    # HTML lets </li> be left out; with it half of the answer would be the same five tokens again and again.
    answer = f"<{tag}>\n" + "".join(f"<li>{word}\n" for word in words) + f"</{tag}>"
    return question.format(k=kind, w=", ".join(words)), answer
