"""How much a text repeats itself."""

from collections.abc import Sequence


def distinct_3grams(tokens: Sequence[int]) -> float:
    """Share of a text's token 3-grams that are distinct; 1 for a text of fewer than three tokens."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0
