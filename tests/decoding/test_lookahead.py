"""The next round is issued before this one is read, and where it isn't wanted nothing of it stays."""

import mlx.core as mx
import pytest
from rig import generate_tokens, leaves, same_bits
from scripted import (
    OTHER_PROMPTS,
    PROMPT,
    TEXT,
    Run,
    TableTarget,
    all_wrong,
    drafter,
    oracle,
    right_with,
    taken_in,
    wrong_at,
)

from specmlx.cache.conversation import Conversation
from specmlx.cache.kv import KV, reserve, write
from specmlx.cache.layers import LayerStates
from specmlx.decoding.accept import Outcome
from specmlx.decoding.loop import Batch, Sequence
from specmlx.decoding.policy import Policy
from specmlx.decoding.processors import make_logits_processors
from specmlx.decoding.round import observe
from specmlx.decoding.sampling import make_sampler
from specmlx.decoding.stats import Stats
from specmlx.demo.tasks import held_out_examples
from specmlx.generation.generate import stream_generate
from specmlx.loading.load import load, load_drafter

PENALTIES = dict(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1, logit_bias={5: 1.0})


@pytest.fixture(scope="module")
def demo():
    """The embedded target, its drafters by kind, and a prompt's ids."""
    target, tokenizer = load("demo", draft_model=None)
    drafters = {kind: load_drafter(f"demo/{kind}", target) for kind in ("dflash", "dspark")}
    question = held_out_examples(1)[0].question
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    return target, drafters, prompt, tokenizer


class Leaving:
    """One way to end a text after its nth token."""

    def __init__(self, how: str, n: int):
        self.how, self.n = how, n

    def options(self, ids: list[int]) -> dict:
        if self.how == "stop":
            return {"stop_tokens": {ids[self.n - 1]}}
        return {"max_tokens": self.n} if self.how == "length" else {}

    def leave(self, tokens) -> None:
        if self.how == "throw":
            with pytest.raises(ArithmeticError):
                tokens.throw(ArithmeticError)
        elif self.how == "break":
            tokens.close()


def left(demo, kind, leaving: Leaving, ids: list[int], lookahead: bool):
    """What a text that was left that way leaves behind."""
    target, drafters, prompt, _ = demo
    by, conversation, stats = drafters.get(kind), Conversation(target.new_states()), Stats()
    tokens = generate_tokens(
        target, conversation, prompt, Policy(), by, lookahead=lookahead, stats=stats, **leaving.options(ids)
    )
    given = [next(tokens).id for _ in range(leaving.n)]
    leaving.leave(tokens)
    # As the next request does; "held" leaves a generator behind that will never run again.
    conversation.claim()
    observe(conversation, by)
    groups = [] if by is None else conversation.draft.context.groups
    contexts = [x for group in groups for x in rows_of(group)]
    assert all(group.max_length == group.length.item() for group in groups)
    return given, conversation.tokens, stats, leaves(conversation.states), contexts


def rows_of(group) -> list[mx.array]:
    length = group.length.item()
    # Where several were together, no more is known than how many rows each pass let in at most.
    assert group.max_length >= length
    return [group.base, group.length, *(x[:, :, :length] for kv in group.kvs.values() for x in kv)]


@pytest.fixture(scope="module")
def alone(demo):
    """What n tokens leave behind without lookahead, by drafter and n: however they were left."""
    target, _, prompt, _ = demo
    plain = generate_tokens(target, Conversation(target.new_states()), prompt, Policy(), max_tokens=16, lookahead=False)
    ids = [token.id for token in plain]
    kept = {}

    def run(kind, n):
        if (kind, n) not in kept:
            kept[kind, n] = left(demo, kind, Leaving("break", n), ids, lookahead=False)
        return ids, kept[kind, n]

    return run


