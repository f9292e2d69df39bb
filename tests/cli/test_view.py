"""Traces and their page: counts against the stream's own, text escaped, figures as a real browser shows them."""

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from browser import browser, find_browser
from click.testing import CliRunner
from demo_kit import OFTEN, write_model

import specmlx
from specmlx.cli import main
from specmlx.decoding.stats import Stats
from specmlx.evaluation.trace import Recorder, Trace, TracedRound, TracedToken, read_trace, write_trace
from specmlx.evaluation.view.charts import bars, lines, ticks
from specmlx.evaluation.view.page import nbytes, page, seconds
from specmlx.generation.responses import GenerationResponse

EVIL = "</span><script>window.bad = 1</script><img src=x onerror='window.bad = 2'>&lt;b&gt;"
LONG = "word" * 60
GROUPS = [{"label": "MLP", "round_bytes": 9.63e9}, {"label": "LM head", "round_bytes": 0.72e9}]
ACCOUNT = {
    "groups": GROUPS,
    "bytes_per_round": 16.73e9,
    "bytes_per_token": 5.58e9,
    "gigabytes_per_second": 200.0,
    "bandwidth": {"gigabytes_per_second": 273.0, "source": "Apple's figure of M4 Pro"},
    "share": 200 / 273,
    "left_out": None,
}
# Round 1: two of four accepted, then the target's own. Round 2: nothing proposed. Round 3: all four, then one more.
# Round 4: cut after one.
TRACE = Trace(
    model="a <model>",
    drafter="DFlash",
    mode="speculative",
    reason=None,
    prompt=f"Say {EVIL}",
    prompt_tokens=12,
    finish_reason="length",
    tokens=[
        TracedToken(1, "one", 0, "drafted"),
        TracedToken(2, " two\n", 0, "drafted"),
        TracedToken(3, EVIL, 0, "corrected"),
        TracedToken(4, " four", 1, "plain"),
        *(TracedToken(5 + i, f" {word}", 2, "drafted") for i, word in enumerate(("five", "six", "seven", "eight"))),
        TracedToken(9, f" ninth {LONG}", 2, "bonus"),
        TracedToken(10, " 字", 3, "drafted"),
    ],
    rounds=[
        TracedRound(4, 2, 3, 0.05),
        TracedRound(0, 0, 1, 0.03),
        TracedRound(4, 4, 5, 0.05),
        TracedRound(4, 1, 1, 0.12),
    ],
    phases={"prompt": 0.5, "draft": 0.04, "verify": 0.15, "accept": 0.0125, "other host work": 0.01},
    account=ACCOUNT,
    machine={"chip": "Apple M4 Pro", "backend": "Metal", "system": "macOS 26.1 arm64"},
    versions={"specmlx": "0.1.0"},
)
SHOWN = [
    "a <model>",
    "speculative with DFlash; ended by length",
    "Apple M4 Pro, Metal, macOS 26.1 arm64, specmlx 0.1.0",
    "10\n",
    "2.50",
    "7 of 12",
    "40.0 tok/s",
    "5.58 GB",
    "100.0 % of 3",
    "50.0 % of 2",
    "500.00 ms",
    "40.00 ms",
    "150.00 ms",
    "12.50 ms",
    "Python outside model calls (commit, detokenize, other host work): 4.7 % of decoding.",
    "Each phase was waited for",
    "9.63 GB",
    "16.73 GB a round, 5.58 GB a token, 200.00 GB/s while decoding.",
    "273 GB/s (Apple's figure of M4 Pro): at most 40.8 tok/s at 2.50 tokens per pass; reached 40.0 tok/s, ",
    "73.3 % of the bus.",
]


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def response(token, text, from_draft, stats):
    return GenerationResponse(text, token, None, from_draft, 5, 1.0, stats.generation_tokens, 1.0, 0.0, None, stats)


def test_a_recorder_tells_rounds_and_kinds_from_the_stats():
    stats, recorder = Stats("speculative"), Recorder()
    for proposed, accepted, own in ((3, 1, True), (0, 0, True), (2, 2, True), (3, 2, False)):
        stats.begin_round(proposed)
        for n in range(accepted + own):
            stats.deliver(from_draft=n < accepted)
            stats.decode_seconds += 0.125
            recorder.add(response(stats.generation_tokens, f"{n} ", n < accepted, stats.snapshot()))
    trace = recorder.trace("owner/name", "DSpark", "Hi")
    assert [t.kind for t in trace.tokens] == "drafted corrected plain drafted drafted bonus drafted drafted".split()
    assert [t.round for t in trace.tokens] == [0, 0, 1, 2, 2, 2, 3, 3]
    assert trace.rounds == [
        TracedRound(3, 1, 2, 0.25),
        TracedRound(0, 0, 1, 0.125),
        TracedRound(2, 2, 3, 0.375),
        TracedRound(3, 2, 2, 0.25),
    ]
    assert trace.acceptance_length == stats.acceptance_length == 2 and trace.decode_seconds == 1.0


