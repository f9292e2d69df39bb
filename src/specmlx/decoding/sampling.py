"""From log-probabilities to the distribution that is sampled from: mlx-lm's filters, in mlx-lm's order.

The same code serves the target's p and a drafter's q. The filters keep exactly the tokens that
mlx_lm.sample_utils keeps, in the dtype of the logits; the temperature is applied in float32.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from specmlx.formats.values import MOST, integer, number

# A temperature close to 0 would overflow float32 as 0 * inf; here it is the argmax already.
_LARGEST_SCALE = 1e30


def apply_top_p(logprobs: mx.array, top_p: float, total: float | None = None) -> mx.array:
    """Keep the most probable tokens until their mass reaches top_p, [..., V] (mlx_lm.sample_utils).

    total: the mass of all tokens, where these are the most probable of more.
    """
    ordered = mx.sort(logprobs, axis=-1)
    probs = mx.exp(ordered.astype(mx.float32))
    above = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    mass = above[..., :1] + probs[..., :1] if total is None else total
    dropped = (above >= top_p * mass).sum(axis=-1, keepdims=True)
    threshold = mx.take_along_axis(ordered, dropped, axis=-1)
    return mx.where(logprobs < threshold, -float("inf"), logprobs)


def apply_min_p(logprobs: mx.array, min_p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Keep tokens of at least min_p times the top probability, [..., V] (mlx_lm.sample_utils)."""
    removed = logprobs < mx.max(logprobs, axis=-1, keepdims=True) + math.log(min_p)
    if min_tokens_to_keep > 1:
        top = mx.argpartition(logprobs, kth=-min_tokens_to_keep, axis=-1)[..., -min_tokens_to_keep:]
        removed = mx.put_along_axis(removed, top, mx.array(False), axis=-1)
    return mx.where(removed, -float("inf"), logprobs)


def apply_xtc(logprobs: mx.array, apply: mx.array, threshold: float, special: Sequence[int] = ()) -> mx.array:
    """Where `apply` [...] holds, remove all tokens above the threshold but the least of them, [..., V]."""
    probs = mx.softmax(logprobs, axis=-1)
    least = mx.where(probs > threshold, probs, mx.inf).min(axis=-1, keepdims=True)
    removed = (probs > least) & apply[..., None]
    if special:
        removed[..., mx.array(special)] = False
    return mx.where(removed, -float("inf"), logprobs)


def apply_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """Keep the top_k most probable tokens, [..., V]; ValueError unless 0 < top_k < V (as mlx-lm)."""
    vocab = logprobs.shape[-1]
    if not 0 < top_k < vocab:
        raise ValueError(f"top_k must lie between 1 and {vocab - 1}, below the vocabulary, or 0 for off: got {top_k}")
    rest = mx.argpartition(-logprobs, kth=top_k - 1, axis=-1)[..., top_k:]
    return mx.put_along_axis(logprobs, rest, mx.array(-float("inf"), logprobs.dtype), axis=-1)


def normalise(logits: mx.array) -> mx.array:
    """Log-probabilities in the logits' own dtype, as mlx_lm.generate computes them, [..., V] -> [..., V].

    Greedy is decided on these: rounding makes ties that the logits do not have.
    """
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@dataclass(frozen=True)
class Sampler:
    """Sampling settings, as mlx_lm.sample_utils.make_sampler takes them, callable as its samplers are.

    temp: the temperature, applied last; 0 takes the argmax.
    top_p: keep the most probable tokens up to this mass; 0 and 1 are off.
    min_p: keep tokens of at least this share of the top probability; 0 is off.
    min_tokens_to_keep: how many tokens min_p always keeps.
    top_k: keep this many tokens, fewer than the vocabulary has; 0 is off.
    xtc_probability: how often XTC removes the top choices; 0 is off.
    xtc_threshold: the probability above which XTC sees a top choice.
    xtc_special_tokens: ids that XTC never removes.

    Raises ValueError for bad values.
    """

    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: Sequence[int] | None = ()

    def __post_init__(self):
        for name, most, hint in (
            ("temp", MOST, "0 is greedy"),
            ("top_p", 1, "0 or 1 is off"),
            ("min_p", 1, "0 is off"),
            ("xtc_probability", 1, "0 is off"),
            ("xtc_threshold", 0.5 if self.xtc_probability else MOST, "mlx-lm's default is 0.1"),
        ):
            object.__setattr__(self, name, number(name, getattr(self, name), 0, most, hint))
        for name, least in (("top_k", 0), ("min_tokens_to_keep", 1)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least))
        special = tuple(int(token) for token in self.xtc_special_tokens or ())
        object.__setattr__(self, "xtc_special_tokens", special)

    @property
    def greedy(self) -> bool:
        """True at temperature 0: the argmax of the log-probabilities, whatever the filters say."""
        return self.temp == 0

    @property
    def filters(self) -> bool:
        """Whether anything but the temperature is applied."""
        return 0 < self.top_p < 1 or self.min_p > 0 or self.xtc_probability > 0 or self.top_k > 0

    @property
    def scale(self) -> float:
        """What log-probabilities are multiplied by."""
        return min(1.0 / self.temp, _LARGEST_SCALE)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draw as mlx-lm's samplers do, from mx.random's global state: [..., V] -> [...]."""
        if self.greedy:
            return mx.argmax(logprobs, axis=-1)
        coin = mx.random.uniform(0, 1) if self.xtc_probability > 0 else None
        return mx.random.categorical(self._filter(logprobs, coin) * (1.0 / self.temp))

    def log_probs(self, logprobs: mx.array, xtc_coin: mx.array | None = None, total: float | None = None) -> mx.array:
        """The normalised log-distribution that is sampled from, [..., V] -> [..., V] float32.

        Args:
            logprobs: logits - logsumexp(logits), in the model's dtype.
            xtc_coin: uniform in [0, 1), [...]; needed where xtc_probability > 0 (ValueError).
            total: see `apply_top_p`.
        """
        if self.greedy:
            top = mx.argmax(logprobs, axis=-1, keepdims=True)
            return mx.where(mx.arange(logprobs.shape[-1]) == top, 0.0, -float("inf"))
        kept = self._filter(logprobs, xtc_coin, total).astype(mx.float32)
        # From the top: at a low temperature, log-probabilities of -2 would leave no digits to normalise.
        scaled = (kept - kept.max(axis=-1, keepdims=True)) * self.scale
        return scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)

    def _filter(self, logprobs, xtc_coin, total=None):
        if 0 < self.top_p < 1:
            logprobs = apply_top_p(logprobs, self.top_p, total)
        if self.min_p > 0:
            logprobs = apply_min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability > 0:
            if xtc_coin is None:
                raise ValueError("xtc_probability > 0 needs xtc_coin: pass a uniform number for each row")
            vocab = logprobs.shape[-1]
            for token in self.xtc_special_tokens:
                if not 0 <= token < vocab:
                    raise ValueError(f"xtc_special_tokens must lie in the vocabulary 0..{vocab - 1}, got {token}")
            apply = xtc_coin <= self.xtc_probability
            logprobs = apply_xtc(logprobs, apply, self.xtc_threshold, self.xtc_special_tokens)
        if self.top_k > 0:
            logprobs = apply_top_k(logprobs, self.top_k)
        return logprobs


make_sampler = Sampler
