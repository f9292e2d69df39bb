"""Prompts to train on: JSONL in mlx-lm's chat, completions and text forms, or prompts alone."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specmlx.loading.hub import is_id

HELD_OUT = 0.05
_FORMS = "messages (a chat), prompt (and completion), or text"


@dataclass(frozen=True)
class Row:
    """One line of a data file: a chat up to the turn that the target is to answer, or a text as it is.

    messages: turns before the answer; empty for a text. tools: what the chat template is given as such.
    category: the row's own field of that name, "" without one. held_out: whether it is kept for measuring.
    where: the file and line that it comes from, "" for one that was made by hand.
    """

    messages: tuple[dict[str, Any], ...] = ()
    text: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    category: str = ""
    where: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """A hash of what the target is asked."""
        asked = json.dumps([self.messages, self.tools, self.text], sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()

    @property
    def held_out(self) -> bool:
        return int(self.key, 16) < HELD_OUT * 2**64

    def ids(self, tokenizer: Any, template_config: dict[str, Any] | None = None) -> list[int]:
        """The tokens of the prompt as the chat template renders it, or of the text.

        template_config: what the template is given by name, as {"enable_thinking": False}. Raises ValueError, naming
        the row's line, where there is no chat template, it refuses the messages, or a tool's arguments are no JSON.
        """
        if self.text is not None:
            return tokenizer.encode(self.text)
        if not tokenizer.has_chat_template:
            raise ValueError("the model's tokenizer has no chat template: give rows of text")
        tools = list(self.tools) if self.tools else None
        where = f"{self.where}: " if self.where else ""
        try:
            messages = [_parsed(message) for message in self.messages]
            return tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, **(template_config or {})
            )
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}a tool call's arguments are no JSON ({error.msg})") from None
        # A template is a program that came with the model: it may raise anything.
        except Exception as error:
            asked = json.dumps(self.messages, ensure_ascii=False)[:80]
            raise ValueError(f"{where}the chat template fails on {asked}: {error}") from error


def _parsed(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls' arguments, JSON text in OpenAI's form, are objects, as templates take them."""
    if not isinstance(calls := message.get("tool_calls"), list):
        return message
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str) and arguments:
            call = call | {"function": function | {"arguments": json.loads(arguments)}}
        found.append(call)
    return message | {"tool_calls": found}


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a JSONL file, each question once. Raises ValueError, naming the line, for what can't be used."""
    rows: dict[str, Row] = {}
    try:
        # Not splitlines(): JSON's strings may hold other separators of lines as they are.
        lines = Path(path).read_text(encoding="utf-8-sig").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"can't read {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise ValueError(f"{path}, line {number} is empty: give lines of JSON with {_FORMS}")
        try:
            row = replace(_row(json.loads(line)), where=f"{path}, line {number}")
            rows.setdefault(row.key, row)
        except ValueError as error:
            what = f"no JSON ({error.msg})" if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(f"{path}, line {number}: {what}") from None
    return list(rows.values())


def _row(fields: Any) -> Row:
    if isinstance(fields, str):
        fields = {"prompt": fields}
    if not isinstance(fields, dict):
        raise ValueError(f"a {type(fields).__name__}, not an object with {_FORMS}")
    category = str(fields.get("category", ""))
    if "messages" in fields:
        turns, tools = fields["messages"], fields.get("tools")
        if not isinstance(turns, list) or not all(isinstance(m, dict) and "role" in m for m in turns):
            raise ValueError("messages must be a list of objects with a role and content")
        # Up to the last turn of the user's: the target gives its own answer.
        while turns and turns[-1]["role"] == "assistant":
            turns = turns[:-1]
        if not any(turn.get("content") for turn in turns):
            raise ValueError("messages ask nothing: no turn before the assistant's")
        if not isinstance(tools, (list, type(None))):
            raise ValueError("tools must be a list")
        return Row(tuple(turns), tools=None if tools is None else tuple(tools), category=category)
    if not (name := "prompt" if "prompt" in fields else "text" if "text" in fields else None):
        raise ValueError(f"has {', '.join(fields) or 'nothing'}: it needs {_FORMS}")
    text = fields[name]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{name} must be a text that is not empty")
    if name == "text":
        return Row(text=text, category=category)
    return Row(({"role": "user", "content": text},), category=category)


def find_rows(data: str) -> list[Row]:
    """The rows of a file, or of the *.jsonl files of a Hub dataset. Raises ValueError where there are none."""
    if Path(data).exists():
        return read_rows(data)
    if not is_id(data):
        raise ValueError(f"no such file: {data} (nor is it a Hub dataset like owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(data, repo_type="dataset", allow_patterns=["*.jsonl"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ValueError(f"can't get the dataset {data}: {' '.join(str(error).split())[:200]}") from None
    if not (files := sorted(folder.rglob("*.jsonl"))):
        raise ValueError(f"the dataset {data} has no *.jsonl files: convert it to lines of JSON with {_FORMS}")
    return list({row.key: row for file in files for row in read_rows(file)}.values())
