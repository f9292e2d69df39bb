"""Which drafters were published for which targets, with their acceptance length where a source states one."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MTP = "MTP"


@dataclass(frozen=True)
class Published:
    """A drafter for a target.

    Args:
        id: Hub id; "mtp" for the head in the target's own repository.
        taps: layers of the target whose outputs it reads (0-based).
        block: rows that it runs; a DFlash drafter proposes one less, a DSpark one as many.
        tau: acceptance length as published; None where no source was read.
        source: of that figure, and what it is of.
    """

    id: str
    kind: str
    taps: Sequence[int] = ()
    block: int | None = None
    tau: float | None = None
    source: str = ""


@dataclass(frozen=True)
class KnownTarget:
    """A target by all the Hub ids under which the same model goes, the publisher's first."""

    ids: tuple[str, ...]
    drafters: tuple[Published, ...]


def billions(name: str) -> float | None:
    """Billions of parameters that a name like Qwen3.8-27B states; None where it states none."""
    found = re.search(r"(?:^|[-_])(\d+(?:\.\d+)?)[bB](?:[-_]|$)", name.rpartition("/")[2])
    return float(found[1]) if found else None


KNOWN = tuple(
    KnownTarget(tuple(target["ids"]), tuple(Published(**drafter) for drafter in target["drafters"]))
    for target in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
)


def known_target(names: list[str]) -> KnownTarget | None:
    """The known target that goes by one of these Hub ids."""
    wanted = {name.lower() for name in names}
    return next((target for target in KNOWN if wanted & {name.lower() for name in target.ids}), None)
