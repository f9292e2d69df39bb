"""How reports print rows in columns, and counts."""

from collections.abc import Sequence

Row = Sequence[str]


def table(rows: Sequence[Row], head: bool = True) -> str:
    """Columns as wide as they need, empty ones left out; text to the left, figures to the right.

    head: whether the first row names the columns.
    """
    columns = [column for column in zip(*rows, strict=True) if any(column[head:])]
    widths = [max(map(len, column)) for column in columns]
    left = [i == 0 or 2 * sum(not _figure(c) for c in x[head:] if c) > len(x) for i, x in enumerate(columns)]
    lines = []
    for cells in zip(*columns, strict=True):
        padded = [c.ljust(w) if to_left else c.rjust(w) for c, w, to_left in zip(cells, widths, left, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _figure(cell: str) -> bool:
    """Whether a cell is a number, with its unit or range: shapes and lists of numbers are text."""
    return cell[0].isdigit() and sum(word[0].isdigit() for word in cell.split()) == 1 and " a token" not in cell


def count(n: int, noun: str) -> str:
    """Like "1 prompt" and "2 prompts"."""
    return f"{n} {noun}{'' if n == 1 else 's'}"