def test_a_slot_is_judged_where_those_before_it_were_accepted():
    # Slot 1: rounds 1, 3, 4; slot 2: rounds 1 and 3, as round 4 was cut; slot 3: rejected once.
    assert TRACE.slots() == [(3, 3), (2, 2), (2, 1), (1, 1)]


def test_a_local_models_place_is_not_told(tmp_path):
    (tmp_path / "somebody" / "Qwen").mkdir(parents=True)
    stats, recorder = Stats(), Recorder()
    stats.begin_round(0)
    stats.deliver(False)
    recorder.add(response(1, "a", False, stats))
    trace = recorder.trace(str(tmp_path / "somebody" / "Qwen"), None, "Hi")
    assert trace.model == "Qwen" and "somebody" not in json.dumps(trace.as_object())


def test_a_trace_is_read_as_it_was_written(tmp_path):
    write_trace(tmp_path / "x.json", TRACE)
    assert read_trace(tmp_path / "x.json") == TRACE
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda t: "{", "is not JSON"),
        (lambda t: "[]", "is no trace: specmlx generate --trace"),
        (lambda t: json.dumps(t | {"format": "x"}), "is no trace"),
        (lambda t: json.dumps({k: v for k, v in t.items() if k != "rounds"}), "is a damaged trace: KeyError 'rounds'"),
        (lambda t: json.dumps(t | {"tokens": []}), "it holds no token"),
        (lambda t: json.dumps(t | {"rounds": t["rounds"][:2]}), "'drafted' of round 2"),
        (lambda t: json.dumps(t | {"tokens": [t["tokens"][0] | {"kind": "x' onclick='y"}]}), "of round 0"),
        (lambda t: json.dumps(t | {"phases": {"a": "b"}}), "could not convert"),
        (lambda t: json.dumps(t | {"phases": {"a": float("nan")}}), "nan is no amount"),
        (lambda t: json.dumps(t | {"account": {"groups": 1}}), "is a damaged trace"),
        (lambda t: json.dumps(t | {"account": ACCOUNT | {"bytes_per_round": -1}}), "-1 is no amount"),
        (lambda t: json.dumps(t | {"account": ACCOUNT | {"bytes_per_round": 5e-324}}), "5e-324 is no amount"),
        (lambda t: json.dumps(t | {"phases": {"a": 10**400}}), "is a damaged trace: OverflowError"),
        *(
            (lambda t, name=name: json.dumps(t | {name: [1]}), f"its {name} is a list")
            for name in ("model", "mode", "prompt", "reason", "machine", "versions")
        ),
        (lambda t: json.dumps(t | {"rounds": [t["rounds"][0] | {"proposed": 10**9}]}), "accepted of 1000000000"),
        (lambda t: json.dumps(t | {"rounds": [t["rounds"][0] | {"accepted": 5}]}), "round 1 has 3 tokens, 5 accepted"),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(tmp_path, spoil, said):
    file = tmp_path / "x.json"
    file.write_text(spoil(json.loads(json.dumps(TRACE.as_object()))))
    result = run("view", file)
    assert (result.exit_code, result.stdout) == (2, "") and said in result.stderr and result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


