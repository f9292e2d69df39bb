"""Prompt caches over turns: a conversation of ours, its files, and mlx-lm's lists of caches."""

import copy

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as stock
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from rig import SMALL, collect, leaves, mlx_lm_twin, offsets, plain_ids, same_bits, small_tokenizer, stock_leaves, tiny
from scripted import ScriptedDrafter, all_right, right_with

from specmlx.generation.generate import generate, stream_generate
from specmlx.generation.prompt_cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

# Long and short ones.
PROMPTS = [[7, 8, 9] * 30, [4], [11, 12, 13], [20] * 70]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model():
    return tiny(0, **SMALL)


@pytest.fixture(scope="module")
def twin(model):
    return mlx_lm_twin(model, **SMALL)


@pytest.mark.linux_bits
@pytest.mark.parametrize("by", ["plain", "drafter", "other drafter"])
def test_a_prompt_cache_over_turns_is_one_conversation(model, tokenizer, by, tmp_path):
    want, states = plain_ids(model, PROMPTS, 9)
    text = [token for prompt, given in zip(PROMPTS, want, strict=True) for token in (*prompt, *given)]
    scripted = ScriptedDrafter(text, right_with(0.7), tap_ids=())
    conversation = make_prompt_cache(model)
    for turn, prompt in enumerate(PROMPTS):
        drafter = {"plain": None, "drafter": scripted}.get(by, scripted if turn % 2 else None)
        options = dict(max_tokens=9, draft_model=drafter, prompt_cache=conversation)
        _, ids, last = collect(stream_generate(model, tokenizer, prompt, **options))
        assert ids == want[turn] and last.prompt_tokens == len(prompt)
        assert last.stats.mode == ("plain" if drafter is None else "speculative")
    assert same_bits(leaves(conversation.states), leaves(states))
    assert conversation.tokens == text


@pytest.mark.linux_bits
def test_a_saved_conversation_goes_on_where_it_was(model, tokenizer, tmp_path):
    want, _ = plain_ids(model, PROMPTS, 9)
    conversation = make_prompt_cache(model)
    for turn, prompt in enumerate(PROMPTS):
        given = list(stream_generate(model, tokenizer, prompt, max_tokens=9, prompt_cache=conversation))
        assert [r.token for r in given] == want[turn]
        save_prompt_cache(tmp_path / "chat.safetensors", conversation, {"turn": str(turn)})
        conversation, metadata = load_prompt_cache(tmp_path / "chat.safetensors", return_metadata=True)
        assert metadata == {"turn": str(turn)}
    empty = tmp_path / "empty.safetensors"
    save_prompt_cache(str(empty), make_prompt_cache(model))
    begun = load_prompt_cache(str(empty))
    assert [r.token for r in stream_generate(model, tokenizer, PROMPTS[0], 9, prompt_cache=begun)] == want[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chat.safetensors", "empty.safetensors"]


@pytest.mark.linux_bits
@pytest.mark.parametrize("taken", [0, 1, 4, 9])
def test_copies_of_a_conversation_go_on_each_on_its_own(model, tokenizer, taken):
    def answer(cache, prompt):
        return [r.token for r in stream_generate(model, tokenizer, prompt, 9, prompt_cache=cache, draft_model=None)]

    first, one, other = PROMPTS[0], [4, 5], [11]
    conversation = make_prompt_cache(model)
    held = stream_generate(model, tokenizer, first, 9, prompt_cache=conversation, draft_model=None)
    given = [next(held).token for _ in range(taken)]
    copies = [copy.deepcopy(conversation) for _ in range(2)]
    # What becomes of the original, and of either copy, reaches no other.
    given += [response.token for response in held]
    so_far = [*first, *given[:taken]] if taken else []
    for cache, prompt in zip(copies, (one, other), strict=True):
        assert cache.tokens == so_far
        assert answer(cache, prompt) == answer(make_prompt_cache(model), [*so_far, *prompt])
    assert answer(conversation, one) == answer(make_prompt_cache(model), [*first, *given, *one])


def test_what_is_no_prompt_cache_is_refused_in_one_line(model, tokenizer, tmp_path):
    other = make_prompt_cache(tiny(0, num_hidden_layers=8))
    (tmp_path / "text.safetensors").write_text("no tensors in here")
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), {"a": mx.zeros(2)})
    for use, error, word in (
        (lambda: next(stream_generate(model, tokenizer, "a", prompt_cache=other)), ValueError, "8 layers"),
        (lambda: next(stream_generate(model, tokenizer, "a", prompt_cache="x")), TypeError, "make_prompt_cache"),
        (lambda: next(stream_generate(model, tokenizer, "a", prompt_cache=[])), ValueError, "0 layers"),
        (lambda: make_prompt_cache(model, max_kv_size=5000), ValueError, "max_kv_size is 5000"),
        (lambda: load_prompt_cache(str(tmp_path / "none.safetensors")), ValueError, "none.safetensors"),
        (lambda: load_prompt_cache(str(tmp_path / "text.safetensors")), ValueError, "text.safetensors"),
        (lambda: load_prompt_cache(str(tmp_path / "weights.safetensors")), ValueError, "weights.safetensors"),
    ):
        with pytest.raises(error) as raised:
            use()
        assert word in str(raised.value) and "\n" not in str(raised.value)


