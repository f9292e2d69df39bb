"""Requests to a pair, by one process or by each of a ring: their tokens as JSON on stdout."""

import json
import sys
from functools import partial

import mlx.core as mx
from rig import generate_tokens

import specmlx
from specmlx.cache.conversation import Conversation
from specmlx.decoding.draft_length import AutoLength
from specmlx.decoding.policy import Policy
from specmlx.parallel.broadcast import SharedLength, from_first

# Five tokens: a random target and a random drafter then agree often, yet not always.
OFTEN = {50: 30, 60: 30, 70: 30, 80: 30, 90: 30}
PROMPT = [*range(3, 90)]


def cases(directory: str, group: mx.distributed.Group | None) -> dict:
    """By name: the tokens of a request, how many the rounds kept, and how far each row's best two were apart.

    Three processes on two cores wait for one another most of the time: they are asked for less.
    """
    model, tokenizer = specmlx.load(directory, draft_model=f"{directory}/dspark", group=group)
    tokenizer.add_eos_token(281)
    found = {}

    def run(name: str, prompt=PROMPT, max_tokens: int = 16, target=model, **options) -> None:
        responses = list(specmlx.stream_generate(target, tokenizer, prompt, max_tokens, **options))
        stats = responses[-1].stats
        best = [mx.sort(response.logprobs)[-2:].tolist() for response in responses]
        margins = [first - second for second, first in best]
        found[name] = [[response.token for response in responses], stats.accept_histogram, margins]

    def sampled(temp: float = 1.0) -> dict:
        often = specmlx.make_logits_processors(logit_bias=OFTEN)
        return {"sampler": specmlx.make_sampler(temp=temp), "logits_processors": often}

    if group is not None and group.rank():
        # Another chip, whose drafter guesses otherwise; its name was taken before.
        assert model.draft_model.fingerprint
        trunk = model.draft_model.model
        trunk.norm.weight = trunk.norm.weight * mx.random.normal(trunk.norm.weight.shape, key=mx.random.key(1))
    dflash = specmlx.load_drafter(f"{directory}/dflash", model)
    run("greedy", num_draft_tokens="full", draft_model=dflash, **sampled(temp=0))
    run("seeded", num_draft_tokens="full", seed=3, **sampled())
    run("seeded, auto width", seed=3, **sampled())
    if group is None or group.size() == 2:
        run("seeded, plain", num_draft_tokens=0, seed=3, **sampled())
        run("nobody's seed", num_draft_tokens="full", **sampled())
        run("keys in 8 bits", num_draft_tokens="full", kv_bits=8, kv_group_size=32, quantized_kv_start=0)
        run("profiled", num_draft_tokens="full", seed=3, profile=True, **sampled())
        conversation = specmlx.make_prompt_cache(model)
        run("first turn", prompt_cache=conversation, num_draft_tokens="full", seed=3, **sampled())
        run("second turn", [5, 6, 7], prompt_cache=conversation, num_draft_tokens="full", seed=3, **sampled())

        run("llama", draft_model="ngram", target=specmlx.load(f"{directory}/llama", group=group)[0])

    # As on a GPU, with each round issued before the one before it is read.
    policy = Policy(sampled()["sampler"], sampled()["logits_processors"], 3)
    drafter, width, decide = model.draft_model, None, None
    if group is not None:
        width, decide = SharedLength(AutoLength(drafter.max_width), group), partial(from_first, group)
    conversation, options = Conversation(model.new_states()), dict(max_tokens=12, decide=decide)
    ahead = generate_tokens(model, conversation, PROMPT, policy, drafter, width, **options)
    found["ahead"] = [[token.id for token in ahead], None, None]
    return found


def refusals(directory: str, group: mx.distributed.Group) -> dict:
    """What a rank says where only one is asked for something else, or can't do its part; and what none can do."""
    model, tokenizer = specmlx.load(directory, draft_model=None, group=group)
    first = group.rank() == 0
    attempts = {
        "prompt": lambda: specmlx.generate(model, tokenizer, [5, 6 + group.rank()], max_tokens=2),
        "sampling": lambda: specmlx.generate(
            model, tokenizer, [5], max_tokens=2, sampler=specmlx.make_sampler(temp=1), seed=None if first else 1
        ),
        "one fails": lambda: specmlx.load(directory if first else f"{directory}/dflash/none", group=group),
        "batch": lambda: specmlx.batch_generate(model, tokenizer, [[5]]),
        "prompt cache": lambda: specmlx.generate(model, tokenizer, [5], prompt_cache=specmlx.PromptCache()),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    return said


if __name__ == "__main__":
    ring = mx.distributed.init()
    print(json.dumps([cases(sys.argv[1], ring), refusals(sys.argv[1], ring) if ring.size() == 2 else {}]))