@pytest.mark.linux_bits
@pytest.mark.parametrize("how", ["held", "break", "throw", "stop", "length"])
@pytest.mark.parametrize("kind", ["dspark", "dflash", None])
def test_a_text_left_at_any_token_leaves_the_bits_of_a_run_that_does_not_look_ahead(demo, alone, kind, how):
    prompt = demo[2]
    for n in range(1, 11) if kind == "dspark" else (1, 3, 8):
        ids, (_, _, stats_alone, states_alone, contexts_alone) = alone(kind, n)
        if how == "stop" and ids[n - 1] in ids[: n - 1]:
            continue
        given, tokens, stats, states, contexts = left(demo, kind, Leaving(how, n), ids, lookahead=True)
        assert given == ids[:n] and tokens == prompt + given
        if how != "length":
            assert (stats.rounds, stats.accept_histogram) == (stats_alone.rounds, stats_alone.accept_histogram)
        assert same_bits(states, states_alone) and same_bits(contexts, contexts_alone), n


class Watched(LayerStates):
    """States that write down what is sent to the device and what is waited for."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.log: list[str] = []

    def dispatch(self, new, *arrays):
        self.log.append("send")
        return super().dispatch(new, *arrays)

    def evaluate(self, *arrays):
        self.log.append("wait")
        super().evaluate(*arrays)


@pytest.mark.parametrize("width", [0, 3, 7])
def test_a_round_is_sent_before_the_one_before_it_is_read_and_each_is_waited_for_once(width):
    target = TableTarget()
    run = Run(target)
    states = run.conversation.states = Watched([None])
    run.start(drafter=drafter(wrong_at(5), PROMPT + oracle(PROMPT, 90)) if width else None, width=width or None)
    log = states.log
    next(run.tokens)
    # The prompt's own pass is waited for once.
    assert log == ["wait", "send", "send", "wait"]
    for _ in run.tokens:
        log.append("token")
        if len(log) > 60:
            break
    shown = " ".join(log[4:]).replace("token ", "")
    rounds = run.stats.rounds
    assert shown.startswith("send wait " * (rounds - 1)) and log.count("wait") == rounds + 1


@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("kind", ["dspark", "dflash", None])
def test_the_demo_pair_is_waited_for_once_a_round(demo, kind, lookahead):
    target, drafters, prompt, _ = demo
    states, stats = Watched(target.new_states().layers), Stats()
    conversation, by = Conversation(states), drafters.get(kind)
    tokens = generate_tokens(
        target, conversation, prompt, Policy(), by, max_tokens=24, stats=stats, lookahead=lookahead
    )
    assert len([*tokens]) == 24
    # The prompt's own pass is waited for once.
    assert states.log.count("wait") == stats.rounds + 1
    sent = "wait send send wait" if lookahead else "wait send wait send"
    assert " ".join(states.log).startswith(sent) and states.log.count("send") <= stats.rounds + lookahead


POLICIES = {
    "greedy": lambda: Policy(),
    "rejection": lambda: Policy(make_sampler(0.8, top_p=0.95)),
    "coupled": lambda: Policy(make_sampler(0.8, top_k=20, xtc_probability=0.5), seed=1),
    "penalties": lambda: Policy(make_sampler(0.8), make_logits_processors(**PENALTIES)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["dspark", "dflash", None])
def test_nothing_is_read_while_a_round_ahead_is_built(demo, kind, policy):
    # While it traces, mlx refuses every evaluation. The error at the end spares the compilation.
    target, drafters, prompt, _ = demo

    class Unsent(LayerStates):
        def dispatch(self, new, *arrays):
            return new

    class Built(Exception):
        pass

    conversation = Conversation(Unsent(target.new_states().layers))
    by = drafters.get(kind)
    generator = generate_tokens(target, conversation, prompt, POLICIES[policy](), by, lookahead=False)
    next(generator)
    generator.close()
    batch = Batch(target, by)
    batch.join([Sequence(conversation, POLICIES[policy](), prompt)])
    round = batch.begin()

    def ahead(accepted, next_anchor):
        round.outcome = Outcome(accepted, next_anchor)
        batch.issue(round.num_draft_tokens, after=round)
        raise Built

    with pytest.raises(Built):
        mx.compile(ahead)(mx.array([0]), mx.array([3]))


@pytest.mark.parametrize("policy", ["greedy", "coupled", "penalties"])
def test_the_rounds_are_those_of_a_run_that_does_not_look_ahead(demo, policy):
    target, drafters, prompt, _ = demo
    policies = {
        "greedy": Policy(),
        "coupled": Policy(make_sampler(0.7), seed=4),
        "penalties": Policy(make_sampler(0.7), make_logits_processors(**PENALTIES), seed=4),
    }
    for max_tokens in (1, 2, 9, 30):
        runs = []
        for lookahead in (True, False):
            stats, conversation = Stats(), Conversation(target.new_states())
            tokens = generate_tokens(
                target,
                conversation,
                prompt,
                policies[policy],
                drafters["dspark"],
                max_tokens=max_tokens,
                lookahead=lookahead,
                stats=stats,
            )
            runs.append(([t.id for t in tokens], stats.rounds, stats.proposed, stats.accept_histogram, stats.context))
        assert runs[0] == runs[1] and len(runs[0][0]) == max_tokens


def test_what_is_raised_while_the_next_round_is_built_waits_for_this_ones_tokens():
    class Failing(type(drafter())):
        def propose(self, context, anchor, width, policy):
            if len(context.tokens) > 20:
                raise ArithmeticError("no more")
            return super().propose(context, anchor, width, policy)

    runs = []
    for lookahead in (True, False):
        run = Run().start(drafter=Failing(TEXT, right_with(0.7)), lookahead=lookahead)
        with pytest.raises(ArithmeticError, match="no more"):
            run.take()
        runs.append((run.given, run.stats.rounds))
    assert runs[0] == runs[1] and len(runs[0][0]) > 15


def test_rejected_rounds_do_not_make_the_buffers_grow():
    run = Run().start(drafter=drafter(all_wrong, PROMPT + oracle(PROMPT, 310)), max_tokens=300)
    assert len([*run.tokens]) == 300 == run.stats.rounds
    assert run.conversation.states.layers[0].capacity == 512


def test_a_conversation_is_taken_over_while_a_round_of_another_thread_is_under_way(demo):
    from concurrent.futures import ThreadPoolExecutor

    target, drafters, prompt, tokenizer = demo

    def text(start, pool, taken):
        from specmlx.generation.prompt_cache import make_prompt_cache

        cache = make_prompt_cache(target)
        tokens = stream_generate(target, tokenizer, start, 40, drafters["dspark"], prompt_cache=cache)
        given = [next(tokens).token for _ in range(taken)]

        def goes_on():
            held = cache.pending
            cache.pending = None
            return [
                r.token for r in stream_generate(target, tokenizer, [held], 10, drafters["dspark"], prompt_cache=cache)
            ]

        return given + pool(goes_on)

    with ThreadPoolExecutor(1) as pool:
        for taken in (1, 2, 5):
            there = text(prompt, lambda work: pool.submit(work).result(), taken)
            assert there == text(prompt, lambda work: work(), taken)


class Wide(TableTarget):
    """Its ids are kept in rows of 8 KB, next to which everything else is small."""

    def _run(self, states, rows, tap_ids):
        T, origin = rows.shape[1], states.origin(rows.shape[1])
        wide = mx.broadcast_to(rows[:, None, :, None], (1, 1, T, 2048))
        kv = write(reserve(states.layers[0], origin.length, KV(wide, wide)), KV(wide, wide), origin.start)
        ids = LayerStates([KV(kv.keys[..., :1], kv.values[..., :1])])
        ids.start, ids.count, ids.max_length = origin.start, 0, origin.length - T
        return super()._run(ids, rows, tap_ids)._replace(layers=[kv])


def test_a_round_ahead_writes_in_place():
    peaks = []
    for lookahead in (False, True):
        run = Run(Wide()).start(
            drafter=drafter(right_with(0.5), PROMPT + oracle(PROMPT, 200)), max_tokens=150, lookahead=lookahead
        )
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        assert [token.id for token in run.tokens] == oracle(PROMPT, 150)
        peaks.append(mx.get_peak_memory() - before)
    buffers = run.conversation.states.nbytes
    assert buffers > 4e6 and max(peaks) < 1.3 * buffers


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_each_token_may_be_fetched_by_another_thread(demo, kind):
    from concurrent.futures import ThreadPoolExecutor

    target, drafters, prompt, _ = demo

    def run(fetch):
        tokens = generate_tokens(target, conversation, prompt, Policy(), drafters[kind], max_tokens=20)
        given = []
        while (token := fetch(lambda: next(tokens, None))) is not None:
            given.append(token.id)
        return given

    def elsewhere(work):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    conversation = Conversation(target.new_states())
    want = run(lambda work: work())
    conversation = Conversation(target.new_states())
    assert run(elsewhere) == want and len(want) == 20


# Several together


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_a_batch_sends_each_round_before_the_one_before_it_is_read_and_waits_once_a_round(num_draft_tokens):
    class Log(LayerStates):
        log: list[str] = []

        def dispatch(self, new, *arrays):
            self.log.append("send")
            return super().dispatch(new, *arrays)

        def evaluate(self, *arrays):
            self.log.append("wait")
            super().evaluate(*arrays)

    target, by = TableTarget(), drafter(wrong_at(2), [0])
    batch = Batch(target, by if num_draft_tokens else None, num_draft_tokens)
    for start in OTHER_PROMPTS:
        conversation = Conversation(Log([None]))
        taken_in(target, conversation, start, batch.drafter)
        batch.join([Sequence(conversation, Policy(), list(start))])
    Log.log.clear()
    for _ in range(20):
        assert len([*batch.round()]) == 2 * min(3, num_draft_tokens + 1)
    # The last one that was sent is the round after them.
    assert Log.log == ["send", *["send", "wait"] * 20]


@pytest.mark.linux_bits
@pytest.mark.parametrize("kind", ["dspark", "dflash", None])
def test_who_leaves_a_batch_at_any_token_and_who_stays_have_the_bits_that_they_would_have_alone(demo, kind):
    target, drafters, _, tokenizer = demo
    by = drafters.get(kind)
    questions = [example.question for example in held_out_examples(1)[:4]]
    turns = ([{"role": "user", "content": question}] for question in questions)
    prompts = [tokenizer.apply_chat_template(turn, add_generation_prompt=True) for turn in turns]

    def kept(conversation):
        observe(conversation, by)
        contexts = [] if by is None else [x for g in conversation.draft.context.groups for x in rows_of(g)]
        return conversation.tokens, leaves(conversation.states) + contexts

    def alone(prompt, count):
        conversation = Conversation(target.new_states())
        options = dict(max_tokens=64, lookahead=False)
        tokens = generate_tokens(target, conversation, prompt, Policy(), by, **options)
        assert len([next(tokens) for _ in range(count)]) == count
        tokens.close()
        return kept(conversation)

    # The second is left within a round, the third reaches its limit, and the fourth comes in for the second.
    counts, batch = [60, 5, 30, 20], Batch(target, by)
    sequences = []
    for prompt, limit in zip(prompts, [64, 64, 30, 64], strict=True):
        conversation = Conversation(target.new_states())
        taken_in(target, conversation, prompt, by)
        sequences.append(Sequence(conversation, Policy(), list(prompt), max_tokens=limit))
    batch.join(sequences[:3])
    given, ended, together = dict.fromkeys(sequences, 0), [], set()
    while len(ended) < 4:
        for sequence, _ in batch.round():
            given[sequence] += 1
            sequence.over |= given[sequence] == counts[sequences.index(sequence)]
        together.add(tuple(sequences.index(sequence) for sequence in batch.sequences))
        for sequence in batch.sequences:
            if sequence.over and sequence not in ended:
                ended.append(sequence)
                batch.part(sequence)
                if sequence is sequences[1]:
                    batch.join(sequences[3:])
                i = sequences.index(sequence)
                ids, bits = kept(sequence.conversation)
                want, wanted = alone(prompts[i], counts[i])
                assert ids == want and same_bits(bits, wanted)
    assert (0, 1, 2) in together and any({0, 3} <= {*each} for each in together)
    assert len({tuple(sequence.stats.accept_histogram) for sequence in sequences}) > 1 or by is None
