"""Charts as SVG text: no script, no dependency; colours come from the page's style."""

from collections.abc import Sequence
from html import escape
from math import floor, log10

WIDTH, HEIGHT = 440, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 12, 34
_BAR, _GAP, _LETTER = 16, 8, 6.2

Points = Sequence[tuple[float, float]]


def lines(
    title: str, x_label: str, y_label: str, series: Sequence[tuple[str, Points]], dots: Points = (), y_from: float = 0.0
) -> str:
    """Lines over one pair of axes, each with its style's class, and single dots."""
    points = [*dots, *(point for _, line in series for point in line)]
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    y1 = max(y_from + 1.12 * (max(y for _, y in points) - y_from), y_from + 1e-9)
    x1 = x1 if x1 > x0 else x0 + 1

    def at(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x0) / (x1 - x0) * (WIDTH - _LEFT - _RIGHT)
        return across, HEIGHT - _BOTTOM - (y - y_from) / (y1 - y_from) * (HEIGHT - _TOP - _BOTTOM)

    parts = []
    for y in ticks(y_from, y1):
        left, height = at(x0, y)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(_text(left - 6, height + 4, f"{y:g}", "end"))
    for x in ticks(x0, x1):
        parts.append(_text(at(x, y_from)[0], HEIGHT - _BOTTOM + 16, f"{x:g}", "middle"))
    for kind, line in series:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
        parts.append(f'<polyline class="{kind}" points="{path}"/>')
    parts += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in (at(*dot) for dot in dots)]
    parts.append(_text((_LEFT + WIDTH) / 2, HEIGHT - 4, x_label, "middle"))
    parts.append(_text(4, _TOP - 2, y_label, "start"))
    return _svg(title, HEIGHT, parts)


def bars(title: str, rows: Sequence[tuple[str, float, str]], most: float | None = None, kind: str = "bar") -> str:
    """Horizontal bars: (name, value, the value in words)."""
    most = most or max((value for _, value, _ in rows), default=0) or 1.0
    left = 12 + _LETTER * max((len(name) for name, _, _ in rows), default=0)
    room = WIDTH - left - 12 - _LETTER * max((len(words) for _, _, words in rows), default=0)
    parts = []
    for i, (name, value, words) in enumerate(rows):
        top = i * (_BAR + _GAP)
        width = max(value / most * room, 1.0)
        parts.append(_text(left - 8, top + _BAR - 4, name, "end"))
        parts.append(f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" rx="2"/>')
        parts.append(_text(left + width + 6, top + _BAR - 4, words, "start"))
    return _svg(title, max(len(rows), 1) * (_BAR + _GAP), parts)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from low to high, about so many."""
    rough = (high - low) / about
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = -floor(-low / step + 1e-9)
    return [round(i * step, 12) for i in range(int(first), floor(high / step + 1e-9) + 1)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    body = "".join(parts)
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
    return f"{head}{body}</svg>"
