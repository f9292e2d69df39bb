"""Which drafter `draft_model="auto"` takes where the target names none: of those on this machine."""

from pathlib import Path
from typing import Any, NamedTuple

from specmlx.drafters.config import is_language_model
from specmlx.drafters.pairing import check_pair
from specmlx.formats.checkpoint import tensors_of
from specmlx.loading.catalog import MTP, known_target
from specmlx.loading.hub import DEMO, CachedRepo, base_models, cached_id, cached_repos, is_id
from specmlx.loading.resolve import resolve
from specmlx.targets.any_lm import LMConfig
from specmlx.targets.config import HybridConfig
from specmlx.targets.gguf import gguf_files, has_head, read_parts


class Choice(NamedTuple):
    """A drafter (a directory, or "mtp") and why it, or None and why none.

    named: whether the target's own files name it, so that one which can't be loaded is an error.
    """

    name: str | Path | None
    reason: str
    named: bool = False


def choose_drafter(name: str, path: Path, target: HybridConfig | LMConfig, cache: Path | None = None) -> Choice:
    """The drafter for a target in a directory or GGUF file that goes by `name`.

    It is the one that the target's config names, or the one in its folder draft/, or one of the local Hub cache
    (`cache`: another one): one published for the target's Hub id or its base model, else one made for them, else one of
    the same sizes, the first by id; or the MTP head in the target's own files. No weight is read.
    """
    folder = path if path.is_dir() else path.parent
    if named := target.draft_model:
        reason = f"the drafter that the config names, {named}, is not on this machine: pass draft_model={named!r}"
        return Choice(_named(folder, named), reason, named=True)
    if (folder / "draft").is_dir():
        return Choice(folder / "draft", "in its folder draft/", named=True)
    ids = [found for found in (cached_id(folder), name if is_id(name) else None) if found] + base_models(folder)
    known = known_target(ids)
    published = [drafter.id for drafter in known.drafters if drafter.kind != MTP] if known else []
    order = [name.lower() for name in published]
    family = {name.lower() for name in [*ids, *(known.ids if known else ())]}

    def ranked(repo: CachedRepo) -> tuple[int, str]:
        if repo.id.lower() in order:
            return order.index(repo.id.lower()), f"published for {known.ids[0]}"
        if shared := [base for base in base_models(repo.path) if base.lower() in family]:
            return len(published), f"made for {shared[0]}"
        return len(published) + 1, "same sizes; made for another model, so it may guess less well"

    if here := [(*ranked(repo), repo) for repo in cached_repos(cache) if _fits(repo, target)]:
        _, why, repo = min(here, key=lambda found: found[0])
        return Choice(str(repo.path), f"{repo.id} ({why})")
    if has_mtp(path):
        return Choice("mtp", "the MTP head in the target's files")
    if published:
        return Choice(None, f"no drafter for {known.ids[0]} on this machine; to fetch one: hf download {published[0]}")
    why = f"{path} names none and has no folder draft/, and none in the local Hub cache fits"
    return Choice(None, f"no drafter: {why}")


def _named(folder: Path, name: str) -> Path | None:
    """The drafter that a target's config names: a folder below the target's, or a Hub id in the local cache."""
    # A config is a stranger's: nothing outside of its directory is opened.
    inside = ".." not in Path(name).parts and not Path(name).is_absolute()
    if inside and (folder / name).is_dir():
        return folder / name
    try:
        return resolve(name, local_only=True) if is_id(name) or name.split("/")[0] == DEMO else None
    except ValueError:
        return None


def has_mtp(path: Path) -> bool:
    """Whether a target's files have its MTP head."""
    try:
        if files := gguf_files(path):
            return has_head(read_parts(files))
        return any(name.startswith(("mtp.", "model.mtp.", "language_model.mtp.")) for name in tensors_of(path))
    except ValueError:
        return False


def _fits(repo: CachedRepo, target: Any) -> bool:
    try:
        return not is_language_model(repo.config) and not check_pair(target, repo.config)
    # Values of a stranger's config may be of any type.
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        return False
