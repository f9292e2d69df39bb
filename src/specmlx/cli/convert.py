"""`specmlx convert`: a target and its drafter as one directory."""

from pathlib import Path

import click

from specmlx.cli.terminal import answers, note, say, show_status

_BAR = 30


@click.command(short_help="Write a target and its drafter to one directory.")
@click.option("--model", required=True, metavar="PATH_OR_ID", help="Target: a directory, a Hub id or a .gguf file.")
@click.option(
    "--draft-model", metavar="PATH_OR_ID|mtp|none", help="Its drafter, for the folder draft/; mtp: its own head."
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A new directory.")
@click.option("--quantize", type=click.Choice(["2", "3", "4", "5", "6", "8"]), help="Bits of the target's matrices.")
@click.option("--group-size", type=click.Choice(["32", "64", "128"]), default="64", show_default=True)
def convert(model: str, draft_model: str | None, out: Path, quantize: str | None, group_size: str) -> None:
    """Write a target to a new directory that mlx_lm loads too, with its drafter in the folder draft/ for specmlx.

    The directory appears when all of it is written: a run that is killed leaves none.
    """
    from specmlx.loading.auto_drafter import has_mtp
    from specmlx.loading.convert import convert as write
    from specmlx.loading.resolve import resolve

    def progress(done: int, total: int) -> None:
        filled = _BAR * done // max(total, 1)
        bar = "#" * filled + "." * (_BAR - filled)
        show_status(f"writing [{bar}] {done / 1e9:.2f} of {total / 1e9:.2f} GB")

    if draft_model == "auto":
        raise ValueError("--draft-model auto: convert writes a drafter that is named; the default is none")
    drafter = None if draft_model == "none" else draft_model
    with answers() as stdout:
        try:
            path = write(model, out, drafter, int(quantize) if quantize else None, int(group_size), progress)
        finally:
            show_status("")
    source = resolve(model)
    if draft_model is None and (named := _named(source)):
        note(f"{model} names a drafter, which is not written; --draft-model {named} puts it in draft/")
    if draft_model is None and has_mtp(source):
        note("the target's MTP head is left out, since mlx_lm doesn't load it; --draft-model mtp keeps it in draft/")
    say(str(path), stdout)


def _named(source: Path) -> str | None:
    """The drafter that a target's config.json names, or the one in its folder draft/."""
    from specmlx.formats.checkpoint import read_config

    if not (source / "config.json").is_file():
        return None
    name = str(read_config(source).get("draft_model") or "draft")
    if (source / name).is_dir():
        return str(source / name)
    return None if name == "draft" else name
