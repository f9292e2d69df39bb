"""Text of models and files on a terminal, which would obey what is in it."""

import re
from typing import TextIO

# C0 but for tab and newline, DEL, C1; what turns the direction of the text around it; halves of surrogate pairs.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, stream: TextIO) -> str:
    """The text for a stream: escaped as Python writes it (`\\x1b`) on a terminal, as it is for a pipe or a file.

    Line ends and tabs stay. Each character stands alone, so a text may come in any pieces.
    """
    if not stream.isatty():
        return text
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
