"""Batches: each lane is what it would be alone, whatever runs beside it."""

import math
import random

import mlx.core as mx
import pytest
from batch_kit import COUNTS, PROMPTS, KnowsTheTexts, ids_alone, in_lanes
from rig import SMALL, leaves, prefilled, same_bits, small_tokenizer, tiny, tokens
from scripted import right_with

from specmlx import (
    Engine,
    PromptCache,
    batch_generate,
    generate,
    load,
    load_drafter,
    make_logits_processors,
    make_sampler,
)
from specmlx.cache.layers import LayerStates
from specmlx.cache.store import usable_memory
from specmlx.decoding.policy import Policies, Policy
from specmlx.drafters.proposal import Proposal
from specmlx.generation.generate import stream_generate
from specmlx.targets.hybrid import Model


class Uniform(KnowsTheTexts):
    """Drafts by the policy, one lane at a time, and knows nothing."""

    def propose(self, context, anchor, width, policy):
        return Proposal(*policy.draft(mx.zeros((1, width, 1280)), 0))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    found = small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    found.eos_token_ids = {281}
    return found


@pytest.fixture(scope="module")
def demo():
    return load()


def questions(tokenizer, n=6):
    from specmlx.demo.tasks import KINDS, held_out_examples

    chosen = random.Random(0).sample(held_out_examples(2), len(KINDS))[:n]
    turns = ([{"role": "user", "content": example.question}] for example in chosen)
    return [tokenizer.apply_chat_template(turn, add_generation_prompt=True) for turn in turns]


@pytest.mark.linux_bits
@pytest.mark.parametrize(("dtype", "bits"), [(mx.float32, None), (mx.bfloat16, None), (mx.float32, 4)], ids=str)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_a_lane_has_the_tokens_and_the_state_that_it_would_have_alone(dtype, bits, sampled, tokenizer):
    model = tiny(3, dtype, bits, **SMALL)
    options = [dict(sampler=make_sampler(0.9), seed=i) if sampled else {} for i in range(len(PROMPTS))]
    alone = [
        ids_alone(model, tokenizer, p, n, draft_model=None, **o)
        for p, n, o in zip(PROMPTS, COUNTS, options, strict=True)
    ]
    drafter = KnowsTheTexts([prompt + ids for prompt, (ids, _) in zip(PROMPTS, alone, strict=True)])
    policies = [Policy(option.get("sampler"), None, option.get("seed")) for option in options]
    given, jobs = in_lanes(model, tokenizer, drafter, PROMPTS, COUNTS, policies)
    assert given == [ids for ids, _ in alone]
    for job, (_, cache) in zip(jobs, alone, strict=True):
        # The last round's rows are in here as there: processed and pending are what was given.
        assert job.conversation.tokens == cache.tokens
        assert same_bits(leaves(job.conversation.states), leaves(cache.states))
    assert len({tuple(job.stats.accept_histogram) for job in jobs}) > 2, "the lanes accept alike: a weak test"


@pytest.mark.parametrize("drafter", ["demo/dspark", "demo/dflash", None])
def test_trained_drafters_give_every_lane_its_own_text_in_as_many_rounds_as_alone(drafter, demo):
    model, tokenizer = demo
    prompts = questions(tokenizer)
    drafter = drafter and load_drafter(drafter, model)
    sampler = [None, make_sampler(1.0, top_p=0.95), make_sampler(0.8)] * 2
    options = dict(draft_model=drafter, num_draft_tokens=drafter and drafter.max_width)
    found = batch_generate(
        model, tokenizer, prompts, max_tokens=96, sampler=sampler, seed=[None, 7, 8] * 2, max_lanes=4, **options
    )
    assert found.errors == [None] * 6
    for i, prompt in enumerate(prompts):
        alone = list(
            stream_generate(model, tokenizer, prompt, 96, sampler=sampler[i], seed=[None, 7, 8][i % 3], **options)
        )
        assert found.texts[i] == "".join(response.text for response in alone)
        assert found.request_stats[i].accept_histogram == alone[-1].stats.accept_histogram


def test_batches_of_1_2_4_and_8_lanes_take_as_many_passes_as_the_rounds_of_each_prompt_alone_predict(demo):
    model, tokenizer = demo
    prompts = questions(tokenizer, 12)
    options = dict(max_tokens=16, num_draft_tokens="full")
    alone = batch_generate(model, tokenizer, prompts, max_lanes=1, **options)
    rounds = [stats.rounds for stats in alone.request_stats]
    assert alone.stats.passes == sum(rounds)
    per_token = [alone.stats.passes / alone.stats.generation_tokens]
    for lanes in (2, 4, 8):
        found = batch_generate(model, tokenizer, prompts, max_lanes=lanes, **options)
        # Whoever waits takes the lane that is free first.
        free = [0] * lanes
        for n in rounds:
            free = sorted([free[0] + n, *free[1:]])
        assert found.texts == alone.texts and [stats.rounds for stats in found.request_stats] == rounds
        assert found.stats.passes == free[-1]
        per_token.append(found.stats.passes / found.stats.generation_tokens)
    assert per_token[0] > 1.8 * per_token[1] > 3 * per_token[2] > 3.5 * per_token[3]


