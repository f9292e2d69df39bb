"""Where models are by their names, and what is wrong with a pair by its small files alone: imports no model code."""

from pathlib import Path

from specmlx.drafters.pairing import check_pair
from specmlx.formats.checkpoint import read_config
from specmlx.loading.hub import DEMO, download, is_id
from specmlx.targets.config import check_target

AUTO = "auto"
MTP, NGRAM = "mtp", "ngram"
DEMO_DRAFTERS = ("dflash", "dflash2", "dspark", "mtp")


def resolve(path_or_hf_repo: str | Path, revision: str | None = None, local_only: bool = False) -> Path:
    """The local directory of a path, a demo name or a Hub id, which is downloaded unless `local_only`.

    Raises ValueError in one line where there is none.
    """
    name = str(path_or_hf_repo)
    if name == DEMO or name.startswith(DEMO + "/"):
        known = {DEMO: "target", **{f"{DEMO}/{kind}": kind for kind in DEMO_DRAFTERS}}
        if name not in known:
            raise ValueError(f"no demo part named {name!r}: there are {', '.join(known)}")
        return Path(__file__).parents[1] / "demo" / known[name]
    if (path := Path(name).expanduser()).exists():
        if path.is_file() and path.suffix != ".gguf":
            raise ValueError(f"{name} is a file: name its directory, {path.parent}")
        return path
    if name in DEMO_DRAFTERS:
        raise ValueError(f"no such directory: {name}; the demo's drafter is {DEMO}/{name}")
    if not is_id(name):
        raise ValueError(f"no such directory: {name} (nor is it a Hub id like owner/name)")
    return download(name, revision, local_only)


def check_names(model: str, draft_model: str | None) -> None:
    """Raise the ValueError that loading these would end in, as far as config.json files on this machine tell."""
    path = None if is_id(model) else resolve(model)
    config = read_config(path) if path is not None and path.is_dir() and not any(path.glob("*.gguf")) else None
    if config is not None:
        check_target(config, path)
    if draft_model in (None, "none", AUTO, MTP, NGRAM) or is_id(draft_model):
        return
    check_drafter_name(draft_model)
    drafter = resolve(draft_model)
    if config is not None and (reasons := check_pair(config, read_config(drafter))):
        raise ValueError(f"the drafter in {drafter} can't serve this target: {'; '.join(reasons)}")


def check_drafter_name(name: str) -> None:
    """Raise ValueError where a drafter's name is that of the demo's target."""
    if name == DEMO:
        drafters = ", ".join(f"{DEMO}/{kind}" for kind in DEMO_DRAFTERS)
        raise ValueError(f"{DEMO} is a target; its drafters are {drafters}")
