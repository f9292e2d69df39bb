"""Long contexts: quantized keys and values, a bounded drafter, memory by the accounting, and what a limit does."""

import mlx.core as mx
import pytest
from click.testing import CliRunner
from drafter_kit import Greedy, golden_drafter
from rig import (
    SMALL,
    by_steps,
    collect,
    in_rounds,
    mlx_lm_twin,
    same_bits,
    small_tokenizer,
    tiny,
    tokens,
)
from scripted import ScriptedDrafter, right_with

import specmlx
from specmlx import PromptCache
from specmlx.cache.conversation import Conversation
from specmlx.cache.quantized import KVFormat, QuantizedKV
from specmlx.cli import main
from specmlx.decoding.prefill import prefill
from specmlx.generation.context_limits import check_memory
from specmlx.generation.generate import stream_generate
from specmlx.generation.prompt_cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from specmlx.targets.hybrid import Model

VARIANTS = {"fp32": {}, "bf16": dict(dtype=mx.bfloat16), "4-bit": dict(bits=4)}
FORMATS = {"8": KVFormat(8, 32), "4 from 128 on": KVFormat(4, 32, 128), "int8 from 64 on": KVFormat(8, None, 64)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def fp32():
    return tiny(3, **SMALL)


def ids(seed: int, n: int) -> list[int]:
    return tokens(seed, n, 282)[0].tolist()


def quantized_leaves(states) -> list[mx.array]:
    """What the committed rows left, keys and values as they are stored."""
    found = []
    for layer in states.folded():
        found += [x[0, :, : states.length] for x in layer.arrays()] if hasattr(layer, "keys") else [*layer[:2]]
    return found


@pytest.mark.linux_bits
@pytest.mark.parametrize("start", [0, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_quantized_keys_by_steps_are_mlx_lms_bit_for_bit(variant, start):
    model = tiny(3, **SMALL, **VARIANTS[variant])
    twin = mlx_lm_twin(model, **SMALL)
    caches, text = twin.make_cache(), ids(1, start + 30)
    want = by_steps(twin, caches, text[:start])
    caches = [cache.to_quantized(group_size=32, bits=4) if hasattr(cache, "offset") else cache for cache in caches]
    want += by_steps(twin, caches, text[start:])
    states = model.new_states(1, KVFormat(4, 32, start))
    got = in_rounds(model, states, text[:start], seed=5, most=1)
    got += in_rounds(model, states, text[start:], seed=5)
    assert same_bits(got, want)
    ours = [x for layer in states.layers if isinstance(layer, QuantizedKV) for x in layer.arrays()]
    theirs = [x for cache in (caches[1], caches[3]) for x in (*cache.keys, *cache.values)]
    assert same_bits([x[:, :, : len(text)] for x in ours], [x[:, :, : len(text)] for x in theirs])


@pytest.mark.linux_bits
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_quantized_keys_are_the_same_at_every_width_and_acceptance(tokenizer, variant, name):
    model, kv = tiny(3, **SMALL, **VARIANTS[variant]), FORMATS[name]
    options = dict(
        kv_bits=kv.bits if kv.group_size else "int8", kv_group_size=32, quantized_kv_start=max(kv.start - 30, 0)
    )
    prompt, states, text = ids(2, max(kv.start - 15, 50)), {}, []
    for width in (0, 3, 7):
        conversation = make_prompt_cache(model)
        drafter = ScriptedDrafter(text, right_with(0.7, width), 7, tap_ids=()) if width else None
        stream = stream_generate(
            model, tokenizer, prompt, 40, drafter, num_draft_tokens=width, prompt_cache=conversation, **options
        )
        _, given, last = collect(stream)
        if width == 0:
            text += prompt + given
        assert len(given) > 15 and prompt + given == text
        states[width] = quantized_leaves(conversation.states)
        assert isinstance(conversation.states.layers[1], QuantizedKV)
    assert same_bits(states[0], states[3]) and same_bits(states[0], states[7])


@pytest.mark.linux_bits
@pytest.mark.parametrize("name", FORMATS)
def test_quantized_prompts_are_reused_and_saved_bit_for_bit(fp32, tokenizer, name, tmp_path):
    kv = FORMATS[name]
    options = dict(kv_bits=kv.bits if kv.group_size else "int8", kv_group_size=32, quantized_kv_start=kv.start)
    prompt, caches = ids(1, 230), [PromptCache(), PromptCache(checkpoint_every=64, keep_answers=False)]
    list(stream_generate(fp32, tokenizer, prompt[:110], 1, prompt_cache=caches[1], **options))
    list(stream_generate(fp32, tokenizer, [*prompt[:200], 5], 1, prompt_cache=caches[1], **options))
    caches[1].save(tmp_path / "prompts")
    caches[1].clear()
    caches[1].load(tmp_path / "prompts")
    caches[1].keep_answers = True
    ends = []
    for cache in caches:
        _, given, last = collect(stream_generate(fp32, tokenizer, prompt, 9, prompt_cache=cache, **options))
        text = prompt + given[:-1]
        with cache.find(cache.snapshots()[-1][0], [*text, 0]) as snapshot:
            assert snapshot.length == len(text)
            pieces = [piece.kvs for piece in snapshot.piece.chain()]
        quantized = [kv.converted(kvs[i]) for i in (1, 3) for kvs in pieces]
        parts = [[q.arrays()[j] for q in quantized] for j in range(len(quantized[0].arrays()))]
        state = [x for layer in snapshot.recurrent.values() for x in layer[:2]]
        ends.append((given, state + [mx.concatenate(part, axis=2) for part in parts]))
    assert last.cached_tokens == 200
    assert ends[0][0] == ends[1][0] and same_bits(ends[0][1], ends[1][1])
    assert list(stream_generate(fp32, tokenizer, prompt, 1, prompt_cache=caches[1]))[-1].cached_tokens == 0


def test_a_quantized_conversation_is_saved_as_it_is(fp32, tokenizer, tmp_path):
    options = dict(kv_bits=8, kv_group_size=32, quantized_kv_start=64)
    conversation, whole = make_prompt_cache(fp32), make_prompt_cache(fp32)
    for held in (conversation, whole):
        list(stream_generate(fp32, tokenizer, ids(1, 60), 20, prompt_cache=held, **options))
    save_prompt_cache(tmp_path / "c", conversation)
    loaded = load_prompt_cache(tmp_path / "c")
    assert loaded.states.kv_format == KVFormat(8, 32, 64) and loaded.nbytes < make_prompt_cache(fp32).nbytes * 4
    ends = [[r.token for r in stream_generate(fp32, tokenizer, [5], 9, prompt_cache=c)] for c in (loaded, whole)]
    assert ends[0] == ends[1]
    with pytest.raises(ValueError, match="8 bits in groups of 32 from token 64 on, not as int8 from token 0 on"):
        next(stream_generate(fp32, tokenizer, [5], 9, prompt_cache=whole, kv_bits="int8", quantized_kv_start=0))


def test_an_int8_row_is_as_near_as_its_scale_allows():
    x = mx.random.normal((1, 2, 50, 64), key=mx.random.key(0)) * mx.exp(
        3 * mx.random.normal((1, 2, 50, 1), key=mx.random.key(1))
    )
    x[0, 0, 3] = 0
    codes, scale = KVFormat(8, None).quantized(x)
    assert codes.dtype == mx.int8 and scale.dtype == mx.float32 and scale.shape == (1, 2, 50, 1)
    assert mx.all(mx.abs(codes * scale - x) <= 0.5001 * scale).item()
    assert mx.all(mx.abs(codes).max(axis=-1) == 127).item() is False and mx.abs(codes[0, 0, 3]).max().item() == 0


@pytest.mark.parametrize(
    "options, word",
    [
        (dict(kv_bits=7), "kv_bits is 7"),
        (dict(kv_bits=8, kv_group_size=48), "kv_group_size is 48"),
        (dict(kv_bits=8, kv_group_size=64), "must divide the heads' size, 32"),
        (dict(kv_bits=8, kv_group_size=32, quantized_kv_start=-1), "quantized_kv_start is -1"),
        (dict(max_kv_size=0), "max_kv_size is 0"),
        (dict(max_kv_size=5000), "max_position_embeddings is 4096"),
        (dict(max_kv_size=9), "has 9 tokens with this prompt: an answer needs at most 8"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(fp32, tokenizer, options, word):
    for cache in (None, PromptCache(), make_prompt_cache(fp32)):
        with pytest.raises(ValueError, match=word) as raised:
            next(stream_generate(fp32, tokenizer, ids(1, 9), 2, prompt_cache=cache, **options))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("width", [0, 7])
def test_an_answer_ends_with_a_warning_where_the_conversation_is_full(tokenizer, width):
    model = tiny(3, **SMALL, max_position_embeddings=100)
    prompt = ids(1, 60)
    text = prompt + [r.token for r in stream_generate(model, tokenizer, prompt, 40)]
    for room, options in ((40, {}), (20, dict(max_kv_size=80))):
        drafter = ScriptedDrafter(text, right_with(0.8), 7, tap_ids=()) if width else None
        cache = make_prompt_cache(model)
        stream = stream_generate(model, tokenizer, prompt, -1, drafter, prompt_cache=cache, **options)
        with pytest.warns(UserWarning, match=f"the conversation has {60 + room} tokens"):
            found = list(stream)
        assert len(found) == room and found[-1].finish_reason == "length" and cache.tokens == text[: 60 + room]
        with pytest.raises(ValueError, match="an answer needs at most"):
            next(stream_generate(model, tokenizer, [5], prompt_cache=cache, **options))
    own = make_prompt_cache(model, max_kv_size=70)
    with pytest.warns(UserWarning, match="70 tokens"):
        assert len(list(stream_generate(model, tokenizer, prompt, -1, prompt_cache=own))) == 10
    assert [r.token for r in stream_generate(model, tokenizer, prompt, 40)] == text[60:]


# One head of each kind, so that long prompts take seconds; the vocabulary is large, so that all logits would be seen.
SLIM = dict(
    hidden_size=16,
    intermediate_size=16,
    num_attention_heads=1,
    num_key_value_heads=1,
    linear_num_value_heads=1,
    linear_num_key_heads=1,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    full_attention_interval=2,
    max_position_embeddings=40_000,
    vocab_size=4096,
)


def peak(model, n: int, step: int, kv_format: KVFormat | None = None) -> int:
    """The most bytes that prefilling n tokens took at once."""
    prompt = [i % 4096 for i in range(n)]
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    conversation = Conversation(model.new_states(1, kv_format))
    for _ in prefill(model, conversation, prompt, None, step):
        pass
    return mx.get_peak_memory() - before


@pytest.mark.linux_bits
@pytest.mark.parametrize("kv_format", [None, KVFormat(8, 32), KVFormat(4, 32), KVFormat(8, None)])
def test_memory_grows_with_the_context_as_the_accounting_says(kv_format):
    model = tiny(0, **SLIM, num_hidden_layers=4, head_dim=32)
    row = mx.zeros((1, 1, 1, 32))
    kept = row.nbytes if kv_format is None else sum(x.nbytes for x in kv_format.quantized(row))
    # Keys and values of two layers, and the scores of a step's 64 rows in float32 with their mask.
    predicted = 2 * 2 * kept + 64 * (4 + 1)
    if kv_format == KVFormat(8, None):
        # One layer's keys and values once more, in mlx's own 8 bits.
        predicted += 2 * (32 + 4 + 4)
    slope = (peak(model, 3072, 64, kv_format) - peak(model, 1024, 64, kv_format)) / 2048
    assert slope == pytest.approx(predicted, rel=0.1)


@pytest.mark.linux_bits
def test_a_prefill_of_32k_tokens_needs_its_keys_and_the_scores_of_one_step():
    model = tiny(0, **SLIM, num_hidden_layers=2, head_dim=8)
    # All logits would take 537 MB, the tapes of all rows 2 MB.
    assert peak(model, 32_768, 256) < 32_768 * (2 * 8 * 4 + 256 * 5) + 2_000_000


def test_int8_takes_at_27b_what_the_published_figure_says():
    rows = KVFormat(8, None).quantized(mx.zeros((1, 4, 1, 256)))
    assert 16 * 2 * sum(x.nbytes for x in rows) == 33_280


def test_a_prompt_that_memory_is_too_small_for_is_refused_before_anything_runs(fp32):
    check_memory(fp32, 1 << 20)
    for kv_format, gigabytes in ((None, "1125.9"), (KVFormat(8, None), "316.7")):
        with pytest.raises(ValueError, match=f"1099511627 more tokens need {gigabytes} GB") as raised:
            check_memory(fp32, (1 << 40) // 1000, kv_format)
        assert "\n" not in str(raised.value)


class Failing(Model):
    """Its third prefill step fails as an allocation on a GPU does."""

    steps = 0

    def prefill(self, states, tokens, tap_ids=(), step_size=2048):
        for step in super().prefill(states, tokens, tap_ids, step_size):
            self.steps += 1
            if self.steps == 3:
                raise RuntimeError("[metal::malloc] Unable to allocate")
            yield step


def test_snapshots_from_before_a_failure_serve_after_it(fp32, tokenizer):
    model, prompt = Failing(fp32.args), ids(1, 250)
    model.update(fp32.parameters())
    cache = PromptCache(checkpoint_every=64, keep_answers=False)
    with pytest.raises(RuntimeError, match="metal::malloc"):
        list(stream_generate(model, tokenizer, prompt, 9, prompt_cache=cache))
    found = list(stream_generate(model, tokenizer, prompt, 9, prompt_cache=cache))
    assert found[0].cached_tokens == 128
    assert [r.token for r in found] == [r.token for r in stream_generate(fp32, tokenizer, prompt, 9)]


def test_the_command_line_takes_the_options(tmp_path):
    def run(*args):
        return CliRunner().invoke(main, [*args, "-p", "Can you count from 62 up to 73?", "-m", "20"])

    plain = run("generate")
    for bits in ("8", "int8"):
        found = run("generate", "--kv-bits", bits, "--kv-group-size", "32", "--quantized-kv-start", "0")
        assert found.exit_code == 0 and found.stdout == plain.stdout
    assert "of them" not in plain.stderr and run("generate", "--draft-window", "64").stdout == plain.stdout
    for args, word in (
        (("--kv-bits", "9"), "kv_bits is 9"),
        (("--max-kv-size", "10"), "max_kv_size"),
        (("--draft-model", "none", "--draft-window", "64"), "there is no drafter"),
    ):
        refused = run("generate", *args)
        assert refused.exit_code == 2 and word in refused.stderr and refused.stdout == ""
    assert "the conversation has 30 tokens" in run("generate", "--max-kv-size", "30").stderr


@pytest.mark.parametrize("case", ["dflash_full", "dspark"])
def test_rows_before_the_draft_window_are_not_seen_whether_they_are_still_there_or_not(case):
    drafter = golden_drafter(case)
    drafter.draft_window = 20
    taps = len(drafter.tap_ids) * drafter.config.hidden_size
    features, rows = mx.random.normal((1, 45, taps), key=mx.random.key(1)), mx.zeros((1, 45), dtype=mx.int32)
    many, few = drafter.new_context(), drafter.new_context(start=25)
    for at in range(0, 45, 15):
        drafter.observe(many, rows[:, :15], features[:, at : at + 15], 15)
    drafter.observe(few, rows[:, :20], features[:, 25:], 20)
    assert max(group.max_length for group in many.groups) == 45 and drafter.window == 20
    shown = []
    for context in (many, few):
        policy = Greedy()
        drafter.propose(context, mx.array([7]), drafter.max_width, policy)
        shown.append(policy.logits)
    assert mx.allclose(*shown, rtol=0, atol=1e-5).item()


@pytest.mark.linux_bits
@pytest.mark.parametrize("name", ["demo/dflash", "demo/dspark"])
def test_a_drafter_with_a_window_forgets_what_is_before_it(name):
    model, tokenizer = specmlx.load(draft_model=None)
    drafter = specmlx.load_drafter(name, model, draft_window=100)
    prompt, sizes, found = tokenizer.encode("Can you count from 62 up to 73? " * 40), [], {}
    for start in (0, len(prompt) - 1 - 320):
        conversation = make_prompt_cache(model)
        if start:
            list(stream_generate(model, tokenizer, prompt[: start + 1], 1, None, prompt_cache=conversation))
            conversation.pending = None
            rest = prompt[start + 1 :]
        else:
            rest = prompt
        full = dict(num_draft_tokens=drafter.max_width)
        stream = list(stream_generate(model, tokenizer, rest, 60, drafter, prompt_cache=conversation, **full))
        found[start] = ([r.token for r in stream], stream[-1].stats.accept_histogram)
        sizes.append(sum(x.nbytes for x in conversation.draft.context.arrays()))
    row = 2 * drafter.config.num_hidden_layers * drafter.config.num_key_value_heads * drafter.config.head_dim * 4
    assert max(sizes) < row * (2 * (100 + drafter.config.block_size) + 2 * 256 + 64)
    assert found[0] == found[len(prompt) - 1 - 320]
