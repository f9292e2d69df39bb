"""The page: text coloured by how each token came, rounds as a ribbon, charts. It loads nothing from elsewhere."""

from base64 import b64encode
from collections import Counter
from hashlib import sha256
from importlib.resources import files
from itertools import accumulate

from jinja2 import Environment, PackageLoader, StrictUndefined

from specmlx.decoding.stats import HOST, host_share
from specmlx.evaluation.chips import CHIPS
from specmlx.evaluation.trace import BONUS, CORRECTED, DRAFTED, PLAIN, Trace
from specmlx.evaluation.view.charts import bars, lines

LEGEND = {
    DRAFTED: "guessed by the drafter, confirmed by the target",
    CORRECTED: "the target's own, where the guess was wrong",
    BONUS: "the target's own, after a proposal that was right to its end",
    PLAIN: "plain decoding, nothing was proposed",
}


def page(trace: Trace) -> str:
    """One HTML file. All text of the model and the prompt is escaped, and only the page's own script may run."""
    style, script = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "keys.js"))
    counts = Counter(token.kind for token in trace.tokens)
    proposed = sum(each.proposed for each in trace.rounds)
    speed = len(trace.tokens) / trace.decode_seconds if trace.decode_seconds else 0.0
    figures = {
        "tokens": len(trace.tokens),
        "rounds": len(trace.rounds),
        "tokens per pass": f"{trace.acceptance_length:.2f}",
        "accepted of proposed": f"{counts[DRAFTED]} of {proposed}",
        "decoding": f"{speed:.1f} tok/s",
        "prompt": f"{trace.prompt_tokens} tokens",
    }
    if trace.account:
        figures["moved a token"] = nbytes(trace.account["bytes_per_token"])

    def limit(bandwidth: float, tokens_per_pass: float = trace.acceptance_length) -> float:
        """Tokens a second at most, `bandwidth` in GB/s."""
        return bandwidth * 1e9 / trace.account["bytes_per_round"] * tokens_per_pass

    charts = {"tokens_per_pass": _tokens_per_pass(trace), "slots": _slots(trace), "phases": _phases(trace)}
    bus = None
    if trace.account and trace.account["bytes_per_round"]:
        groups, bus = trace.account["groups"], trace.account["bandwidth"]
        rows = [(group["label"], group["round_bytes"], nbytes(group["round_bytes"])) for group in groups]
        charts["bytes"] = bars("Bytes a round", rows)
        if bus:
            bandwidth, most = bus["gigabytes_per_second"], max(each.proposed for each in trace.rounds) + 1.0
            ends = [(at, limit(bandwidth, at)) for at in (1.0, max(most, 2.0))]
            title, dot = f"Byte limit at {bandwidth:g} GB/s", (trace.acceptance_length, speed)
            charts["roofline"] = lines(title, "tokens per pass", "tok/s", [("limit", ends)], [dot])
    environment = Environment(loader=PackageLoader(__package__, ""), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html").render(
        trace=trace,
        style=style,
        script=script,
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
        where=_where(trace),
        proposed=proposed,
        figures=figures,
        counts=counts,
        legend=LEGEND,
        own={token.round: token.kind for token in trace.tokens if token.kind != DRAFTED},
        charts={"slots": "", "bytes": "", "roofline": "", **charts},
        host=HOST,
        host_share=host_share(trace.decoding) if trace.profiled else 0.0,
        bus=bus,
        limit=limit,
        speed=speed,
        chips=CHIPS,
        seconds=seconds,
        nbytes=nbytes,
    )


def seconds(value: float) -> str:
    """Like 1.23 s or 4.56 ms."""
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.2f} ms"


def nbytes(value: float) -> str:
    """Like 16.73 GB, 11.7 MB or 1 kB; powers of ten."""
    for unit, size, digits in (("GB", 1e9, 2), ("MB", 1e6, 1)):
        if value >= size:
            return f"{value / size:.{digits}f} {unit}"
    return f"{value / 1e3:.0f} kB"


def _where(trace: Trace) -> list[str]:
    machine = [str(trace.machine[name]) for name in ("chip", "backend", "system") if trace.machine.get(name)]
    return machine + [f"{name} {number}" for name, number in trace.versions.items()]


def _tokens_per_pass(trace: Trace) -> str:
    given = [each.tokens for each in trace.rounds]
    mean = [(float(n), total / n) for n, total in enumerate(accumulate(given), start=1)]
    each = [(float(n), float(tokens)) for n, tokens in enumerate(given, start=1)]
    title = f"Tokens per pass after each round, {trace.acceptance_length:.2f} at the end"
    return lines(title, "round", "tokens", [("each", each), ("mean", mean)], each if len(each) == 1 else ())


def _slots(trace: Trace) -> str:
    rows = [
        (f"slot {n}", accepted / judged, f"{100 * accepted / judged:.1f} % of {judged}")
        for n, (judged, accepted) in enumerate(trace.slots(), start=1)
    ]
    return bars("Acceptance by slot", rows, most=1.0) if rows else ""


def _phases(trace: Trace) -> str:
    return bars("Seconds by phase", [(name, value, seconds(value)) for name, value in trace.phases.items()])
