"""What the kernels' launches depend on beside the shapes, by family of chips, with the reason of each value.

None was measured on a Mac; the arithmetic is that of each kernel's README. In which order a row's products are added
follows from these and from N and K alone, so bits are equal within a family, whatever the number of rows.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

# Of a threadgroup that looks for the best of a row's segment.
THREADS = 256


class Chunks(NamedTuple):
    """Where keys of attention are split: `many` chunks of `size` from position 0, then chunks of `rest`.

    Short ones first, so that short contexts fill the chip; long ones later, where partial results would cost more.
    """

    size: int
    many: int = 64
    rest: int = 1024

    def count(self, length: int, seen: int | None = None) -> int:
        """How many chunks the first `length` keys touch, or any `seen` neighbours of them."""
        first = self.size * self.many
        n = -(-length // self.size) if length <= first else self.many + -(-(length - first) // self.rest)
        return n if seen is None else min(n, (seen - 2) // self.size + 2)


@dataclass(frozen=True)
class Tuning:
    """Of one family."""

    # Products: simdgroups that share K. More threads a core wait for memory (12 simdgroups keep one busy); above 8 the
    # partial sums outgrow the 24 KiB that scales take.
    simdgroups: int = 8
    # How much more than the mean the fullest of them may have: it is what all wait for.
    uneven: float = 1.125
    # Tiles of 8 rows that one read of the weights serves. A third would need 32 more registers than fit.
    tiles: int = 2
    # Rows of form V: so many multiply-adds a weight are less than the 8 of a matrix operation, decoding included.
    vectors: int = 5
    # Row counts of a race: plain decoding, narrow blocks one by one (V and mlx change there), whole blocks, two lanes.
    raced_rows: tuple[int, ...] = (1, 2, 3, 4, 5, 8, 16, 32)
    # Attention: chunks of 256 keys, as 16 of them (4 key heads) have to fill the chip.
    chunks: Chunks = Chunks(256)
    # Delta rule: simdgroups of a threadgroup. They share nothing but the cached loads of k and q.
    delta_simdgroups: int = 4
    # Scores of a threadgroup in acceptance and in the top k: 31 of them share a row of 248,320.
    segment: int = 8192
    # Rows of the Markov matrix of a threadgroup: 243 of them, several a core.
    markov_rows: int = 1024


# By the last letter of mlx's name of the architecture, as in applegpu_g16s.
FAMILIES = {
    # M1 .. M5 with 7 to 10 cores: half as many chunks fill them, and write half as many partial results.
    "g": Tuning(chunks=Chunks(512, 32), markov_rows=2048),
    # Pro and Max.
    "s": Tuning(),
    # Ultra: up to 80 cores want more and smaller pieces of what is not split otherwise.
    "d": Tuning(markov_rows=512, segment=4096),
}


def family(architecture: str) -> Tuning:
    """The table's row for an architecture; of one that it does not know, that of Pro and Max."""
    found = re.fullmatch(r"applegpu_g\d+(\w)", architecture)
    return FAMILIES.get(found[1] if found else "s", FAMILIES["s"])


@lru_cache
def tuning() -> Tuning:
    """Of the chip that mlx runs on."""
    return family(str(mx.device_info().get("architecture", "")))


def segments(V: int) -> tuple[int, dict[str, int]]:
    """How many segments a row of V scores has, one for each threadgroup, and what tells the kernels so."""
    size = tuning().segment
    return -(-V // size), {"V": V, "W": 4 if V % 4 == 0 else 1, "SEGMENT": size, "THREADS": THREADS}
