"""Where a chat's next prompt may part from this one: what the chat template puts around turns, found by rendering."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

# Words that no template knows, and whose ends no template trims.
_ASKED, _ANSWERED, _NEXT = "Qzasked", "Qzanswered", "Qznext"

# Answers of each kind: plain ones, with space around, with thoughts that the prompt began, and with whole ones.
_KINDS = {
    "plain": _ANSWERED,
    "spaced": f" {_ANSWERED}\n",
    "thoughts": f"{_ANSWERED}\n</think>\n\n{_ANSWERED}",
    "whole thoughts": f"<think>\n{_ANSWERED}\n</think>\n\n{_ANSWERED}",
}


@dataclass(frozen=True)
class Turns:
    """Token ids that a template puts before an answer, in the history as well as where one is asked for, and before
    the question after it; both empty where that can't be told.

    kept: the kinds of answers that the history holds as they were generated.
    """

    answer: list[int]
    question: list[int]
    kept: frozenset[str]


def turns(tokenizer: Any) -> Turns:
    """What the tokenizer's chat template does to turns. It is a program that may run for ever: never in a worker."""
    if not tokenizer.has_chat_template:
        return Turns([], [], frozenset(_KINDS))
    rendered = {kind: _rendered(tokenizer, answer) for kind, answer in _KINDS.items()}
    kept = frozenset(
        kind for kind, (asked, history) in rendered.items() if asked and history.startswith(asked + _KINDS[kind])
    )
    asked, history = rendered["plain"]
    if asked is None or _ANSWERED not in history or _NEXT not in history:
        return Turns([], [], kept)
    before, after = history.split(_ANSWERED, 1)
    common = os.path.commonprefix([asked, before])
    question = after.split(_NEXT, 1)[0]
    ids = partial(tokenizer.encode, add_special_tokens=False)
    return Turns(ids(common), ids(question), kept) if common and question else Turns([], [], kept)


def stable(ids: Sequence[int], around: Turns) -> list[int]:
    """How many first ids of a prompt the next turn's prompt will begin with, as far as the template alone can tell.

    Three places: where the answer is asked for (what is behind may be rendered differently once there is one), where
    the first answer after the last question begins (thoughts between tool calls are dropped at the next question), and
    where the system prompt ends, with which other chats begin. Without turns in the ids the whole prompt is stable.
    """
    if not around.answer or (last := _find(ids, around.answer, last=True)) is None:
        return [len(ids)]
    first = _find(ids, around.answer, start=_find(ids, around.question, last=True) or 0)
    # The last token may yet be merged with what follows it.
    places = {place + len(around.answer) - 1 for place in (first, last) if place is not None}
    begun = _find(ids, around.question)
    if begun is not None and begun < _find(ids, around.answer):
        places.add(begun + len(around.question) - 1)
    return sorted(places)


def keeps(answer: str, ids: Sequence[int], around: Turns) -> bool:
    """Whether a later prompt will hold the answer right behind this prompt, as far as the template tells."""
    if around.answer and _find(ids, around.answer, last=True) is None:
        return True
    kinds = {"plain"} if answer == answer.strip() else {"plain", "spaced"}
    if "</think>" in answer:
        kinds = {"whole thoughts" if answer.lstrip().startswith("<think>") else "thoughts", *kinds - {"plain"}}
    return kinds <= around.kept


def _rendered(tokenizer: Any, answer: str) -> tuple[str, str] | tuple[None, None]:
    """The text behind a question, up to where its answer begins, and the same with the answer and one more question."""

    def render(*messages: tuple[str, str]) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    try:
        asked = render(("user", _ASKED))
        history = render(("user", _ASKED), ("assistant", answer), ("user", _NEXT))
    # A template is a program that came with the model: it may raise anything.
    except Exception:
        return None, None
    if _ASKED not in asked or _ASKED not in history:
        return None, None
    return asked.split(_ASKED, 1)[1], history.split(_ASKED, 1)[1]


def _find(ids: Sequence[int], part: list[int], start: int = 0, last: bool = False) -> int | None:
    places = range(start, len(ids) - len(part) + 1)
    places = reversed(places) if last else places
    return next((i for i in places if ids[i] == part[0] and [*ids[i : i + len(part)]] == part), None)
