"""A generation token by token: how each came, what each round did, what was moved; kept as JSON."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import specmlx
from specmlx.formats.atomic import write_atomically
from specmlx.formats.header import read_json

FORMAT = "specmlx-trace-1"
# The drafter's guess; the target's own token after a wrong guess, after a whole right proposal, without a proposal.
DRAFTED, CORRECTED, BONUS, PLAIN = KINDS = ("drafted", "corrected", "bonus", "plain")

PROMPT = "prompt"
# Drafted tokens of a round: a page shows each of them.
_MOST = 1000
# Amounts that are not 0: what is computed of them has to stay a number.
_LEAST, _LARGEST = 1e-60, 1e18


@dataclass(frozen=True)
class TracedToken:
    """A token that left: its id, the text that it let out, its round from 0, and its kind, one of KINDS."""

    id: int
    text: str
    round: int
    kind: str


@dataclass(frozen=True)
class TracedRound:
    """Drafted tokens verified, drafted tokens delivered, tokens delivered, seconds of decoding."""

    proposed: int
    accepted: int
    tokens: int
    seconds: float

    @property
    def cut(self) -> bool:
        """Whether the answer ended before the target's own token of the round."""
        return self.tokens == self.accepted


@dataclass(frozen=True)
class Trace:
    """Everything that `specmlx view` shows.

    phases: seconds by phase, decoding taken apart only where it was profiled.
    account: `account_object` of the generation's account, or None.
    """

    model: str
    drafter: str | None
    mode: str
    reason: str | None
    prompt: str
    prompt_tokens: int
    finish_reason: str | None
    tokens: list[TracedToken]
    rounds: list[TracedRound]
    phases: dict[str, float]
    account: dict[str, Any] | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def decode_seconds(self) -> float:
        return sum(each.seconds for each in self.rounds)

    @property
    def acceptance_length(self) -> float:
        """Tokens delivered per round (τ)."""
        return len(self.tokens) / len(self.rounds) if self.rounds else 0.0

    @property
    def decoding(self) -> dict[str, float]:
        """The phases but for the prompt."""
        return {name: seconds for name, seconds in self.phases.items() if name != PROMPT}

    @property
    def profiled(self) -> bool:
        """Whether decoding was taken apart."""
        return len(self.decoding) > 1

    def slots(self) -> list[tuple[int, int]]:
        """For each drafted slot: in how many rounds it was judged, and in how many of these accepted.

        A slot is judged where those before it were accepted. A round that was cut before its own token says nothing of
        the slots that it did not deliver.
        """
        judged, accepted = Counter[int](), Counter[int]()
        for each in self.rounds:
            seen = min(each.accepted + (not each.cut), each.proposed)
            judged.update(range(seen))
            accepted.update(range(min(seen, each.accepted)))
        return [(judged[slot], accepted[slot]) for slot in sorted(judged)]

    def as_object(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


_TEXT = str | None
_KINDS_OF = {"model": str, "mode": str, "prompt": str, "drafter": _TEXT, "reason": _TEXT, "finish_reason": _TEXT}
_KINDS_OF |= {"prompt_tokens": int, "machine": dict, "versions": dict}


class Recorder:
    """Reads a stream of `GenerationResponse`s and makes a trace of them."""

    def __init__(self) -> None:
        self.tokens: list[TracedToken] = []
        self.rounds: list[TracedRound] = []
        self._last: Any = None

    def add(self, response: Any) -> None:
        """Take the next response of the stream, with its stats."""
        stats, before = response.stats, self._last
        if before is None or stats.rounds > before.stats.rounds:
            proposed = stats.proposed - (before.stats.proposed if before else 0)
            self.rounds.append(TracedRound(proposed, 0, 0, 0.0))
        now = self.rounds[-1]
        self.rounds[-1] = replace(
            now,
            accepted=now.accepted + response.from_draft,
            tokens=now.tokens + 1,
            seconds=now.seconds + stats.decode_seconds - (before.stats.decode_seconds if before else 0.0),
        )
        kind = _kind(response.from_draft, self.rounds[-1])
        self.tokens.append(TracedToken(response.token, response.text, len(self.rounds) - 1, kind))
        self._last = response

    def trace(self, model: str, drafter: str | None, prompt: str, account: Any = None) -> Trace:
        """The trace of what was added; raises ValueError if that is nothing. `account` is an `accounting.Traffic`."""
        from specmlx.evaluation.machine import this_machine

        if self._last is None:
            raise ValueError("nothing was generated: there is no trace")
        last, stats = self._last, self._last.stats
        return Trace(
            model=_name(model),
            drafter=drafter,
            mode=stats.mode,
            reason=stats.reason,
            prompt=prompt,
            prompt_tokens=last.prompt_tokens,
            finish_reason=last.finish_reason,
            tokens=self.tokens,
            rounds=self.rounds,
            phases={PROMPT: stats.prefill_seconds} | (stats.phases or {"decoding": stats.decode_seconds}),
            account=None if account is None else account_object(account),
            machine=asdict(this_machine()),
            versions={"specmlx": specmlx.__version__},
        )


def account_object(account: Any) -> dict[str, Any]:
    """An `accounting.Traffic` as JSON: groups by bytes of a round, then the sums."""
    rounds = max(account.rounds, 1)
    groups = sorted(account.moved, key=lambda group: -group.total)
    bandwidth = account.bandwidth
    return {
        "groups": [{"label": group.label, "round_bytes": group.total / rounds} for group in groups],
        "bytes_per_round": account.bytes_per_round,
        "bytes_per_token": account.bytes_per_token,
        "gigabytes_per_second": account.gigabytes_per_second,
        "bandwidth": None if bandwidth is None else asdict(bandwidth),
        "share": account.share,
        "left_out": account.left_out,
    }


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace, which holds what was asked and answered: whole or not at all, for its owner only."""
    write_atomically(path, [json.dumps(trace.as_object(), ensure_ascii=False).encode()], private=True)


def read_trace(path: Path) -> Trace:
    """The trace of a file. Raises ValueError, one line, for a file that is none."""
    found = read_json(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no trace: specmlx generate --trace {path} writes one")
    try:
        return _trace(found)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is a damaged trace: {type(error).__name__} {error}") from None


def _trace(found: dict[str, Any]) -> Trace:
    values = {each.name: found[each.name] for each in fields(Trace)}
    for name, kind in _KINDS_OF.items():
        if not isinstance(values[name], kind):
            raise ValueError(f"its {name} is a {type(values[name]).__name__}")
    rounds = [
        TracedRound(int(r["proposed"]), int(r["accepted"]), int(r["tokens"]), _number(r["seconds"]))
        for r in values["rounds"]
    ]
    for n, each in enumerate(rounds, start=1):
        if not 0 <= each.accepted <= each.proposed <= _MOST or not each.accepted <= each.tokens <= each.accepted + 1:
            raise ValueError(f"round {n} has {each.tokens} tokens, {each.accepted} accepted of {each.proposed}")
    tokens = [TracedToken(int(t["id"]), str(t["text"]), int(t["round"]), str(t["kind"])) for t in values["tokens"]]
    for token in tokens:
        if token.kind not in KINDS or not 0 <= token.round < len(rounds):
            raise ValueError(f"token {token.id} is {token.kind!r} of round {token.round}")
    if not tokens:
        raise ValueError("it holds no token")
    phases = {str(name): _number(seconds) for name, seconds in values["phases"].items()}
    account = values["account"] and _account(values["account"])
    return Trace(**values | {"rounds": rounds, "tokens": tokens, "phases": phases, "account": account})


def _account(found: dict[str, Any]) -> dict[str, Any]:
    groups = [{"label": str(group["label"]), "round_bytes": _number(group["round_bytes"])} for group in found["groups"]]
    sums = ("bytes_per_round", "bytes_per_token", "gigabytes_per_second")
    bandwidth, share = found["bandwidth"], None
    if bandwidth is not None:
        speed, share = _number(bandwidth["gigabytes_per_second"]), _number(found["share"])
        bandwidth = {"gigabytes_per_second": speed, "source": str(bandwidth["source"])}
    rest = {"bandwidth": bandwidth, "share": share, "left_out": found["left_out"] and str(found["left_out"])}
    return {"groups": groups} | {name: _number(found[name]) for name in sums} | rest


def _number(value: Any) -> float:
    number = float(value)
    if number and not _LEAST <= number <= _LARGEST:
        raise ValueError(f"{value} is no amount")
    return number


def _kind(from_draft: bool, each: TracedRound) -> str:
    if from_draft:
        return DRAFTED
    if not each.proposed:
        return PLAIN
    return BONUS if each.accepted == each.proposed else CORRECTED


def _name(model: str) -> str:
    # A directory's name, not where it lies: that may name a user.
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