def test_a_lane_decides_as_it_would_alone_whatever_rules_the_others_follow():
    mx.random.seed(0)
    processors = make_logits_processors(logit_bias={3: 2.0}, repetition_penalty=1.3)
    samplers = [make_sampler(0.8), make_sampler(0.8), None, make_sampler(1.0, top_k=5), make_sampler(0.8)]
    policies = [
        Policy(sampler, processors if i == 3 else None, seed=i if i == 4 else None)
        for i, sampler in enumerate(samplers)
    ]
    B, width, V = 5, 4, 24
    positions = mx.array([9, 70, 5, 33, 12], dtype=mx.int32)
    histories = [[i, i + 1, 2] for i in range(B)]
    drafts, logits = mx.random.normal((B, width, V)), mx.random.normal((B, width + 1, V))
    lanes = Policies(policies).at(positions, histories)
    assert len(lanes.parts) == 4, "the two lanes that sample alike belong together"
    tokens, q = lanes.draft(drafts, 0)
    outcome, logprobs = lanes.accept(tokens, q, logits)
    for i, policy in enumerate(policies):
        alone = policy.at(positions[i : i + 1], histories[i] if i == 3 else None)
        want, want_q = alone.draft(drafts[i : i + 1], 0)
        assert tokens[i].tolist() == want[0].tolist()
        assert want_q is None or mx.array_equal(want_q[0], q[i])
        kept, scores = alone.accept(want, want_q, logits[i : i + 1])
        assert (outcome.accepted[i].item(), outcome.next_anchor[i].item()) == (
            kept.accepted.item(),
            kept.next_anchor.item(),
        )
        assert mx.array_equal(logprobs[i], scores[0])
        assert lanes.alone(i).draft(drafts[i : i + 1], 0)[0].tolist() == want.tolist()


def test_a_lane_whose_logits_are_spoilt_fails_alone_with_their_position(tokenizer):
    model = tiny(0, **SMALL)
    nothing = make_logits_processors({token: -math.inf for token in range(model.vocab_size)})

    def spoils(tokens, logits):
        return logits + (math.nan if len(tokens) == len(PROMPTS[1]) + 2 else 0)

    processors = [None, [spoils], nothing, None]
    drafting = dict(draft_model=load_drafter("ngram", model), num_draft_tokens=2)
    for options in ({}, drafting):
        found = batch_generate(model, tokenizer, PROMPTS[:4], max_tokens=6, logits_processors=processors, **options)
        where = [len(PROMPTS[1]) + 2, len(PROMPTS[2])]
        assert [str(error) for error in found.errors[1:3]] == [
            f"the logits for token {at} are NaN or infinite after the logits processors" for at in where
        ]
        assert [stats.generation_tokens for stats in found.request_stats] == [6, 2, 0, 6]
        alone = [generate(model, tokenizer, PROMPTS[i], max_tokens=6) for i in (0, 3)]
        assert found.errors[::3] == [None, None] and found.texts[::3] == alone
        with pytest.raises(RuntimeError, match=f"token {where[0]} are NaN or infinite after"):
            generate(model, tokenizer, PROMPTS[1], max_tokens=6, logits_processors=[spoils], **options)


def test_a_lane_that_fails_fails_alone(tokenizer):
    model = tiny(0, **SMALL)

    def broken(tokens, logits):
        if len(tokens) > 8:
            raise KeyError("lost")
        return logits

    alone = [generate(model, tokenizer, prompt, max_tokens=20) for prompt in PROMPTS[:3]]
    found = batch_generate(
        model, tokenizer, PROMPTS[:3] + [[1, 2, 3]], max_tokens=20, logits_processors=[None, None, None, [broken]]
    )
    assert found.texts == [*alone, None]
    assert found.errors[:3] == [None] * 3 and isinstance(found.errors[3], KeyError)


@pytest.mark.parametrize("most", [20, 5])
def test_callables_of_the_user_see_no_row_behind_the_end_of_their_lane(most, tokenizer):
    model = tiny(0, **SMALL)
    texts = [[*prompt, *ids_alone(model, tokenizer, prompt, 30)[0]] for prompt in PROMPTS[:2]]
    tokenizer.eos_token_ids = {texts[1][12]}
    seen = {}

    def watching(name):
        def watched(tokens, logits):
            seen.setdefault(name, []).append(tokens.tolist())
            return logits

        return [watched]

    try:
        drafter = KnowsTheTexts(texts)
        drafter.guess = right_with(1.0)
        alone = generate(model, tokenizer, PROMPTS[1], max_tokens=most, logits_processors=watching("alone"))
        found = batch_generate(
            model,
            tokenizer,
            PROMPTS[:2],
            max_tokens=[30, most],
            draft_model=drafter,
            num_draft_tokens="full",
            logits_processors=[None, watching("lane")],
        )
    finally:
        tokenizer.eos_token_ids = {281}
    assert found.texts[1] == alone and seen["lane"] == seen["alone"]
    assert found.request_stats[1].rounds < len(seen["alone"])


