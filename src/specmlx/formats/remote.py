"""The headers of safetensors files on a server, by range requests where it answers them."""

import json
from typing import Any

from specmlx.formats.header import Entry, entries, header_length


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
