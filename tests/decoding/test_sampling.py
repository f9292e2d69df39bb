"""Sampler and noise: mlx-lm's kept sets and validation; randomness depends on seed and index alone."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from specmlx.decoding.rng import DOMAINS, Noise
from specmlx.decoding.sampling import make_sampler, normalise

V = 40


def logprobs_with_ties(dtype, rows=6):
    """[rows, V]: coarse values, so that the border of every filter falls on a tie in some rows."""
    key = mx.random.key(rows)
    logits = mx.round(mx.random.normal((rows, V), key=key) * 2) / 2
    logits[0], logits[1, :3] = 0.0, 9.0
    return normalise((logits + mx.array([[0.0], [0.0], [0.01], [0.3], [2.0], [7.0]])).astype(dtype))


def kept(logprobs):
    return (logprobs > -float("inf")).tolist()


def mlx_lm_filtered(x, top_p=0.0, min_p=0.0, min_tokens_to_keep=1, top_k=0, xtc=False, threshold=0.1, special=()):
    """mlx_lm.sample_utils' filters on one row [1, V] in the order of its make_sampler."""
    if 0 < top_p < 1:
        x = sample_utils.apply_top_p(x, top_p)
    if min_p:
        x = sample_utils.apply_min_p(x, min_p, min_tokens_to_keep)
    if xtc:
        x = sample_utils.apply_xtc(x, 1.0, threshold, list(special))
    if top_k:
        x = sample_utils.apply_top_k(x, top_k)
    return x


FILTERS = [
    *({"top_p": p} for p in (0.05, 0.5, 0.9, 1.0)),
    *({"min_p": p} for p in (0.01, 0.3, 1.0)),
    {"min_p": 0.5, "min_tokens_to_keep": 7},
    *({"top_k": k} for k in (0, 1, 5, V - 1)),
    {"top_p": 0.8, "min_p": 0.05, "top_k": 6},
]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_filters_keep_the_sets_that_mlx_lm_keeps_ties_included(dtype):
    x = logprobs_with_ties(dtype)
    for filters in FILTERS:
        got = make_sampler(temp=0.7, **filters).log_probs(x.reshape(2, 3, V)).reshape(6, V)
        for row in range(6):
            want = mlx_lm_filtered(x[row : row + 1], **filters)
            assert kept(got[row]) == kept(want[0]), (filters, row)
    # top_p and min_p are not one: the filters did something.
    assert kept(make_sampler(temp=1, top_p=0.5).log_probs(x)) != kept(make_sampler(temp=1, min_p=0.3).log_probs(x))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_xtc_removes_what_mlx_lm_removes_where_the_rows_coin_says_so(dtype):
    x = normalise((mx.random.normal((6, V), key=mx.random.key(5)) * 3).astype(dtype))
    coins = mx.array([0.0, 0.39, 0.41, 0.99, 0.2, 0.5])
    removed = 0
    for more in ({}, {"top_k": 3}, {"min_p": 0.1, "top_p": 0.9}):
        special = mx.argmax(x[4:5], axis=-1).tolist()
        sampler = make_sampler(temp=1.0, xtc_probability=0.4, xtc_threshold=0.05, xtc_special_tokens=special, **more)
        got = sampler.log_probs(x, coins)
        for row, coin in enumerate(coins.tolist()):
            want = mlx_lm_filtered(x[row : row + 1], xtc=coin < 0.4, threshold=0.05, special=special, **more)
            assert kept(got[row]) == kept(want[0]), (more, row)
            removed += kept(want[0]) != kept(mlx_lm_filtered(x[row : row + 1], **more)[0])
    assert removed >= 3
    with pytest.raises(ValueError, match="xtc_coin"):
        sampler.log_probs(x)


def test_temperature_is_applied_in_float32_after_the_filters():
    x = logprobs_with_ties(mx.bfloat16)
    for temp in (0.3, 1.0, 1.6):
        got = make_sampler(temp=temp, top_p=0.8, top_k=9).log_probs(x)
        assert got.dtype == mx.float32
        for row in range(6):
            left = mlx_lm_filtered(x[row : row + 1], top_p=0.8, top_k=9)[0].astype(mx.float32)
            weights = np.exp(np.array(left, dtype=np.float64) / temp)
            np.testing.assert_allclose(np.exp(np.array(got[row])), weights / weights.sum(), atol=3e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temp": 0.8},
        {"temp": 1.3, "top_p": 0.9, "min_p": 0.02, "min_tokens_to_keep": 3, "top_k": 11},
        {"temp": 0.6, "xtc_probability": 0.5, "xtc_threshold": 0.02, "xtc_special_tokens": [3, 4]},
    ],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_called_as_a_sampler_it_draws_mlx_lms_tokens_from_the_same_global_seed(settings, dtype):
    x = normalise((mx.random.normal((1, V), key=mx.random.key(2))).astype(dtype))
    drawn = []
    for sampler in (make_sampler(**settings), sample_utils.make_sampler(**settings)):
        mx.random.seed(11)
        drawn.append([sampler(x).item() for _ in range(40)])
    assert drawn[0] == drawn[1]
    assert (len(set(drawn[0])) > 1) == bool(settings)


