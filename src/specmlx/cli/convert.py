"""`specmlx convert`: a target and its drafter as one directory."""

from pathlib import Path

import click

from specmlx.cli.flags import command
from specmlx.cli.options import BITS, GROUP_SIZE
from specmlx.cli.terminal import note, say, show_status
from specmlx.formats.checkpoint import read_config
from specmlx.formats.values import option

_BAR = 30


@command()
class Convert:
    """Write a target to a new directory that mlx_lm loads too, with its drafter in the folder draft/ for specmlx.

    The directory appears when all of it is written: a run that is killed leaves none.
    """

    model: str = option(None, "Target: a directory, a Hub id or a .gguf file.", required=True, metavar="PATH_OR_ID")
    draft_model: str | None = option(
        None, "Its drafter, for the folder draft/; mtp: its own head.", metavar="PATH_OR_ID|mtp|none"
    )
    out: Path = option(None, "A new directory.", required=True, type=click.Path(path_type=Path))
    quantize: str | None = BITS
    group_size: str = GROUP_SIZE

    def run(self) -> None:
        from specmlx.loading.auto_drafter import has_mtp
        from specmlx.loading.convert import convert as write
        from specmlx.loading.resolve import resolve

        def progress(done: int, total: int) -> None:
            filled = _BAR * done // max(total, 1)
            bar = "#" * filled + "." * (_BAR - filled)
            show_status(f"writing [{bar}] {done / 1e9:.2f} of {total / 1e9:.2f} GB")

        if self.draft_model == "auto":
            raise ValueError("--draft-model auto: convert writes a drafter that is named; the default is none")
        drafter = None if self.draft_model == "none" else self.draft_model
        try:
            path = write(
                self.model,
                self.out,
                drafter,
                int(self.quantize) if self.quantize else None,
                int(self.group_size),
                progress,
            )
        finally:
            show_status("")
        source = resolve(self.model)
        if self.draft_model is None and (named := _named(source)):
            note(f"{self.model} names a drafter, which is not written; --draft-model {named} puts it in draft/")
        if self.draft_model is None and has_mtp(source):
            note(
                "the target's MTP head is left out, since mlx_lm doesn't load it; --draft-model mtp keeps it in draft/"
            )
        say(str(path))


def _named(source: Path) -> str | None:
    """The drafter that a target's config.json names, or the one in its folder draft/."""
    if not (source / "config.json").is_file():
        return None
    name = str(read_config(source).get("draft_model") or "draft")
    if (source / name).is_dir():
        return str(source / name)
    return None if name == "draft" else name
