"""Which drafter `draft_model="auto"` takes where the target names none: of those on this machine."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specmlx.drafters.config import is_language_model
from specmlx.drafters.pairing import TargetSizes, check_pair
from specmlx.formats.checkpoint import tensors_of
from specmlx.loading.catalog import MTP, KnownTarget, known_target
from specmlx.loading.hub import CachedRepo, base_models, cached_id, cached_repos, is_id
from specmlx.targets.gguf import gguf_files, has_head, read_parts


@dataclass(frozen=True)
class Choice:
    """A drafter by name (a directory, or "mtp") and why it, or no name and why none."""

    name: str | None
    reason: str


def choose_drafter(name: str, path: Path, target: TargetSizes, cache: Path | None = None) -> Choice:
    """The drafter for a target in a directory or GGUF file that goes by `name`: by its Hub id, its base model, its
    architecture.

    `cache`: another Hub cache than the local one. Of several the first published for it is taken, then the first by id;
    last of all the MTP head in the target's own files. No weight is read.
    """
    here = [repo for repo in cached_repos(cache) if _fits(repo, target)]
    folder = path if path.is_dir() else path.parent
    ids = [found for found in (cached_id(folder), name if is_id(name) else None) if found]
    bases = base_models(folder)
    known = known_target([*ids, *bases])
    for repo, why in _fitting(here, ids, bases, known):
        return Choice(str(repo.path), f"{repo.id} ({why})")
    if has_mtp(path):
        return Choice("mtp", "the MTP head in the target's files")
    return Choice(None, _none(path, known))


def has_mtp(path: Path) -> bool:
    """Whether a target's files have its MTP head."""
    try:
        if files := gguf_files(path):
            return has_head(read_parts(files))
        return any(name.startswith(("mtp.", "model.mtp.", "language_model.mtp.")) for name in tensors_of(path))
    except ValueError:
        return False


def _fits(repo: CachedRepo, target: TargetSizes) -> bool:
    try:
        return not is_language_model(repo.config) and not check_pair(target, repo.config)
    # Values of a stranger's config may be of any type.
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        return False


def _fitting(
    here: list[CachedRepo], ids: list[str], bases: list[str], known: KnownTarget | None
) -> Iterator[tuple[CachedRepo, str]]:
    by_id = {repo.id.lower(): repo for repo in here}
    for drafter in known.drafters if known else ():
        if repo := by_id.get(drafter.id.lower()):
            yield repo, f"published for {known.ids[0]}"
    family = {name.lower() for name in [*ids, *bases, *(known.ids if known else ())]}
    for repo in here:
        if shared := [base for base in base_models(repo.path) if base.lower() in family]:
            yield repo, f"made for {shared[0]}"
    for repo in here:
        yield repo, "same sizes; made for another model, so it may guess less well"


def _none(path: Path, known: KnownTarget | None) -> str:
    published = [drafter for drafter in known.drafters if drafter.kind != MTP] if known else []
    if published:
        return f"no drafter for {known.ids[0]} on this machine; to fetch one: hf download {published[0].id}"
    why = f"{path} names none and has no folder draft/, and none in the local Hub cache fits"
    return f"no drafter: {why}"
