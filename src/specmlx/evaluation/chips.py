"""Apple's chips: memory bandwidth, and how many multiply-adds a second their GPUs can do."""

import json
import re
from dataclasses import dataclass, replace
from importlib.resources import files

# Clock of the GPU in GHz by generation, approximate: from public measurements, Apple states none.
_CLOCK = {"M1": 1.3, "M2": 1.4, "M3": 1.4, "M4": 1.6}
_LANES = 128


@dataclass(frozen=True)
class Chip:
    """A chip's memory bandwidth in GB/s (10⁹, Apple's figure) and its GPU cores."""

    name: str
    bandwidth: float
    gpu_cores: int

    @property
    def multiply_adds(self) -> float | None:
        """The ALUs' peak, multiply-adds a second: cores × 128 × clock. None where tensor units lift the limit (M5)."""
        clock = _CLOCK.get(self.name.partition(" ")[0])
        return None if clock is None else self.gpu_cores * _LANES * clock * 1e9


CHIPS = tuple(Chip(*row) for row in json.loads(files(__package__).joinpath("chips.json").read_text(encoding="utf-8")))


def chip_named(name: str, gpu_cores: int | None = None) -> Chip:
    """The chip of a name like "M5 Pro", "m5-max-40" or "Apple M5 Max".

    `gpu_cores`, where they are known, say which of two it is, and stand for those of the table. Raises ValueError, one
    line, for an unknown name and for one that two chips share.
    """
    wanted = _words(name)
    found = [chip for chip in CHIPS if _words(chip.name)[: len(wanted)] == wanted and _fits(chip, wanted)]
    if len(found) > 1 and gpu_cores is not None:
        found = [chip for chip in found if chip.gpu_cores == gpu_cores] or found
    if len(found) == 1:
        return found[0] if gpu_cores is None else replace(found[0], gpu_cores=gpu_cores)
    if found:
        raise ValueError(f"{name!r} is one of {', '.join(chip.name for chip in found)}: say which")
    raise ValueError(f"unknown chip {name!r}: there are {', '.join(chip.name for chip in CHIPS)}; or give GB/s")


def _words(name: str) -> list[str]:
    words = re.split(r"[\s_-]+", name.strip().lower().removesuffix("core").rstrip("-_ "))
    return [word for word in words if word not in ("apple", "core", "")]


def _fits(chip: Chip, wanted: list[str]) -> bool:
    # "M3" is the plain one, though all of its family begin with it; "M3 Max" may be either of two.
    rest = _words(chip.name)[len(wanted) :]
    return bool(wanted) and (not rest or rest[0].isdigit())
