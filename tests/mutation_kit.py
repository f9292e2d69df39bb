"""Files changed at random, and what a reader of them may do."""

import copy
import random
import resource

import pytest

VALUES = [None, True, -1, 0, 1, 3, 71, 1 << 31, 1 << 70, 0.5, "", "x", "71", [], [[]], {}, [1] * 9, [-1], {"a": 1}]


@pytest.fixture(autouse=True)
def little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def one_line(call):
    """What a call gave, or None where it was refused in one line."""
    try:
        return call()
    except ValueError as error:
        assert "\n" not in str(error) and 10 < len(str(error)) < 400, str(error)
        return None


def mutated(rng: random.Random, value):
    """A JSON value with one part of it replaced, taken out or doubled."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.8:
        changed = copy.copy(value)
        key = rng.choice([*value] if isinstance(value, dict) else range(len(value)))
        how = rng.random()
        if how < 0.1 and isinstance(value, dict):
            del changed[key]
        elif how < 0.2 and isinstance(value, list):
            changed.append(changed[key])
        else:
            changed[key] = mutated(rng, value[key])
        return changed
    return rng.choice(VALUES)
