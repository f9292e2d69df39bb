"""`specmlx models`: known targets and their drafters, and what of both is on this machine."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from specmlx.cli.flags import command, report

# Bits of a weight in mlx's 4-bit format with groups of 64.
BITS = 4.5
# Of the memory of a machine whose device recommends nothing (a CPU): the rest is the system's and the conversation's.
SHARE = 0.75


@command("Print one JSON object instead of a table.")
class Models:
    """Known targets with their published drafters, what is in the local Hub cache, and what fits this machine's memory.

    τ is the acceptance length as its source states it: other tasks, widths and ways to count give other figures.
    """

    def run(self) -> None:
        import mlx.core as mx

        from specmlx.evaluation.machine import this_machine
        from specmlx.loading.catalog import KNOWN, billions
        from specmlx.loading.hub import cached_repos
        from specmlx.loading.inspect import inspect_path

        info = mx.device_info() if mx.default_device() == mx.gpu else {}
        memory, memory_is = for_models(info.get("max_recommended_working_set_size"), this_machine().memory)
        cached = {repo.id.lower(): repo for repo in cached_repos()}
        targets, others, listed = [], [], set()
        for target in KNOWN:
            size = billions(target.ids[0])
            needed = size * BITS / 8 if size else None
            here = [name for name in target.ids if name.lower() in cached]
            fits = None if needed is None else needed * 1e9 <= memory
            found = asdict(target) | {"cached": here, "gb_in_4_bits": needed, "fits": fits}
            for drafter in found["drafters"]:
                drafter["cached"] = drafter["id"].lower() in cached
            listed |= {name.lower() for name in (*target.ids, *(drafter["id"] for drafter in found["drafters"]))}
            targets.append(found)
        for repo in (repo for key, repo in cached.items() if key not in listed):
            try:
                found = inspect_path(repo.path)
            except (ValueError, OSError):
                continue
            others.append({"id": repo.id, "what": f"{found.what}, {found.kind}", "gb": found.bytes / 1e9})
        found = {"memory_gb": memory / 1e9, "memory_is": memory_is, "targets": targets, "others_cached": others}
        report(found, _lines(found))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['memory_gb']:.1f} GB for models on this machine ({found['memory_is']})"
    for target in found["targets"]:
        size, fits = target["gb_in_4_bits"], "fits" if target["fits"] else "does not fit"
        about = f" (about {size:.1f} GB in 4 bits by its name: {fits})" if size else ""
        yield f"\n{target['ids'][0]}{about}{_here(target['cached'])}"
        for drafter in target["drafters"]:
            what = [
                drafter["kind"],
                drafter["block"] and f"block {drafter['block']}",
                drafter["taps"] and f"taps {', '.join(map(str, drafter['taps']))}",
                drafter["tau"] and f"τ {drafter['tau']} ({drafter['source']})",
            ]
            yield f"  {drafter['id']:<42} {'; '.join(filter(None, what))}{_here(drafter['cached'])}"
    if found["others_cached"]:
        yield "\nalso in the local Hub cache:"
    for other in found["others_cached"]:
        yield f"  {other['id']:<42} {other['what']}, {other['gb']:.1f} GB"


def _here(cached: Any) -> str:
    return " [in the cache]" if cached else ""


def for_models(recommended: int | None, memory: int | None) -> tuple[float, str]:
    """Bytes that models may take, and what they are: what the device recommends, else a share of all memory."""
    if recommended:
        return recommended, "the working set that its GPU recommends"
    return SHARE * (memory or 0), f"{SHARE:.0%} of its memory"
