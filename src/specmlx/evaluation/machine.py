"""The machine that this runs on: chip, memory, backend, and the bandwidth of its memory where that is known."""

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import mlx.core as mx
import numpy as np

import specmlx
from specmlx.evaluation.chips import chip_named
from specmlx.formats.atomic import write_atomically
from specmlx.formats.cache import cache_directory

MEASURED = "measured by specmlx doctor --measure"


@dataclass(frozen=True)
class Bandwidth:
    """GB/s (10⁹) of a machine's memory, and where that figure is from."""

    gigabytes_per_second: float
    source: str


@dataclass(frozen=True)
class Machine:
    """chip and memory (bytes) by the system's own names; backend: Metal, CUDA or CPU, what mlx computes with."""

    system: str
    chip: str
    memory: int | None
    gpu_cores: int | None
    cores: int | None
    backend: str

    @property
    def key(self) -> str:
        """What a measurement on this machine is kept under."""
        return f"{self.chip}, {self.gpu_cores or self.cores} cores, {self.backend}"


def this_machine() -> Machine:
    """What mlx and the system report; nothing in it names a user or a path."""
    info = mx.device_info()
    return Machine(
        system=f"{_system()} {platform.machine()}",
        chip=str(
            _output("sysctl", "-n", "machdep.cpu.brand_string")
            or info.get("device_name")
            or platform.processor()
            or "unknown"
        ),
        memory=_memory(),
        gpu_cores=gpu_cores_of(_output("ioreg", "-rc", "AGXAccelerator", "-d", "1") or ""),
        cores=os.cpu_count(),
        backend=backend(),
    )


def versions(*packages: str) -> dict[str, str]:
    """Of specmlx, Python and packages; "missing" for one that is not installed."""
    found = {"specmlx": specmlx.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def backend() -> str:
    """What mlx's default device is: Metal, CUDA or CPU."""
    if mx.default_device().type != mx.gpu:
        return "CPU"
    return "Metal" if mx.metal.is_available() else "CUDA"


def known_bandwidth(machine: Machine | None = None) -> Bandwidth | None:
    """What `specmlx doctor --measure` kept of this machine, else Apple's figure of its chip, else None."""
    machine = this_machine() if machine is None else machine
    if (measured := _kept().get(machine.key)) is not None:
        return Bandwidth(measured, MEASURED)
    try:
        chip = chip_named(machine.chip, machine.gpu_cores)
    except ValueError:
        return None
    return Bandwidth(chip.bandwidth, f"Apple's figure of {chip.name}")


def measure_bandwidth(nbytes: int | None = None, seconds: float = 0.5) -> Bandwidth:
    """A streaming probe over arrays that no cache holds: the best of its ways by their median speeds.

    On a GPU mlx sums an array up and multiplies it with a vector; on a CPU one core copies with numpy, which is faster
    than any of mlx's CPU operations. Kept under the machine's name for `known_bandwidth`.
    """
    nbytes = (2**28 if backend() == "CPU" else 2**30) if nbytes is None else nbytes
    rate = round(max(_rate(run, moved, seconds) for run, moved in _streams(nbytes)), 1)
    _keep(this_machine().key, rate)
    return Bandwidth(rate, MEASURED)


def _streams(nbytes: int) -> list[tuple[Callable[[], object], int]]:
    """Ways to stream, each with the bytes that one call moves."""
    if backend() == "CPU":
        source = np.ones(nbytes // 4, dtype=np.float32)
        target = np.zeros_like(source)
        return [(lambda: np.copyto(target, source), 2 * source.nbytes), (source.max, source.nbytes)]
    x = mx.ones((nbytes // 2**14, 2**13), dtype=mx.bfloat16)
    v = mx.ones((2**13,), dtype=mx.bfloat16)
    mx.eval(x, v)
    return [(lambda: mx.eval(mx.sum(x)), x.nbytes), (lambda: mx.eval(x @ v), x.nbytes)]


def _rate(run: Callable[[], object], moved: int, seconds: float) -> float:
    """The median of a call's GB/s, over at least five calls after a first one."""
    run()
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while len(rates) < 5 or time.perf_counter() < end:
        begun = time.perf_counter()
        run()
        rates.append(moved / (time.perf_counter() - begun) / 1e9)
    return median(rates)


def cache_file() -> Path:
    """Where measurements are kept."""
    return cache_directory() / "bandwidth.json"


def _kept() -> dict[str, float]:
    try:
        kept = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    good = isinstance(kept, dict) and all(
        isinstance(rate, int | float) and 0 < rate < float("inf") for rate in kept.values()
    )
    return kept if good else {}


def _keep(key: str, rate: float) -> None:
    file = cache_file()
    # The figure is reported even where it can't be kept.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, [json.dumps(_kept() | {key: rate}).encode()])


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    if sys.platform == "linux":
        return f"Linux {platform.release().split('-')[0]}"
    return f"{platform.system()} {platform.release()}"


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def gpu_cores_of(ioreg: str) -> int | None:
    """The GPU cores that `ioreg -rc AGXAccelerator` reports."""
    found = re.search(r'"gpu-core-count" = (\d+)', ioreg)
    return int(found[1]) if found else None


def _output(*command: str) -> str | None:
    """What a program of macOS prints; None elsewhere."""
    if sys.platform != "darwin":
        return None
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
