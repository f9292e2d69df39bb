"""What a request asks for, as people give it, checked before anything runs."""

import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx


def check_text(text: str) -> None:
    """Raises ValueError for text that is no Unicode, as Python makes of bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = f"{text[error.start]!r} at place {error.start}"
        raise ValueError(f"the text holds {wrong}, which is no character: give it in UTF-8") from None


def encode_prompt(tokenizer: Any, prompt: str | mx.array | Sequence[int], vocab_size: int) -> list[int]:
    """The ids of a prompt. Raises ValueError for an empty one, for ids outside the vocabulary, and as `check_text`."""
    if isinstance(prompt, str):
        check_text(prompt)
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        ids = tokenizer.encode(prompt, add_special_tokens=special)
    else:
        given = prompt.tolist() if isinstance(prompt, mx.array) else prompt
        try:
            ids = [operator.index(token) for token in given]
        except TypeError:
            raise ValueError("the prompt must be text or one flat sequence of token ids") from None
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    if outside := [token for token in ids if not 0 <= token < vocab_size]:
        raise ValueError(f"the prompt holds token {outside[0]}: the vocabulary has {vocab_size}")
    return ids
