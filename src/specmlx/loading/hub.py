"""The Hugging Face Hub: what is in the local cache, what is on the server, and how it gets here."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from specmlx.formats.checkpoint import INDEX, chosen_shards, read_config
from specmlx.formats.header import MOST, Entry, entries, header_length

# No code: nothing of a repository is ever run. README.md says what a model was made from.
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken", "README.md")
# The same weights once more, in other formats.
NOT = ("consolidated*", "original/*", "onnx/*", "metal/*")


class CachedRepo(NamedTuple):
    """A repository in the local Hub cache, at the newest revision that is whole enough to have a config.json."""

    id: str
    path: Path
    config: dict[str, Any]


# Seconds for the Hub to answer at all: huggingface_hub would ask again for half a minute.
PATIENCE = 5
DEMO = "demo"


def is_id(name: str | Path) -> bool:
    """Whether a name can be a Hub id, owner/name or owner/name@revision: no path on this machine, nor the demo's."""
    name = str(name)
    outside = not name.startswith((".", "/", "~", f"{DEMO}/")) and not Path(name).exists()
    return outside and name.partition("@")[0].count("/") == 1


def pinned(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """A name's Hub id and revision: owner/name@revision says both. Raises ValueError for two different revisions."""
    repo, _, at = name.partition("@")
    if at and revision and at != revision:
        raise ValueError(f"{name} names the revision {at}, revision= another one, {revision}: leave one of them out")
    return repo, at or revision


def download(name: str, revision: str | None = None, local_only: bool = False) -> Path:
    """The snapshot of a repository: from the local cache where it is there, else downloaded with progress on stderr.

    HF_HUB_OFFLINE is honoured. Raises ValueError in one line where it can't be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, revision = pinned(name, revision)
    wanted = {"allow_patterns": [*PATTERNS], "ignore_patterns": [*NOT]}
    try:
        here = local_only or not _reachable()
        return Path(snapshot_download(repo, revision=revision, local_files_only=here, **wanted))
    except LocalEntryNotFoundError:
        where = "neither a directory nor in the local Hub cache"
        raise ValueError(f"{name} is {where}, and the Hub can't be reached") from None
    # Whatever a network may do: httpx's errors are no OSErrors.
    except Exception as error:
        raise ValueError(f"can't get {name} from the Hub: {' '.join(str(error).split())[:300]}") from None


def download_config(name: str, revision: str | None = None) -> dict[str, Any] | None:
    """A repository's config.json, from the cache or downloaded by itself; None where it has none or can't be had."""
    from huggingface_hub import hf_hub_download

    repo, revision = pinned(name, revision)
    try:
        here = not _reachable()
        return read_config(Path(hf_hub_download(repo, "config.json", revision=revision, local_files_only=here)).parent)
    except Exception:
        # The download of all files says why.
        return None


def _reachable() -> bool:
    """Whether the Hub answers, whatever it says; not asked where HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:
        return False
    return True


def cached_repos(cache: Path | None = None) -> list[CachedRepo]:
    """All repositories in the local cache (`cache`: another one) that have a config.json, by id."""
    from huggingface_hub import constants

    found = []
    for folder in sorted(Path(cache or constants.HF_HUB_CACHE).glob("models--*--*")):
        for path in sorted(folder.glob("snapshots/*"), key=lambda path: path.stat().st_mtime, reverse=True):
            try:
                found.append(CachedRepo(str(cached_id(path)), path, read_config(path)))
                break
            except (ValueError, OSError):
                continue
    return found


def cached_id(path: Path) -> str | None:
    """The Hub id of a directory in a Hub cache; None for any other."""
    found = re.search(r"/models--([^/]+)/snapshots/[^/]+$", path.absolute().as_posix())
    return found and found[1].replace("--", "/")


def base_models(path: Path) -> list[str]:
    """The ids that a README.md names as `base_model` in its front matter; none where it has none."""
    if not (file := path / "README.md").is_file():
        return []
    from huggingface_hub import ModelCard

    with file.open(encoding="utf-8", errors="replace") as stream:
        text = stream.read(1 << 16)
    try:
        # Of a text without front matter the card would warn.
        whole = text.startswith("---") and "\n---" in text
        found = ModelCard(text, ignore_metadata_errors=True).data.base_model if whole else None
    # YAML that someone wrote by hand.
    except Exception:
        return []
    names = found if isinstance(found, list) else [found]
    return [name for name in names if isinstance(name, str) and is_id(name)]


def remote_repo(
    name: str, revision: str | None = None, client: Any = None, endpoint: str | None = None
) -> tuple[dict[str, Any], dict[str, Entry], int]:
    """A repository's config.json, its tensors by the files' headers, and how many files they are in; no weight is read.

    Raises ValueError in one line.
    """
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    repo, revision = pinned(name, revision)
    client, headers = client or get_session(), build_hf_headers()
    endpoint = endpoint or constants.ENDPOINT
    listing = remote_json(client, f"{endpoint}/api/models/{repo}/revision/{revision or 'main'}", headers)
    names = [str(file.get("rfilename")) for file in listing.get("siblings") or [] if isinstance(file, dict)]

    def url(file: str) -> str:
        return hf_hub_url(repo, file, revision=revision, endpoint=endpoint)

    index = remote_json(client, url(f"model{INDEX}"), headers, MOST) if f"model{INDEX}" in names else None
    files = sorted(file for file in names if file.endswith(".safetensors") and "/" not in file)
    if not files:
        raise ValueError(f"{name} has no *.safetensors")
    shards = chosen_shards(files, index, lambda file: remote_header(client, url(file), headers), name)
    tensors = {tensor: entry for found in shards.values() for tensor, entry in found.items()}
    return remote_json(client, url("config.json"), headers), tensors, len(shards)


def remote_header(client: Any, url: str, headers: dict[str, str] | None = None) -> dict[str, Entry]:
    """The tensors of a file at a URL, of which only the header is transferred; `client` is an httpx client.

    A server that answers a range with the whole file is read up to the end of the header and then hung up on. Raises
    ValueError, one line with the URL, for an answer that is no such file, and for what the network does.
    """
    try:
        first, size = _first_bytes(client, url, headers, 8, ranged=True)
        length = header_length(first, size)
        text, _ = _first_bytes(client, url, headers, 8 + length, ranged=True)
        return entries(text[8:], size - 8 - length)
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from None


def remote_json(client: Any, url: str, headers: dict[str, str] | None = None, most: int = 1 << 24) -> dict[str, Any]:
    """A JSON object at a URL. Raises ValueError, one line with the URL, for anything else or more than `most` bytes."""
    try:
        found = json.loads(_first_bytes(client, url, headers, most, ranged=False)[0])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{url}: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{url} holds a {type(found).__name__}, not an object")
    return found


def _first_bytes(client: Any, url: str, headers: dict[str, str] | None, count: int, ranged: bool) -> tuple[bytes, int]:
    """The first `count` bytes of a URL, and the size of the whole; all bytes where there are fewer and not `ranged`."""
    asked = {**(headers or {}), **({"Range": f"bytes=0-{count - 1}"} if ranged else {})}
    try:
        with client.stream("GET", url, headers=asked, follow_redirects=True) as answer:
            if answer.status_code not in (200, 206):
                raise ValueError(f"the server answers {answer.status_code}")
            part = answer.status_code == 206
            size = int(answer.headers["content-range"].rpartition("/")[2] if part else answer.headers["content-length"])
            data = b""
            for chunk in answer.iter_bytes():
                data += chunk
                if len(data) >= count:
                    break
    except (KeyError, ValueError) as error:
        raise ValueError(f"no answer that can be read ({error})") from None
    # Whatever a network may do: httpx's errors are no OSErrors.
    except Exception as error:
        raise ValueError(f"can't be reached ({' '.join(str(error).split())[:160]})") from None
    if ranged and len(data) < count:
        raise ValueError(f"the answer ends after {len(data)} bytes of {count}")
    return data[:count], size