def by_mlx_lm(model, prompt: list[int], count: int, caches: list | None = None) -> list[int]:
    return [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=caches)]


@pytest.mark.linux_bits
@pytest.mark.parametrize("width", [0, 5])
def test_a_stock_cache_list_ends_as_mlx_lm_leaves_it(model, twin, tokenizer, width):
    theirs, ours = twin.make_cache(), stock.make_prompt_cache(model)
    kinds = [type(cache) for cache in ours]
    assert kinds == [type(cache) for cache in theirs]
    # One-token prompts: without prefill, whose rounding differs from stepping, all bits can be compared.
    want = by_mlx_lm(twin, [5], 12, theirs)
    scripted = ScriptedDrafter([5, *want], right_with(0.7), tap_ids=())
    options = dict(draft_model=scripted if width else None, prompt_cache=ours)
    assert [r.token for r in stream_generate(model, tokenizer, [5], max_tokens=12, **options)] == want
    assert [type(cache) for cache in ours] == kinds
    assert offsets(ours) == offsets(theirs) == [13, 13]
    assert same_bits(stock_leaves(ours), stock_leaves(theirs))
    # mlx-lm goes on with what we left, and we with what it left.
    want = by_mlx_lm(twin, [9], 5, theirs)
    assert by_mlx_lm(twin, [9], 5, ours) == want
    assert [r.token for r in stream_generate(model, tokenizer, [3], max_tokens=4, prompt_cache=ours)] == by_mlx_lm(
        twin, [3], 4, theirs
    )
    assert same_bits(stock_leaves(ours), stock_leaves(theirs))


@pytest.mark.linux_bits
def test_a_stock_list_holds_the_stop_token_too(model, twin, tokenizer):
    want = by_mlx_lm(twin, [5], 12)
    stopping = TokenizerWrapper(tokenizer._tokenizer, BPEStreamingDetokenizer, eos_token_ids=[want[6]])
    theirs, ours = twin.make_cache(), model.make_cache()
    for run, m, caches in ((mlx_lm.stream_generate, twin, theirs), (stream_generate, model, ours)):
        last = list(run(m, stopping, [5], max_tokens=12, prompt_cache=caches))[-1]
        assert last.finish_reason == "stop" and last.generation_tokens == want.index(want[6]) + 1
    assert offsets(ours) == offsets(theirs)
    assert same_bits(stock_leaves(ours), stock_leaves(theirs))