class Parsed(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_loads_nothing_and_escapes_what_the_model_said():
    html = page(TRACE)
    parsed = Parsed(html)
    assert [tag for tag, _ in parsed.tags].count("script") == 1 and "img" not in [tag for tag, _ in parsed.tags]
    assert not any(name in attrs for _, attrs in parsed.tags for name in ("src", "href", "onerror", "srcset"))
    assert not re.search(r"url\(|@import|https?://", html)
    assert EVIL in parsed.texts and f"Say {EVIL}" in parsed.texts
    spans = [attrs["class"] for tag, attrs in parsed.tags if tag == "span" and "data-round" in attrs]
    assert spans == [token.kind for token in TRACE.tokens]


def test_numbers_are_short():
    assert [seconds(x) for x in (12.3456, 0.0123456)] == ["12.35 s", "12.35 ms"]
    assert [nbytes(x) for x in (16.728e9, 11.66e6, 1024)] == ["16.73 GB", "11.7 MB", "1 kB"]
    assert ticks(0, 9) == [0, 2, 4, 6, 8] and ticks(1, 6) == [1, 2, 3, 4, 5, 6] and ticks(0, 0.3) == [0, 0.1, 0.2, 0.3]


def test_charts_stay_in_their_frame():
    chart = lines("t", "x", "y", [("mean", [(1.0, 2.0), (50.0, 9.0)])], [(25.0, 4.0)])
    numbers = [float(n) for point in re.findall(r'points="([^"]+)"', chart) for n in re.split("[ ,]", point)]
    assert all(0 <= x <= 440 for x in numbers[::2]) and all(0 <= y <= 200 for y in numbers[1::2])
    wide = bars("t", [("a" * 30, 4.0, "100.0 % of 12"), ("b", 2.0, ""), ("c", 0.0, "")])
    drawn = re.findall(r'width="([\d.]+)"', wide)
    assert all(
        float(x) + float(w) < 440 for x, w in re.findall(r'<rect class="bar" x="([\d.]+)".*? width="([\d.]+)"', wide)
    )
    assert float(drawn[0]) == 2 * float(drawn[1]) and float(drawn[2]) <= 1
    assert "&lt;i&gt;" in bars("t", [("<i>", 1.0, "x")])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_generate_keeps_a_trace_of_what_it_printed(directory, tmp_path):
    file = tmp_path / "trace.json"
    full = ["--num-draft-tokens", "full"]
    result = run("generate", "--model", directory, "-p", "Hello", "-m", 40, *OFTEN, *full, "--trace", file)
    assert result.exit_code == 0, result.stderr
    trace = read_trace(file)
    model, tokenizer = specmlx.load(directory)
    assert trace.text + "\n" == result.stdout and trace.prompt == "Hello" and trace.drafter == "DSpark"
    kinds = [token.kind for token in trace.tokens]
    assert len(kinds) == sum(each.tokens for each in trace.rounds) <= 40
    assert kinds.count("drafted") == sum(each.accepted for each in trace.rounds) > 5
    assert {"drafted", "corrected"} <= set(kinds)
    assert trace.account["bytes_per_round"] > 1e6
    assert sum(group["round_bytes"] for group in trace.account["groups"]) == pytest.approx(
        trace.account["bytes_per_round"]
    )
    shown = run("view", file)
    assert (shown.exit_code, shown.stdout) == (0, "")
    assert f"{len(kinds)} tokens in {len(trace.rounds)} rounds" in (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert run("view", file, "-o", "-").stdout == (tmp_path / "trace.html").read_text(encoding="utf-8")


def test_a_profiled_trace_has_the_phases_that_were_printed(directory, tmp_path):
    file = tmp_path / "trace.json"
    result = run("generate", "--model", directory, "-m", 8, "--num-draft-tokens", "full", "--profile", "--trace", file)
    assert result.exit_code == 0, result.stderr
    trace, printed = read_trace(file), dict(re.findall(r"^  (\w[\w ]*?) +([\d.]+) s", result.stderr, re.M))
    assert printed.keys() == trace.decoding.keys() >= {"draft", "verify", "accept", "commit", "detokenize"}
    assert all(float(printed[name]) == round(seconds, 3) for name, seconds in trace.decoding.items())
    html = page(trace)
    assert all(name in html and seconds(value) in html for name, value in trace.phases.items())
    share = re.search(r"Python outside model calls .*: ([\d.]+)%", result.stderr)[1]
    assert f"other host work): {share} % of decoding" in html


def test_plain_decoding_has_a_trace_too(directory, tmp_path):
    file = tmp_path / "trace.json"
    assert run("generate", "--model", directory, "--draft-model", "none", "-m", 5, "--trace", file).exit_code == 0
    trace = read_trace(file)
    assert {token.kind for token in trace.tokens} == {"plain"} and trace.slots() == []
    assert "Acceptance by slot" not in page(trace) and "generate --profile takes decoding apart" in page(trace)


def test_a_trace_that_cannot_be_written_is_told_before_a_model_is_loaded(tmp_path):
    result = run("generate", "--model", "no/model", "--trace", tmp_path / "none" / "x.json")
    assert result.exit_code == 2 and "there is no directory" in result.stderr and result.stderr.count("\n") == 1
    write_trace(tmp_path / "x.json", TRACE)
    result = run("view", tmp_path / "x.json", "-o", tmp_path / "x.json")
    assert result.exit_code == 2 and "is the trace itself" in result.stderr
    assert read_trace(tmp_path / "x.json") == TRACE


def test_a_fifo_is_not_replaced_and_a_link_leads_to_its_file(tmp_path):
    write_trace(tmp_path / "x.json", TRACE)
    os.mkfifo(tmp_path / "fifo")
    for args in (("view", tmp_path / "x.json", "-o"), ("generate", "--model", "no/model", "--trace")):
        result = run(*args, tmp_path / "fifo")
        assert result.exit_code == 2 and "fifo is not a regular file" in result.stderr
    assert (tmp_path / "fifo").is_fifo()
    (tmp_path / "link.json").symlink_to("x.json")
    write_trace(tmp_path / "link.json", replace(TRACE, model="another"))
    assert (tmp_path / "link.json").is_symlink() and read_trace(tmp_path / "x.json").model == "another"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """The page in a browser; skipped where there is none."""
    if find_browser() is None:
        pytest.skip("no Chrome or Chromium found: install one, or name it in $CHROME")
    folder = tmp_path_factory.mktemp("browser")
    (folder / "x.html").write_text(page(TRACE), encoding="utf-8")
    with browser(folder / "profile") as tab:
        tab.open(folder / "x.html")
        yield tab


def test_a_browser_shows_every_number(opened):
    shown = opened.evaluate(
        "document.body.innerText + [...document.querySelectorAll('svg text')].map(t => t.textContent)"
    )
    assert [words for words in SHOWN if words not in shown] == []
    assert opened.errors == []


def test_a_browser_runs_nothing_of_what_the_model_said(opened):
    assert opened.evaluate("typeof window.bad") == "undefined"
    assert opened.evaluate("document.images.length + document.scripts.length") == 1
    assert opened.evaluate("document.querySelector('#answer').textContent") == TRACE.text
    # Even a script that got in would not run.
    opened.evaluate(
        "{const s = document.createElement('script'); s.textContent = 'window.bad = 3'; document.body.append(s)}"
    )
    assert opened.evaluate("typeof window.bad") == "undefined"
    opened.errors.clear()


def test_rounds_are_reached_by_keyboard_and_by_click(opened):
    def chosen():
        words = opened.evaluate("document.querySelector('output').textContent")
        return words, opened.evaluate("[...document.querySelectorAll('.text .on')].map(t => t.textContent).join('')")

    opened.evaluate("document.querySelector('.ribbon button').focus()")
    opened.press("ArrowRight")
    assert chosen() == ("Round 2: 0 proposed, 0 accepted, 1 token, 30.00 ms", " four")
    opened.press("End")
    assert chosen() == ("Round 4: 4 proposed, 1 accepted, 1 token, 120.00 ms, cut by the end", " 字")
    assert opened.evaluate("document.activeElement === [...document.querySelectorAll('.ribbon button')].at(-1)")
    opened.press("ArrowLeft")
    assert chosen()[0].startswith("Round 3: 4 proposed, 4 accepted, 5 tokens")
    opened.press("Home")
    opened.press("ArrowLeft")
    assert chosen() == ("Round 1: 4 proposed, 2 accepted, 3 tokens, 50.00 ms", f"one two\n{EVIL}")
    opened.press("Escape")
    assert chosen() == ("", "")
    opened.evaluate("document.querySelector('.bonus[data-round]').click()")
    assert chosen()[1] == f" five six seven eight ninth {LONG}"
    assert opened.evaluate("document.querySelectorAll('.ribbon button[tabindex=\"0\"]').length") == 1
    assert opened.errors == []


@pytest.mark.parametrize("width", [320, 800])
def test_a_narrow_screen_needs_no_scrolling_aside(opened, width):
    opened.send("Emulation.setDeviceMetricsOverride", width=width, height=700, deviceScaleFactor=1, mobile=False)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width


CONTRAST = """
(() => {
  const light = (css) => {
    const part = css.match(/[\\d.]+/g).slice(0, 3).map((x) => x / 255);
    const [r, g, b] = part.map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    const color = getComputedStyle(e).backgroundColor;
    return color === "rgba(0, 0, 0, 0)" && e.parentElement ? behind(e.parentElement) : color;
  };
  return [...document.querySelectorAll("h1, h2, p, dt, dd, .key, .text span, output, summary")].map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.className || e.tagName];
  });
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(opened, scheme):
    opened.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page_is_dark = opened.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128")
    assert page_is_dark == (scheme == "dark")
    # 4.5 is what WCAG 2 asks of small text.
    assert [found for found in opened.evaluate(CONTRAST) if found[0] < 4.5] == []


def test_an_unknown_bandwidth_is_said(opened):
    unknown = replace(TRACE, account=ACCOUNT | {"bandwidth": None, "share": None})
    html = page(unknown)
    assert "specmlx doctor --measure" in html and "% of the bus" not in html
    # 16.73 GB a round at τ 2.5: an M5 Pro's 307 GB/s allow 45.9.
    assert "<td>M5 Pro</td><td>307</td><td>45.9</td>" in html
