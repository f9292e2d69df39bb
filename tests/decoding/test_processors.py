"""Logits processors: whole rounds at once, bit for bit as mlx_lm's functions row by row."""

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors as mlx_lm_processors

from specmlx.decoding.processors import make_logits_processors

V = 23
SETTINGS = [
    {"logit_bias": {3: 2.5, 7: -float("inf"), 0: -1.1}},
    {"logit_bias": {3: 2, 7: -4}},
    *({f"{kind}_penalty": value} for kind in ("repetition", "presence", "frequency") for value in (0.3, 1.7)),
    {"presence_penalty": -0.7, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {1: 0.7}},
]


def row_by_row(settings, history, rows, drafted):
    """[T, V]: mlx-lm's processors on every row alone, with the tokens before it."""
    out = []
    for t in range(len(rows)):
        row = mx.array(rows[t : t + 1])
        for processor in mlx_lm_processors(**settings):
            row = processor(mx.array(history + drafted[:t], dtype=mx.int32), row)
        out.append(row)
    return mx.concatenate(out)


def with_sizes(settings, size):
    return settings | {f"{kind}_context_size": size for kind in ("repetition", "presence", "frequency")}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("size", [0, 1, 3, 20])
def test_all_rows_at_once_equal_mlx_lm_row_by_row_bit_for_bit(size, dtype, bit_exact):
    for seed, (known, width) in enumerate([(1, 0), (1, 4), (2, 7), (3, 1), (19, 5), (60, 8)]):
        key = mx.random.key(seed)
        # Few distinct ids, so that windows hold duplicates; zeros of both signs among the logits.
        ids = mx.random.randint(0, 9, (known + width,), key=key).tolist()
        history, drafted = ids[:known], ids[known:]
        rows = (mx.random.normal((width + 1, V), key=key) * 5).astype(dtype)
        rows[:, 2], rows[:, 4] = -0.0, 0.0
        for settings in SETTINGS:
            settings = with_sizes(settings, size)
            got = rows[None]
            for processor in make_logits_processors(**settings):
                got = processor.rows(history, got, mx.array([drafted], dtype=mx.int32).reshape(1, width))
            bit_exact(got[0], row_by_row(settings, history, rows, drafted))


def test_lanes_with_histories_of_different_lengths_equal_each_lane_alone(bit_exact):
    histories = [[5, 5, 2, 8, 1], [3], [9, 3, 3], []]
    padded = mx.array([[-1] * (5 - len(h)) + h for h in histories])
    drafted = mx.array([[5, 1, 1], [3, 3, 4], [0, 9, 9], [7, 8, 7]])
    logits = mx.random.normal((4, 4, V), key=mx.random.key(1)).astype(mx.bfloat16)
    for settings in SETTINGS:
        for size in (0, 2, 4):
            settings = with_sizes(settings, size)
            got = logits
            for processor in make_logits_processors(**settings):
                got = processor.rows(padded, got, drafted)
            for lane, history in enumerate(histories):
                bit_exact(got[lane], row_by_row(settings, history, logits[lane], drafted[lane].tolist()))


def test_called_like_mlx_lms_they_give_its_result_and_leave_the_logits_alone(bit_exact):
    logits = mx.random.normal((2, V), key=mx.random.key(2))
    before = mx.array(logits) + 0
    for history in ([], [4], [1, 4, 4, 2, 4]):
        tokens = mx.array(history, dtype=mx.uint32)
        for settings in SETTINGS:
            got, want = logits, mx.array(logits)
            for processor in make_logits_processors(**settings):
                got = processor(tokens, got)
            for processor in mlx_lm_processors(**settings):
                want = processor(tokens, want)
            bit_exact(got, want)
    bit_exact(logits, before)


def test_a_row_of_nan_stays_in_its_row():
    logits = mx.random.normal((1, 4, V), key=mx.random.key(3))
    poisoned = mx.array(logits)
    poisoned[:, 2:] = mx.nan
    drafted = mx.array([[1, 2, 1]])
    for processor in make_logits_processors(**SETTINGS[-1]):
        logits, poisoned = (processor.rows([1, 2], x, drafted) for x in (logits, poisoned))
    assert mx.array_equal(logits[:, :2], poisoned[:, :2])


def test_a_drafted_id_outside_the_vocabulary_harms_no_row_before_it():
    # The loop refuses it, but only after the round has been evaluated: it must not write into foreign memory.
    logits = mx.random.normal((1, 3, V), key=mx.random.key(5))
    for settings in SETTINGS:
        for processor in make_logits_processors(**settings):
            wild = processor.rows([1, 2], logits, mx.array([[4, 2**30]]))
            assert mx.array_equal(wild[:, :2], processor.rows([1, 2], logits, mx.array([[4, 0]]))[:, :2])
            assert mx.isfinite(wild[:, :, 8:]).all()


def test_without_drafted_tokens_every_row_sees_the_history_alone():
    logits = mx.broadcast_to(mx.random.normal((V,), key=mx.random.key(4)), (1, 3, V))
    for settings in SETTINGS:
        for processor in make_logits_processors(**settings):
            rows = processor.rows([6, 6, 1], logits, None)[0]
            assert mx.array_equal(rows, mx.concatenate([processor(mx.array([6, 6, 1]), logits[:, 0])] * 3))


def test_penalties_that_change_nothing_are_left_out():
    assert make_logits_processors(None, None, 20, 0, 20, 0.0) == [] == make_logits_processors({})
    bias, *penalties = make_logits_processors({1: 1.0}, 1.1, 5, 0.2, 6, 0.3, 7)
    assert bias.bias == ((1, 1.0),)
    assert [(p.kind, p.penalty, p.context_size) for p in penalties] == [
        ("repetition", 1.1, 5),
        ("presence", 0.2, 6),
        ("frequency", 0.3, 7),
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": -1.0},
        {"repetition_penalty": float("nan")},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": "0.5"},
        {"presence_penalty": 1.0, "presence_context_size": -2},
        {"repetition_penalty": 1.1, "repetition_context_size": None},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {5: float("inf")}},
    ],
)
def test_bad_values_are_refused_in_one_line_when_made(settings):
    with pytest.raises(ValueError, match=list(settings)[-1].split("_context")[0]) as error:
        make_logits_processors(**settings)
    assert "\n" not in str(error.value)


def test_a_bias_outside_the_vocabulary_is_refused():
    for token in (V, -1):
        with pytest.raises(ValueError, match=f"0..{V - 1}, got {token}"):
            make_logits_processors({token: 1.0})[0](mx.array([1]), mx.zeros((1, V)))
