"""Where the time of a generation goes: each phase waits for the device at its end, so nothing overlaps."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from specmlx.drafters.proposal import Drafter, DraftPolicy, Proposal, Windowed
from specmlx.speculation.policy import Policy
from specmlx.speculation.stats import Stats
from specmlx.state.layers import LayerStates, Pass

DRAFT, OBSERVE, VERIFY, ACCEPT = "draft", "observe", "verify", "accept"
READ, COMMIT, DETOKENIZE = "send and read", "commit", "detokenize"
OTHER = "other host work"
"""Python between the phases: the width, handing tokens out, counting."""
PHASES = (DRAFT, VERIFY, ACCEPT, READ, COMMIT, OBSERVE, DETOKENIZE, OTHER)
HOST = (COMMIT, DETOKENIZE, OTHER)
"""What is Python alone: a commit is an integer, whose rows the next verify folds."""


class Phases:
    """Seconds by phase, kept in a request's stats."""

    def __init__(self, stats: Stats):
        self.stats = stats

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stats.phases[name] = self.stats.phases.get(name, 0.0) + time.perf_counter() - begin

    def finish(self) -> None:
        """Call what decoding took beside its phases by its name."""
        stats = self.stats
        found = stats.phases | {READ: stats.device_seconds, COMMIT: stats.commit_seconds}
        inside = sum(seconds for name, seconds in found.items() if name != DETOKENIZE)
        found[OTHER] = max(0.0, stats.decode_seconds - inside)
        stats.phases = {name: found[name] for name in PHASES if name in found}


def host_share(phases: Mapping[str, float]) -> float:
    """Of profiled decoding, the share of Python outside the calls of target, drafter and acceptance."""
    return sum(phases.get(name, 0.0) for name in HOST) / max(sum(phases.values()), 1e-9)


class ProfiledTarget:
    """A target whose passes are waited for."""

    def __init__(self, target: Any, phases: Phases):
        self.target = target
        self.phases = phases
        self.vocab_size = target.vocab_size
        self.prefill = target.prefill

    def verify(self, states: LayerStates, rows: mx.array, tap_ids: Any) -> Pass:
        with self.phases.phase(VERIFY):
            done = self.target.verify(states, rows, tap_ids)
            mx.eval(done.arrays())
        return done


class ProfiledDrafter:
    """A drafter whose proposals are waited for. The prompt's rows, which it observes as well, belong to the prompt."""

    def __init__(self, drafter: Drafter, phases: Phases):
        self.drafter = drafter
        self.phases = phases
        self.tap_ids = drafter.tap_ids
        self.max_width = drafter.max_width
        self.new_context = drafter.new_context
        self.window = drafter.window if isinstance(drafter, Windowed) else None

    def propose(self, context: Any, anchor: mx.array, width: int, policy: DraftPolicy) -> Proposal:
        with self.phases.phase(DRAFT):
            proposal = self.drafter.propose(context, anchor, width, policy)
            mx.eval(proposal.tokens, *([] if proposal.q is None else [proposal.q]))
        return proposal

    def observe(self, context: Any, tokens: mx.array, features: mx.array | None, count: int | mx.array) -> None:
        if not self.phases.stats.rounds:
            self.drafter.observe(context, tokens, features, count)
            return
        with self.phases.phase(OBSERVE):
            self.drafter.observe(context, tokens, features, count)
            mx.eval(context.arrays())


class ProfiledPolicy:
    """A policy whose acceptance is waited for."""

    def __init__(self, policy: Policy, phases: Phases):
        self.policy = policy
        self.phases = phases
        self.processors = policy.processors
        self.sequential = policy.sequential

    def at(self, position: Any, history: Any = None) -> "_ProfiledRound":
        return _ProfiledRound(self.policy.at(position, history), self.phases)


class _ProfiledRound:
    def __init__(self, policy: Any, phases: Phases):
        self.policy = policy
        self.phases = phases
        self.greedy = policy.greedy
        self.draft = policy.draft

    def accept(self, tokens: mx.array, q: mx.array | None, logits: mx.array) -> Any:
        with self.phases.phase(ACCEPT):
            outcome, logprobs = self.policy.accept(tokens, q, logits)
            mx.eval(outcome.accepted, outcome.next_anchor, logprobs)
        return outcome, logprobs
