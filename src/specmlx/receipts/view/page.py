"""The page: text coloured by how each token came, rounds as a ribbon, charts. It loads nothing from elsewhere."""

from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import accumulate

from specmlx.receipts.chips import CHIPS
from specmlx.receipts.trace import BONUS, CORRECTED, DRAFTED, PLAIN, Trace
from specmlx.receipts.view.charts import bars, lines
from specmlx.speculation.profile import HOST, host_share

LEGEND = {
    DRAFTED: "guessed by the drafter, confirmed by the target",
    CORRECTED: "the target's own, where the guess was wrong",
    BONUS: "the target's own, after a proposal that was right to its end",
    PLAIN: "plain decoding, nothing was proposed",
}


def page(trace: Trace) -> str:
    """One HTML file. All text of the model and the prompt is escaped, and only the page's own script may run."""
    here = files(__package__)
    style = here.joinpath("style.css").read_text(encoding="utf-8")
    script = here.joinpath("keys.js").read_text(encoding="utf-8")
    allowed = b64encode(sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    title = f"{trace.model}: {len(trace.tokens)} tokens in {len(trace.rounds)} rounds"
    charts = [_tau(trace), _slots(trace), _phases(trace), *_bytes(trace)]
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{style}</style></head><body>",
            _head(trace),
            _text(trace),
            _ribbon(trace),
            f'<div class="charts">{"".join(chart for chart in charts if chart)}</div>',
            f"<script>{script}</script></body></html>\n",
        ]
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


def _head(trace: Trace) -> str:
    drafted = sum(token.kind == DRAFTED for token in trace.tokens)
    proposed = sum(each.proposed for each in trace.rounds)
    speed = len(trace.tokens) / trace.decode_seconds if trace.decode_seconds else 0.0
    figures = {
        "tokens": f"{len(trace.tokens)}",
        "rounds": f"{len(trace.rounds)}",
        "τ, tokens a round": f"{trace.acceptance_length:.2f}",
        "accepted of proposed": f"{drafted} of {proposed}",
        "decoding": f"{speed:.1f} tok/s",
        "prompt": f"{trace.prompt_tokens} tokens",
    }
    if trace.account:
        figures["moved a token"] = nbytes(trace.account["bytes_per_token"])
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures.items())
    how = trace.mode + (f" with {trace.drafter}" if trace.drafter and proposed else "")
    how += f" ({trace.reason})" if trace.reason else ""
    machine, versions = trace.machine, trace.versions
    where = [str(machine[name]) for name in ("chip", "backend", "system") if machine.get(name)]
    where += [f"{name} {number}" for name, number in versions.items()]
    return (
        f"<header><h1>{escape(trace.model)}</h1><p>{escape(how)}; ended by {escape(str(trace.finish_reason))}</p>"
        f'<p class="faint">{escape(", ".join(where))}</p></header><dl class="figures">{cells}</dl>'
        f"<section><details><summary>Prompt</summary>"
        f'<div class="text">{escape(trace.prompt)}</div></details></section>'
    )


def _text(trace: Trace) -> str:
    found = {token.kind for token in trace.tokens}
    legend = "".join(
        f'<p class="faint"><span class="key {kind}">{kind}</span>'
        f"{sum(token.kind == kind for token in trace.tokens)}: {escape(words)}</p>"
        for kind, words in LEGEND.items()
        if kind in found
    )
    spans = "".join(
        f'<span class="{token.kind}" data-round="{token.round}">{escape(token.text)}</span>'
        for token in trace.tokens
        if token.text
    )
    return f'<section><h2>Text</h2><div class="text" id="answer">{spans}</div>{legend}</section>'


def _ribbon(trace: Trace) -> str:
    own = {token.round: token.kind for token in trace.tokens if token.kind != DRAFTED}
    buttons = []
    for i, each in enumerate(trace.rounds):
        label = (
            f"Round {i + 1}: {each.proposed} proposed, {each.accepted} accepted, {each.tokens} "
            f"token{'' if each.tokens == 1 else 's'}, {seconds(each.seconds)}{', cut by the end' if each.cut else ''}"
        )
        blocks = [f'<i class="{DRAFTED}"></i>'] * each.accepted
        blocks += [f'<i class="{own[i]}"></i>'] if i in own else []
        blocks += ['<i class="rejected"></i>'] * (each.proposed - each.accepted)
        tab = 0 if i == 0 else -1
        buttons.append(f'<button type="button" tabindex="{tab}" aria-label="{label}">{"".join(blocks)}</button>')
    return (
        '<section><h2 id="rounds">Rounds</h2><p class="faint">A column a round, from below: accepted, then the '
        "target's own token, then what was not delivered. Arrow keys, Home and End go through them, Esc leaves.</p>"
        f'<div class="ribbon" role="group" aria-labelledby="rounds">{"".join(buttons)}</div>'
        '<output aria-live="polite"></output></section>'
    )


