"""Prompts of several lengths, a drafter that every lane accepts another count of, and lanes run to their ends."""

import mlx.core as mx
from scripted import Context, right_with

from specmlx import PromptCache
from specmlx.drafters.proposal import Proposal
from specmlx.generation.generate import stream_generate
from specmlx.generation.prompt_cache import make_prompt_cache
from specmlx.generation.scheduler import Scheduler

# Below, at and above a step of 64 rows; one token alone.
PROMPTS = [[7, 8, 9] * 30, [4], [20] * 64, [30, 31] * 33, [5] * 3, list(range(10, 140))]
COUNTS = [19, 30, 7, 12, 1, 24]


class KnowsTheTexts:
    """Proposes what the texts that begin as its rows do say next, with errors: each lane accepts another count."""

    tap_ids = ()
    max_width = 6

    def __init__(self, texts: list[list[int]]):
        self.texts = texts
        self.guess = right_with(0.7)

    def new_context(self, batch: int = 1, start: int = 0) -> Context:
        assert batch == 1 and start == 0
        return Context(start)

    def propose(self, context, anchor, width, policy):
        seen = [*context.tokens, *anchor.tolist()]
        # A round that is issued ahead may go beyond the end of a text.
        text = next(text for text in self.texts if text[: len(seen)] == seen[: len(text)])
        right = (text[len(seen) :] + [0] * width)[:width]
        drafts = [self.guess(len(seen) + s, s, token) % 282 for s, token in enumerate(right)]
        return Proposal(mx.array([drafts], dtype=mx.int32))

    def observe(self, context, tokens, features, count):
        count = count if isinstance(count, int) else count.item()
        context.show(tokens[0, :count].tolist())


def ids_alone(model, tokenizer, prompt, count, **options):
    """The ids of a plain request, and its conversation."""
    cache = make_prompt_cache(model)
    found = [r.token for r in stream_generate(model, tokenizer, prompt, count, prompt_cache=cache, **options)]
    return found, cache


def in_lanes(model, tokenizer, drafter, prompts, counts, policies, **options):
    """The ids that lanes, three at a time, were given; and their requests, whose conversations have their states."""
    scheduler = Scheduler(model, tokenizer, drafter, "full", max_lanes=3, prompt_cache=PromptCache(), **options)
    # As on a GPU, with each round issued before the one before it is read.
    scheduler.lookahead = True
    given = {}
    for prompt, count, policy in zip(prompts, counts, policies, strict=True):
        request = scheduler.request(prompt, count)
        request.policy = policy
        given[request] = []
        scheduler.add(request)
    while not scheduler.idle:
        for request, response in scheduler.step():
            given[request].append(response.token)
    assert [request.error for request in given] == [None] * len(given)
    return [*given.values()], [*given]