def test_a_bias_of_a_token_that_is_none_spoils_its_own_lane_only(demo):
    model, tokenizer = demo
    prompts = questions(tokenizer, 2)
    bad = make_logits_processors(logit_bias={model.vocab_size: 1.0})
    for drafter in (model.draft_model, Uniform([])):
        found = batch_generate(
            model, tokenizer, prompts, max_tokens=9, draft_model=drafter, logits_processors=[bad, None]
        )
        assert found.texts == [None, generate(model, tokenizer, prompts[1], max_tokens=9)]
        assert isinstance(found.errors[0], ValueError) and found.errors[1] is None


def test_a_lane_that_is_too_long_for_the_model_is_refused_and_one_that_fills_it_ends_with_a_warning(tokenizer):
    model = tiny(0, **SMALL, max_position_embeddings=40)
    prompts = [[7, 8, 9], [5] * 40, [4] * 30]
    with pytest.warns(UserWarning, match="has 40 tokens .the model's max_position_embeddings") as seen:
        response = batch_generate(model, tokenizer, prompts, max_tokens=20, return_token_ids=True)
    assert [len(ids or []) for ids in response.token_ids] == [20, 0, 10] and len(seen) == 1
    assert "has 40 tokens with this prompt: an answer needs at most 39" in str(response.errors[1])
    with pytest.warns(UserWarning, match="12 tokens .max_kv_size"), Engine(model, tokenizer, max_kv_size=12) as engine:
        responses = list(engine.submit(prompts[0], -1))
    assert len(responses) == 9 and responses[-1].finish_reason == "length"


@pytest.mark.linux_bits
def test_the_room_that_a_long_lane_needed_goes_with_it():
    model = tiny(0, **SMALL)
    long, short = tokens(1, 600, 282), tokens(2, 9, 282)
    both = LayerStates.merged([prefilled(model, long), prefilled(model, short)])
    left, alone = both.lanes([1], longest=9), prefilled(model, short)
    assert [states.layers[1].capacity for states in (both, left, alone)] == [768, 256, 256]
    logits = [model.verify(states, tokens(3, 5, 282)).logits for states in (left, alone)]
    assert mx.array_equal(*logits).item()


class Wide(Model):
    """What `check_memory` counts is the memory of the machine for 100 tokens; the heads are as many as ever."""

    @property
    def kv_heads(self):
        return usable_memory() // (100 * 2 * 2 * 4 * self.config.head_dim)


def test_a_prompt_for_which_memory_is_too_small_beside_others_waits_for_its_turn(tokenizer):
    model = tiny(0, **SMALL)
    wide = Wide(model.args)
    wide.update(model.parameters())
    prompts = [[7, 8, 9] * n for n in (10, 10, 10, 12, 25, 40)]
    found = batch_generate(wide, tokenizer, prompts, max_tokens=4, max_lanes=4, draft_model=None)
    assert found.texts == [*(generate(model, tokenizer, prompt, max_tokens=4) for prompt in prompts[:5]), None]
    assert "120 more tokens need" in str(found.errors[5])
    # Three together, then one, then one, where four lanes would have taken all in two turns.
    assert found.stats.passes == 4 * 3


def test_a_prompt_cache_serves_a_batch_and_is_filled_by_it(demo):
    model, tokenizer = demo
    start = questions(tokenizer)
    cache = PromptCache(keep_answers=True)
    first = batch_generate(model, tokenizer, start, cache, max_tokens=64)
    more = tokenizer.encode("<|im_end|>\n<|im_start|>user\nHello, my name is Clara!<|im_end|>\n<|im_start|>assistant\n")
    turns = [[*ids, *tokenizer.encode(text), *more] for ids, text in zip(start, first.texts, strict=True)]
    second = batch_generate(model, tokenizer, turns, cache, max_tokens=64)
    assert second.stats.cached_tokens >= sum(len(ids) for ids in start)
    assert second.texts == [generate(model, tokenizer, ids, max_tokens=64) for ids in turns]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(prompts="one text"), "a list"),
        (dict(prompts=[[1], []]), "empty"),
        (dict(prompts=[[1], [400]]), "token 400"),
        (dict(max_tokens=[5]), "max_tokens has 1 entries for 2 prompts"),
        (dict(max_tokens=0), "max_tokens is 0"),
        (dict(seed=[1, 2, 3]), "seed has 3 entries"),
        (dict(max_lanes=0), "max_lanes is 0"),
        (dict(prefill_step_size=0), "prefill_step_size is 0"),
        (dict(logits_processors=[lambda tokens, logits: logits]), "of its own"),
        (dict(prompt_cache=[1]), "PromptCache"),
    ],
)
def test_what_a_batch_cannot_honour_is_refused_before_it_runs(options, says, tokenizer):
    model = tiny(0, **SMALL)
    with pytest.raises(ValueError, match=says) as refused:
        batch_generate(model, tokenizer, **{"prompts": [[1], [2]], **options})
    assert "\n" not in str(refused.value)
