"""The file that keeps what races found, one for each chip."""

import contextlib
import json
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

import specmlx
from specmlx.formats.atomic import write_atomically
from specmlx.formats.cache import cache_directory
from specmlx.kernels.choice.operator import STOCK, Key, Operator


def this_chip() -> str:
    """The chip's own name, as mlx tells it."""
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or "unknown")


def this_version() -> str:
    """Of what decides the result: specmlx, mlx, and the system with its Metal compiler."""
    return f"specmlx {specmlx.__version__}, mlx {version('mlx')}, {platform.system()} {platform.release()}"


@cache
def power_mode() -> str:
    """The power mode by macOS's `pmset`; "" elsewhere and where it can't be read."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "darwin":
            said = subprocess.run(["pmset", "-g"], capture_output=True, text=True, timeout=2).stdout
            return " ".join(sorted(" ".join(line.split()) for line in said.splitlines() if "powermode" in line))
    return ""


def table_path(chip: str) -> Path:
    """In the cache directory; the file can be deleted."""
    return cache_directory() / f"kernels-{re.sub(r'[^a-z0-9]+', '-', chip.lower()).strip('-')}.json"


def entry_name(operator: Operator, key: Key) -> str:
    return f"{operator.name} {json.dumps(dict(key), sort_keys=True)}"


@dataclass
class Outcome:
    """Of a race: seconds of a call by row count and variant, and why variants were dropped."""

    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: dict) -> "Outcome":
        """One that was kept. Raises what a field of another kind raises."""
        seconds = {int(n): {v: float(s) for v, s in times.items()} for n, times in entry["seconds"].items()}
        return cls(seconds, {str(variant): str(why) for variant, why in entry["dropped"].items()})

    def fastest(self, rows: int) -> str:
        """The variant for `rows`, by the next row count that was measured; stock beyond the last."""
        measured = min((n for n in self.seconds if n >= rows), default=None)
        times = self.seconds.get(measured, {})
        return min(times, key=times.__getitem__, default=STOCK)

    def for_every_row_count(self, variants: tuple[str, ...]) -> str:
        """The fastest over all row counts together of those variants that ran in each; stock if none did."""
        ran = [v for v in variants if self.seconds and all(v in times for times in self.seconds.values())]
        return min(ran, key=lambda v: sum(times[v] for times in self.seconds.values()), default=STOCK)


@dataclass
class Table:
    """entries: outcomes by `entry_name`. off: operators that are switched off, kept across versions."""

    path: Path
    chip: str
    entries: dict[str, Outcome] = field(default_factory=dict)
    off: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path | None = None, chip: str | None = None) -> "Table":
        """The chip's table; empty if there is no file, if it is corrupt, or from another version."""
        chip = chip or this_chip()
        table = cls(path or table_path(chip), chip)
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            kept = json.loads(table.path.read_text())
            table.off = [str(name) for name in kept["off"]]
            if (kept["version"], kept["chip"]) == (this_version(), chip):
                entries = {name: Outcome.of(entry) for name, entry in kept["entries"].items()}
                cls(table.path, chip, entries).keys()
                table.entries = entries
        return table

    def keys(self) -> list[tuple[str, Key]]:
        """Name of the operator and key of every entry."""
        return [(operator, json.loads(key)) for operator, key in (name.split(" ", 1) for name in self.entries)]

    def switch(self, name: str, off: bool) -> None:
        """Switch an operator off, or on again, and write that. Raises OSError where it can't be written."""
        self.off = [each for each in Table.read(self.path, self.chip).off if each != name] + ([name] if off else [])
        self._write()

    def write(self) -> None:
        """In one step, so that nobody reads half a file; a folder that can't be written costs a race next time.

        What others have written since this table was read is kept.
        """
        self.off = Table.read(self.path, self.chip).off
        with contextlib.suppress(OSError):
            self._write()

    def _write(self) -> None:
        self.entries = Table.read(self.path, self.chip).entries | self.entries
        entries = {name: asdict(outcome) for name, outcome in self.entries.items()}
        table = {"version": this_version(), "chip": self.chip, "off": self.off, "entries": entries}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, [json.dumps(table, indent=1).encode()])
