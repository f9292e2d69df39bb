"""`specmlx doctor`: what this machine is, and whether specmlx works on it."""

import json
from typing import TYPE_CHECKING

import click

from specmlx.cli.terminal import answers, say, status

if TYPE_CHECKING:
    from specmlx.evaluation.doctor import Diagnosis

EPILOG = """\b
Examples:
  specmlx doctor
  specmlx doctor --measure --json > doctor.json
"""


@click.command(short_help="What this machine is, and whether specmlx works on it.", epilog=EPILOG)
@click.option("--measure", is_flag=True, help="Measure the memory's bandwidth (some seconds, 1 GB) and keep it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(measure: bool, as_json: bool) -> None:
    """Print machine, versions, memory limits, kernels and advice, and check the demo pair on two prompts.

    Fit for a bug report: it holds no user name and no path. Exit code 0 if the demo pair's answers are the same with
    and without its drafter, else 1.
    """
    with answers() as out:
        with status("examining this machine"):
            from specmlx.evaluation.doctor import examine

            found = examine(measure)
        say(json.dumps(found.as_object()) if as_json else text(found), out)
    click.get_current_context().exit(0 if found.demo.passed else 1)


def text(found: "Diagnosis") -> str:
    """A line a subject, then the advice."""
    machine, demo, hub = found.machine, found.demo, found.hub_cache
    cores = [f"{machine.cores} CPU cores"] + ([f"{machine.gpu_cores} GPU cores"] if machine.gpu_cores else [])
    memory = "unknown memory" if machine.memory is None else f"{machine.memory / 2**30:.1f} GiB"
    limits = ", ".join(f"{name.replace('_', ' ')} {n / 1e9:.1f} GB" for name, n in found.limits.items())
    bandwidth = found.bandwidth
    speed = "unknown" if bandwidth is None else f"{bandwidth.gigabytes_per_second:g} GB/s, {bandwidth.source}"
    offline = ", offline" if hub.offline else ""
    by_choice: dict[str, list[str]] = {}
    for operator, chosen in found.kernels.items():
        by_choice.setdefault(chosen, []).append(operator)
    result = demo.error or (
        f"{demo.identical} of {demo.prompts} prompts the same with and without the drafter, {demo.tokens} tokens in "
        f"{demo.rounds} rounds ({demo.acceptance_length:.2f} tokens per pass)"
    )
    rows = {
        "versions": ", ".join(f"{name} {number}" for name, number in found.versions.items()),
        "machine": ", ".join([machine.system, machine.chip, *cores, memory]),
        "backend": f"{machine.backend}{f', {limits}' if limits else ''}",
        "bandwidth": speed,
        "kernels": "; ".join(f"{', '.join(names)}: {chosen}" for chosen, names in by_choice.items()),
        "Hub cache": f"{hub.models} models, {hub.nbytes / 1e9:.1f} GB{offline}",
        "demo pair": result,
    }
    lines = [f"{name:<10} {value}" for name, value in rows.items()]
    return "\n".join([*lines, *(f"- {sentence}" for sentence in found.advice())])
