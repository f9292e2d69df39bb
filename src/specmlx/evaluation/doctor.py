"""What there is to know of a machine before anything is claimed of it. Nothing in it names a user or a path."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

import specmlx
import specmlx.kernels
from specmlx.evaluation.answer import chat_prompts
from specmlx.evaluation.chips import chip_named
from specmlx.evaluation.machine import Bandwidth, Machine, known_bandwidth, measure_bandwidth, this_machine, versions
from specmlx.evaluation.parity import total, verdicts
from specmlx.evaluation.suites import suite
from specmlx.formats.sizes import affine
from specmlx.kernels.choice.operators import OPERATORS
from specmlx.kernels.dispatch import Chooser, metal_factory

PACKAGES = ("mlx", "mlx-lm", "transformers", "huggingface_hub", "safetensors", "numpy")
_PROMPTS, _TOKENS = 2, 64
_LIMITS = {
    "max_recommended_working_set_size": "recommended_working_set",
    "max_buffer_length": "largest_buffer",
    "memory_size": "device_memory",
}
# A round of Qwen3.8-27B in 4 bits with its drafter keeps this much in memory, short prompts.
_QWEN_27B_GB = 17


@dataclass(frozen=True)
class Demo:
    """The demo pair's answers with and without its drafter; `error` where it could not be run."""

    prompts: int
    identical: int
    tokens: int = 0
    rounds: int = 0
    acceptance_length: float = 0.0
    error: str | None = None

    @property
    def passed(self) -> bool:
        return self.error is None and self.identical == self.prompts


@dataclass(frozen=True)
class HubCache:
    """Models in the Hugging Face cache and their bytes; `offline` where downloads are switched off."""

    models: int
    nbytes: int
    offline: bool


@dataclass(frozen=True)
class Diagnosis:
    """limits: mlx's memory limits in bytes. kernels: what runs each operator that has a Metal kernel of our own."""

    versions: dict[str, str]
    machine: Machine
    limits: dict[str, int]
    bandwidth: Bandwidth | None
    kernels: dict[str, str]
    hub_cache: HubCache
    demo: Demo

    def as_object(self) -> dict[str, Any]:
        """Everything, for `--json`."""
        return asdict(self) | {"advice": self.advice()}

    def advice(self) -> list[str]:
        """What to do about it, in sentences."""
        machine, found = self.machine, []
        if not self.demo.passed:
            found.append("The demo pair fails here: please open an issue with this output.")
        if machine.backend == "CPU" and machine.system.startswith("macOS"):
            found.append("mlx sees no GPU: use an Apple silicon Mac with Python for arm64, not under Rosetta.")
        elif machine.backend != "Metal":
            found.append(f"mlx runs on {machine.backend} here: results are right, speeds say nothing about a Mac.")
        if self.bandwidth is None:
            found.append("The memory's bandwidth is unknown: specmlx doctor --measure measures and keeps it.")
        if (room := self.limits.get("recommended_working_set")) is not None:
            fits = "fits" if room > 1.05e9 * _QWEN_27B_GB else "does not fit"
            pair = f"a 27B target in 4 bits with its drafter (about {_QWEN_27B_GB} GB)"
            found.append(f"The GPU may hold {room / 1e9:.0f} GB: {pair} {fits}.")
        if (peak := _multiply_adds(machine)) is not None and self.bandwidth is not None:
            weights = self.bandwidth.gigabytes_per_second * 1e9 / (affine(4).bits_per_weight / 8)
            rows = int(peak / weights)
            found.append(
                f"In 4 bits the ALUs keep up with the memory for about {rows} rows a pass (decoding the weights not "
                "counted): fewer --num-draft-tokens may be faster than all; in 8 bits there are twice as many rows."
            )
        if self.hub_cache.models == 0:
            found.append("No model has been downloaded yet: the demo pair runs without one (specmlx generate).")
        return found


def examine(measure: bool = False) -> Diagnosis:
    """Look at the machine, and check the demo pair on two prompts; `measure` runs the streaming probe first."""
    machine = this_machine()
    return Diagnosis(
        versions=versions(*PACKAGES),
        machine=machine,
        limits=_limits(mx.device_info()),
        bandwidth=measure_bandwidth() if measure else known_bandwidth(machine),
        kernels=_kernels(),
        hub_cache=_hub_cache(),
        demo=_demo(),
    )


def _limits(info: dict[str, Any]) -> dict[str, int]:
    return {ours: int(info[theirs]) for theirs, ours in _LIMITS.items() if theirs in info}


def _kernels() -> dict[str, str]:
    """By the folders that hold a kernel: which of them run here, and what races have decided."""
    chooser = Chooser()
    raced = {operator.name: operator for operator in OPERATORS}
    folders = Path(specmlx.kernels.__file__).parent.iterdir()
    found = {}
    for name in (folder.name for folder in sorted(folders) if any(folder.glob("*.metal"))):
        found[name] = "Metal kernel" if metal_factory() else "mlx's own operations"
        if name in raced and metal_factory():
            shapes = sum(known == name for known, _ in chooser.table.keys())
            found[name] = chooser.off(raced[name]) or f"{shapes} shapes raced against stock mlx (specmlx kernels)"
    return found


def _hub_cache() -> HubCache:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except (CacheNotFound, OSError, ValueError):
        return HubCache(0, 0, constants.HF_HUB_OFFLINE)
    models = [repo for repo in cache.repos if repo.repo_type == "model"]
    return HubCache(len(models), sum(repo.size_on_disk for repo in models), constants.HF_HUB_OFFLINE)


def _demo() -> Demo:
    try:
        model, tokenizer = specmlx.load()
        prompts = chat_prompts(tokenizer, suite("demo")[:_PROMPTS])
        drafters = {"drafter": model.draft_model}
        found = [row["drafter"] for row in verdicts(model, tokenizer, prompts, drafters, _TOKENS)]
    # Whatever is wrong with the machine is reported, and a message may name a path.
    except Exception as error:
        return Demo(_PROMPTS, 0, error=f"{type(error).__name__}: {_without_paths(str(error))}")
    sums = total(found)
    passed, length = sum(verdict.passed for verdict in found), round(sums.acceptance_length, 2)
    return Demo(len(found), passed, sums.generation_tokens, sums.rounds, length)


def _without_paths(text: str) -> str:
    home = str(Path.home())
    words = " ".join(text.split()).replace(home, "~").split(" ")
    return " ".join("…" if "/" in word or "\\" in word else word for word in words)[:200]


def _multiply_adds(machine: Machine) -> float | None:
    try:
        return chip_named(machine.chip, machine.gpu_cores).multiply_adds
    except ValueError:
        return None
