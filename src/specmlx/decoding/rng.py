"""The random numbers of a request: a function of seed, purpose and absolute token index, and of nothing else.

mx.random's global state belongs to a thread and advances with every draw of anybody; a key does neither.
"""

import copy
import hashlib
import os
from collections.abc import Sequence

import mlx.core as mx

from specmlx.formats.values import integer

# token: the target's draw (and, coupled, the drafter's); xtc: its coin; the others are rejection sampling's:
# the drafter's draw, the acceptance threshold, the draw after the last accepted token.
DOMAINS = ("token", "xtc", "draft", "accept", "residual")

# -log(-log(u)) is -inf at u = 0, which would rule out even the only possible token. The least finite value is
# -3.1, at u = 2^-32: this bound changes u = 0 alone.
_LEAST = -4.0


class Noise:
    """Noise of one request, or of B lanes with a seed each; without a seed it comes from the system."""

    def __init__(self, seed: int | Sequence[int] | None = None):
        """seed: an integer of at least 0, huge ones too, or a sequence of B of them. Raises ValueError."""
        if seed is None:
            seed = int.from_bytes(os.urandom(16), "little")
        seeds = [integer("seed", number, 0) for number in (seed if isinstance(seed, (list, tuple)) else [seed])]
        keys = {domain: [[_stream_key(number, domain)] for number in seeds] for domain in DOMAINS}
        self.streams = {domain: mx.array(found, dtype=mx.uint32) for domain, found in keys.items()}

    @staticmethod
    def together(noises: "Sequence[Noise]") -> "Noise":
        """The noise of several requests as one of so many lanes."""
        noise = copy.copy(noises[0])
        noise.streams = {domain: mx.concatenate([each.streams[domain] for each in noises]) for domain in DOMAINS}
        return noise

    def lane(self, index: int) -> "Noise":
        """One lane's noise."""
        noise = copy.copy(self)
        noise.streams = {domain: stream[index : index + 1] for domain, stream in self.streams.items()}
        return noise

    def keys(self, domain: str, indices: mx.array) -> mx.array:
        """Keys [stream, index] of absolute token indices [B, T] (device arrays too), [B, T, 2] uint32."""
        indices = indices.astype(mx.uint32)
        return mx.stack(mx.broadcast_arrays(self.streams[domain], indices), axis=-1)

    def gumbel(self, domain: str, indices: mx.array, vocab: int) -> mx.array:
        """Gumbel noise over the vocabulary, [B, T] -> [B, T, V] float32."""
        return mx.maximum(
            self._each(lambda key: mx.random.gumbel((vocab,), key=key), domain, indices, (vocab,)), _LEAST
        )

    def uniform(self, domain: str, indices: mx.array) -> mx.array:
        """One number in [0, 1) an index, [B, T] -> [B, T] float32."""
        return self._each(lambda key: mx.random.uniform(key=key), domain, indices, ())

    def _each(self, draw, domain, indices, shape):
        keys = self.keys(domain, indices)
        if keys.size == 0:
            return mx.zeros((*keys.shape[:-1], *shape))
        return mx.vmap(draw)(keys.reshape(-1, 2)).reshape(*keys.shape[:-1], *shape)


def _stream_key(seed: int, domain: str) -> int:
    data = seed.to_bytes(seed.bit_length() // 8 + 1, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(data, digest_size=4, person=domain.encode()).digest(), "little")
