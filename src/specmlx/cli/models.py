"""`specmlx models`: known targets and their drafters, and what of both is on this machine."""

import json
from dataclasses import asdict
from typing import Any

import click

from specmlx.cli.terminal import answers, say

# Bits of a weight in mlx's 4-bit format with groups of 64.
BITS = 4.5
# Of the memory of a machine whose device recommends nothing (a CPU): the rest is the system's and the conversation's.
SHARE = 0.75


@click.command(short_help="List known targets and drafters.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def models(as_json: bool) -> None:
    """Known targets with their published drafters, what is in the local Hub cache, and what fits this machine's memory.

    τ is the acceptance length as its source states it: other tasks, widths and ways to count give other figures.
    """
    with answers() as out:
        found = _found()
    if as_json:
        say(json.dumps(found), out)
        return
    say(f"{found['memory_gb']:.1f} GB for models on this machine ({found['memory_is']})", out)
    for target in found["targets"]:
        say(f"\n{target['ids'][0]}{_size(target)}{_here(target['cached'])}", out)
        for drafter in target["drafters"]:
            what = [drafter["kind"]]
            if drafter["block"]:
                what.append(f"block {drafter['block']}")
            if drafter["taps"]:
                what.append(f"taps {', '.join(map(str, drafter['taps']))}")
            if drafter["tau"]:
                what.append(f"τ {drafter['tau']} ({drafter['source']})")
            say(f"  {drafter['id']:<42} {'; '.join(what)}{_here(drafter['cached'])}", out)
    others = found["others_cached"]
    if others:
        say("\nalso in the local Hub cache:", out)
    for other in others:
        say(f"  {other['id']:<42} {other['what']}, {other['gb']:.1f} GB", out)


def for_models(recommended: int | None, memory: int | None) -> tuple[float, str]:
    """Bytes that models may take, and what they are: what the device recommends, else a share of all memory."""
    if recommended:
        return recommended, "the working set that its GPU recommends"
    return SHARE * (memory or 0), f"{SHARE:.0%} of its memory"


def _found() -> dict[str, Any]:
    import mlx.core as mx

    from specmlx.evaluation.machine import this_machine
    from specmlx.loading.catalog import KNOWN, billions
    from specmlx.loading.hub import cached_repos
    from specmlx.loading.inspect import inspect_path

    info = mx.device_info() if mx.default_device() == mx.gpu else {}
    memory, memory_is = for_models(info.get("max_recommended_working_set_size"), this_machine().memory)
    cached = {repo.id.lower(): repo for repo in cached_repos()}
    listed = set()

    def here(name: str) -> bool:
        listed.add(name.lower())
        return name.lower() in cached

    targets = []
    for target in KNOWN:
        size = billions(target.ids[0])
        needed = size * BITS / 8 if size else None
        found = asdict(target) | {"cached": [name for name in target.ids if here(name)], "gb_in_4_bits": needed}
        found["fits"] = None if needed is None else needed * 1e9 <= memory
        for drafter in found["drafters"]:
            drafter["cached"] = here(drafter["id"])
        targets.append(found)
    others = []
    for key, repo in cached.items():
        if key in listed:
            continue
        try:
            found = inspect_path(repo.path)
        except (ValueError, OSError):
            continue
        others.append({"id": repo.id, "what": f"{found.what}, {found.kind}", "gb": found.bytes / 1e9})
    return {"memory_gb": memory / 1e9, "memory_is": memory_is, "targets": targets, "others_cached": others}


def _size(target: dict[str, Any]) -> str:
    if target["gb_in_4_bits"] is None:
        return ""
    fits = "fits" if target["fits"] else "does not fit"
    return f" (about {target['gb_in_4_bits']:.1f} GB in 4 bits by its name: {fits})"


def _here(cached: Any) -> str:
    return " [in the cache]" if cached else ""