def _tau(trace: Trace) -> str:
    given = [each.tokens for each in trace.rounds]
    mean = [(float(n), total / n) for n, total in enumerate(accumulate(given), start=1)]
    each = [(float(n), float(tokens)) for n, tokens in enumerate(given, start=1)]
    title = f"τ after each round, {trace.acceptance_length:.2f} at the end"
    dots = each if len(each) == 1 else ()
    chart = lines(title, "round", "tokens a round", [("each", each), ("mean", mean)], dots)
    return _section("τ over time", f"{chart}<p class=faint>thin: each round; thick: the mean so far</p>")


def _slots(trace: Trace) -> str:
    slots = trace.slots()
    if not slots:
        return ""
    rows = [
        (f"slot {n}", accepted / judged, f"{100 * accepted / judged:.1f} % of {judged}")
        for n, (judged, accepted) in enumerate(slots, start=1)
    ]
    words = "<p class=faint>Of the rounds in which all slots before it were accepted.</p>"
    return _section("Acceptance by slot", bars("Acceptance by slot", rows, most=1.0) + words)


def _phases(trace: Trace) -> str:
    rows = [(name, value, seconds(value)) for name, value in trace.phases.items()]
    words = "<p class=faint>generate --profile takes decoding apart.</p>"
    if trace.profiled:
        words = (
            f"<p>Python outside model calls ({escape(', '.join(HOST))}): {100 * host_share(trace.decoding):.1f} % of "
            "decoding.</p><p class=faint>Each phase was waited for; without --profile they overlap.</p>"
        )
    return _section("Seconds by phase", bars("Seconds by phase", rows) + words)


def _bytes(trace: Trace) -> list[str]:
    account = trace.account
    if not account or not account["bytes_per_round"]:
        return []
    rows = [(group["label"], group["round_bytes"], nbytes(group["round_bytes"])) for group in account["groups"]]
    left_out = f" Left out: {account['left_out']}." if account["left_out"] else ""
    words = (
        f"<p>{nbytes(account['bytes_per_round'])} a round, {nbytes(account['bytes_per_token'])} a token, "
        f"{account['gigabytes_per_second']:.2f} GB/s while decoding.</p>"
        f"<p class=faint>A floor: every weight once a pass, no activations.{escape(left_out)}</p>"
    )
    return [_section("Bytes a round", bars("Bytes a round", rows) + words), _roofline(trace)]


def _roofline(trace: Trace) -> str:
    account, tau = trace.account, trace.acceptance_length
    each, known = account["bytes_per_round"], account["bandwidth"]
    speed = len(trace.tokens) / trace.decode_seconds if trace.decode_seconds else 0.0
    most = max(each.proposed for each in trace.rounds) + 1.0

    def limit(bandwidth: float, at: float) -> float:
        return bandwidth * 1e9 / each * at

    parts = []
    if known:
        bandwidth = known["gigabytes_per_second"]
        line = [(1.0, limit(bandwidth, 1.0)), (max(most, 2.0), limit(bandwidth, max(most, 2.0)))]
        title = f"Byte limit at {bandwidth:g} GB/s"
        parts.append(lines(title, "τ, tokens a round", "tok/s", [("limit", line)], [(tau, speed)]))
        parts.append(
            f"<p>{bandwidth:g} GB/s ({escape(known['source'])}): at most {limit(bandwidth, tau):.1f} tok/s at τ "
            f"{tau:.2f}; reached {speed:.1f} tok/s, {100 * account['share']:.1f} % of the bus.</p>"
        )
    else:
        parts.append("<p>This machine's bandwidth is not known: <code>specmlx doctor --measure</code> measures it.</p>")
    rows = "".join(
        f"<tr><td>{chip.name}</td><td>{chip.bandwidth:g}</td><td>{limit(chip.bandwidth, tau):,.1f}</td></tr>"
        for chip in CHIPS
    )
    parts.append(
        f"<details><summary>Byte limit of Apple's chips at τ {tau:.2f}</summary><div class=scroll><table>"
        f"<tr><th>chip</th><th>GB/s</th><th>tok/s at most</th></tr>{rows}</table></div></details>"
    )
    return _section("Roofline", "".join(parts))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"
