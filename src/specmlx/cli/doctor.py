"""`specmlx doctor`: what this machine is, and whether specmlx works on it."""

from collections import defaultdict
from typing import Any

from specmlx.cli.flags import command, report
from specmlx.cli.options import JSON
from specmlx.cli.terminal import status
from specmlx.formats.values import option


@command(JSON)
class Doctor:
    """Print machine, versions, memory limits, kernels and advice, and check the demo pair on two prompts.

    Fit for a bug report: it holds no user name and no path. Exit code 0 if the demo pair's answers are the same with
    and without its drafter, else 1.

    \b
    Examples:
      specmlx doctor
      specmlx doctor --measure --json > doctor.json
    """

    measure: bool = option(False, "Measure the memory's bandwidth (some seconds, 1 GB) and keep it.")

    def run(self) -> bool:
        with status("examining this machine"):
            from specmlx.evaluation.doctor import examine

            found = examine(self.measure)
        report(found.as_object(), lines(found))
        return found.demo.passed


def lines(found: Any) -> list[str]:
    """A line for each subject of a `Diagnosis`, then the advice."""
    machine, demo, hub, bandwidth = found.machine, found.demo, found.hub_cache, found.bandwidth
    cores = [f"{machine.cores} CPU cores"] + ([f"{machine.gpu_cores} GPU cores"] if machine.gpu_cores else [])
    memory = "unknown memory" if machine.memory is None else f"{machine.memory / 2**30:.1f} GiB"
    limits = (f"{name.replace('_', ' ')} {n / 1e9:.1f} GB" for name, n in found.limits.items())
    by_choice = defaultdict(list)
    for operator, chosen in found.kernels.items():
        by_choice[chosen].append(operator)
    rows = {
        "versions": ", ".join(f"{name} {number}" for name, number in found.versions.items()),
        "machine": ", ".join([machine.system, machine.chip, *cores, memory]),
        "backend": ", ".join([machine.backend, *limits]),
        "bandwidth": "unknown" if bandwidth is None else f"{bandwidth.gigabytes_per_second:g} GB/s, {bandwidth.source}",
        "kernels": "; ".join(f"{', '.join(names)}: {chosen}" for chosen, names in by_choice.items()),
        "Hub cache": f"{hub.models} models, {hub.nbytes / 1e9:.1f} GB{', offline' if hub.offline else ''}",
        "demo pair": demo.error
        or f"{demo.identical} of {demo.prompts} prompts the same with and without the drafter, {demo.tokens} tokens in "
        f"{demo.rounds} rounds ({demo.acceptance_length:.2f} tokens per pass)",
    }
    return [*(f"{name:<10} {value}" for name, value in rows.items()), *(f"- {advice}" for advice in found.advice())]