def test_a_temperature_next_to_zero_is_the_argmax_and_zero_exactly_so():
    x = logprobs_with_ties(mx.float32)[2:]
    top = x == x.max(axis=-1, keepdims=True)
    for temp in (1e-9, 1e-40, 5e-324):
        got = make_sampler(temp=temp).log_probs(x)
        assert mx.allclose(mx.exp(got), top / top.sum(axis=-1, keepdims=True)), temp
    greedy = mx.exp(make_sampler().log_probs(x))
    assert mx.array_equal(greedy.argmax(axis=-1), x.argmax(axis=-1)) and mx.all(greedy.sum(axis=-1) == 1)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_log_probabilities_have_the_bits_of_mlx_lms_generate_step(dtype, bit_exact):
    logits = (mx.random.normal((2, 3, 5000), key=mx.random.key(9)) * 4).astype(dtype)
    got = normalise(logits)
    for lane in range(2):
        for row in range(3):
            one = logits[lane, row][None]
            bit_exact(got[lane, row], (one - mx.logsumexp(one, keepdims=True))[0])


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"temp": -0.1}, "temp"),
        ({"temp": float("nan")}, "temp"),
        ({"temp": float("inf")}, "temp"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": -0.2}, "min_p"),
        ({"min_p": 0.1, "min_tokens_to_keep": 0}, "min_tokens_to_keep"),
        ({"min_p": 0.1, "min_tokens_to_keep": 1.5}, "min_tokens_to_keep"),
        ({"top_k": 2.0}, "top_k"),
        ({"xtc_probability": 1.2}, "xtc_probability"),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.6}, "xtc_threshold"),
    ],
)
def test_bad_settings_are_refused_in_one_line_when_made(settings, named):
    for temp in ({}, {"temp": 1.0}):
        with pytest.raises(ValueError, match=named) as error:
            make_sampler(**(temp | settings))
        assert "\n" not in str(error.value) and str(list(settings.values())[-1]) in str(error.value)


def test_settings_that_the_vocabulary_decides_are_refused_at_the_draw():
    x = mx.zeros((1, V))
    for top_k in (V, V + 1):
        for use in (make_sampler(temp=1.0, top_k=top_k), make_sampler(temp=1.0, top_k=top_k).log_probs):
            with pytest.raises(ValueError, match=f"top_k .*{top_k}"):
                use(x)
    for token in (V, -1):
        with pytest.raises(ValueError, match=f"xtc_special_tokens .*{token}"):
            make_sampler(temp=1.0, xtc_probability=0.5, xtc_special_tokens=[token])(x)


def test_noise_of_many_indices_equals_single_calls_bit_for_bit_wherever_it_is_drawn(bit_exact):
    indices = mx.array([[5, 6, 7], [1000, 1001, 1002]])
    results = {}

    def draw(name):
        noise = Noise(7)
        results[name] = [(noise.gumbel(d, indices, 33), noise.uniform(d, indices)) for d in DOMAINS]
        mx.eval(results[name])

    draw("main")
    worker = threading.Thread(target=draw, args=("worker",))
    mx.random.seed(123)
    worker.start()
    worker.join()
    for domain, here, there in zip(DOMAINS, results["main"], results["worker"], strict=True):
        for lane in range(2):
            for row in range(3):
                one = indices[lane : lane + 1, row : row + 1] + 0  # an index that the host has not read
                bit_exact(here[0][lane, row], Noise(7).gumbel(domain, one, 33)[0, 0])
                bit_exact(here[1][lane, row], Noise(7).uniform(domain, one)[0, 0])
                key = mx.array([Noise(7).streams[domain].item(), indices[lane, row].item()], dtype=mx.uint32)
                bit_exact(here[0][lane, row], mx.random.gumbel((33,), key=key))
        for a, b in zip(here, there, strict=True):
            bit_exact(a, b)


def test_seeds_domains_and_indices_have_noise_of_their_own():
    seeds = [0, 1, 255, 256, 2**32, 2**64, 2**64 + 1, 10**5000]
    draws = {
        (seed, domain, index): tuple(Noise(seed).gumbel(domain, mx.array([[index]]), 4)[0, 0].tolist())
        for seed in seeds
        for domain in DOMAINS
        for index in (0, 1, 2**31)
    }
    assert len(set(draws.values())) == len(draws)
    # Fixed for ever: the texts of yesterday's seeds.
    assert [Noise(7).streams[d].item() for d in DOMAINS] == [
        351534771,
        1166695561,
        2495882404,
        1469990525,
        526174286,
    ]
    unseeded = [Noise().gumbel("token", mx.array([[0]]), 4).tolist() for _ in range(3)]
    assert unseeded[0] != unseeded[1] != unseeded[2]


def test_lanes_with_a_seed_each_have_the_noise_of_their_seed_alone(bit_exact):
    got = Noise([7, 3]).gumbel("token", mx.array([[4, 5], [9, 10]]), 6)
    bit_exact(got[:1], Noise(7).gumbel("token", mx.array([[4, 5]]), 6))
    bit_exact(got[1:], Noise(3).gumbel("token", mx.array([[9, 10]]), 6))
    assert Noise([7, 3]).gumbel("token", mx.zeros((2, 0), mx.int32), 6).shape == (2, 0, 6)


@pytest.mark.parametrize("seed", [True, 1.5, "7", [1, None], [False]])
def test_seeds_that_are_no_integers_are_refused(seed):
    with pytest.raises(ValueError, match="seed is .*: it must be an integer of at least 0"):
        Noise(seed)