@pytest.mark.linux_bits
@pytest.mark.parametrize("taken", [1, 2, 3, 6])
def test_a_stock_list_goes_on_while_a_generator_still_holds_it(model, twin, tokenizer, taken):
    theirs, ours = twin.make_cache(), model.make_cache()
    want = by_mlx_lm(twin, [5], taken, theirs)
    whole = by_mlx_lm(twin, [5], 12)
    held = stream_generate(
        model, tokenizer, [5], draft_model=ScriptedDrafter([5, *whole], all_right, 3, tap_ids=()), prompt_cache=ours
    )
    assert [next(held).token for _ in range(taken)] == want
    want = by_mlx_lm(twin, [9], 5, theirs)
    assert [r.token for r in stream_generate(model, tokenizer, [9], max_tokens=5, prompt_cache=ours)] == want
    with pytest.raises(RuntimeError, match="another request"):
        next(held)
    assert offsets(ours) == offsets(theirs)
    # The token that was pending went in by prefill, which differs from mlx-lm's stepping by rounding.
    for a, b in zip(stock_leaves(ours), stock_leaves(theirs), strict=True):
        assert mx.allclose(a, b, rtol=0, atol=1e-5).item()


@pytest.mark.linux_bits
@pytest.mark.parametrize("held", [False, True])
def test_a_stock_list_can_be_saved_after_a_break(model, twin, tokenizer, held, tmp_path):
    ours, want = model.make_cache(), by_mlx_lm(twin, [5], 3)
    responses = stream_generate(model, tokenizer, [5], prompt_cache=ours)
    assert [next(responses).token for _ in range(3)] == want
    if not held:
        responses.close()
    save_prompt_cache(str(tmp_path / "list.safetensors"), ours, {"a": "b"})
    loaded, metadata = load_prompt_cache(str(tmp_path / "list.safetensors"), return_metadata=True)
    assert metadata == {"a": "b"} and offsets(loaded) == [4, 4]
    theirs = twin.make_cache()
    by_mlx_lm(twin, [5], 3, theirs)
    assert same_bits(stock_leaves(loaded), stock_leaves(theirs))
    assert same_bits(stock_leaves(stock.load_prompt_cache(str(tmp_path / "list.safetensors"))), stock_leaves(theirs))
    if held:
        with pytest.raises(RuntimeError, match="another request"):
            next(responses)


@pytest.mark.parametrize("when", ["sampler", "progress"])
def test_a_stock_list_is_given_back_after_an_exception(model, tokenizer, when):
    def fail(*_):
        raise ArithmeticError

    ours = model.make_cache()
    options = {"sampler": dict(sampler=fail), "progress": dict(prompt_progress_callback=fail)}[when]
    with pytest.raises(ArithmeticError):
        list(stream_generate(model, tokenizer, [5, 6, 7], prompt_cache=ours, **options))
    assert offsets(ours) == ([3, 3] if when == "sampler" else [0, 0])
    assert generate(model, tokenizer, [8], max_tokens=3, prompt_cache=ours)


@pytest.mark.parametrize("change", [dict(linear_num_value_heads=2), dict(num_key_value_heads=1), dict(head_dim=64)])
def test_a_stock_list_of_a_model_of_other_sizes_is_refused(model, tokenizer, change):
    caches, other = model.make_cache(), tiny(0, **SMALL | change)
    list(stream_generate(model, tokenizer, [5, 6], 2, prompt_cache=caches))
    with pytest.raises(ValueError, match="prompt_cache layer [01] is another model's: "):
        next(stream_generate(other, tokenizer, [5], prompt_cache=caches))


def test_a_cache_that_cannot_be_read_is_named(model, tokenizer):
    for index, bad, word in (
        (1, stock.RotatingKVCache(8), "layer 1 is a RotatingKVCache: specmlx reads KVCache there"),
        (0, stock.KVCache(), "layer 0 is a KVCache: specmlx reads ArraysCache there"),
    ):
        caches = model.make_cache()
        caches[index] = bad
        with pytest.raises(TypeError, match=word):
            next(stream_generate(model, tokenizer, [5], prompt_cache=caches))
        assert caches[index] is bad
    caches = model.make_cache()
    model(mx.array([[1, 2, 3]]), cache=caches)
    caches[1].trim(1)
    with pytest.raises(ValueError, match=r"different lengths \[2, 3\]"):
        next(stream_generate(model, tokenizer, [5], prompt_cache=caches))
