"""How the processes of one answer learn that one of them is gone, which a collective may wait for without end.

A star of TCP connections: the first rank has one to each other rank. On each, a line a second says that the other side
is there, and `end CODE TEXT` that it ends by itself and why. What is heard is judged in a thread of its own, since the
main thread may be waiting in mlx, which nothing can interrupt but the end of the process.
"""

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from typing import Any, NamedTuple

LIMIT = 10.0
"""Seconds of silence after which a rank is held to be gone."""
# Seconds in which ranks connect at the start; in which the reason of an end is told by those that know it best; and
# that an end waits for it.
_START, _GRACE, _WAIT = 10.0, 0.3, 3.0


class Ended(NamedTuple):
    """How a rank's part of a connection ended: its exit code and reason; code None: it is gone without a word."""

    code: int | None
    text: str


class Lifeline:
    """Connections by rank, watched in a thread that ends this process, with one line, when another has ended badly."""

    def __init__(self, rank: int, connections: dict[int, socket.socket], limit: float = LIMIT):
        self.rank = rank
        self.limit = limit
        self._connections = connections
        self._buffers = dict.fromkeys(connections, b"")
        self._heard = dict.fromkeys(connections, time.monotonic())
        self._ended: dict[int, Ended] = {}
        self._ending = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="specmlx-lifeline")
        self._thread.start()

    def end(self, code: int, text: str = "", elsewhere: bool = False) -> None:
        """Tell the others that this rank ends. With an error, first wait a little for whoever knows a better reason.

        elsewhere: the reason is another rank's.
        """
        self._ending = not elsewhere
        if code and self.rank == 0:
            # A rank that is gone is the reason of errors here; the thread ends the process then.
            self._stopped.wait(_WAIT if elsewhere else _GRACE * 2)
        self._send(f"end {code} {' '.join(text.split())}\n")
        if code and self.rank:
            # The first rank ends too, and says why; where it is gone, the thread says so.
            deadline = time.monotonic() + _WAIT
            while time.monotonic() < deadline and (0 not in self._ended or self._ended[0].code is None):
                self._stopped.wait(0.05)
        self._stopped.set()
        self._thread.join()
        for connection in self._connections.values():
            connection.close()

    def _watch(self) -> None:
        beat = time.monotonic()
        bad_since = None
        while not self._stopped.is_set():
            now = time.monotonic()
            if now >= beat:
                self._send("\n")
                beat = now + self.limit / 10
            self._listen(min(0.1, self.limit / 20))
            bad = {rank: ended for rank, ended in self._ended.items() if ended.code != 0}
            if bad and bad_since is None:
                bad_since = now
            if bad and time.monotonic() > bad_since + _GRACE:
                self._judge(bad)

    def _listen(self, seconds: float) -> None:
        waiting = {c: rank for rank, c in self._connections.items() if rank not in self._ended}
        if not waiting:
            self._stopped.wait(seconds)
            return
        for connection in select.select(list(waiting), [], [], seconds)[0]:
            self._hear(waiting[connection], connection)
        now = time.monotonic()
        for rank in waiting.values():
            if rank not in self._ended and now - self._heard[rank] > self.limit:
                self._ended[rank] = Ended(None, f"rank {rank} has not been heard of for {self.limit:g} seconds")

    def _hear(self, rank: int, connection: socket.socket) -> None:
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        self._heard[rank] = time.monotonic()
        *lines, self._buffers[rank] = (self._buffers[rank] + data).split(b"\n")
        for line in lines:
            if line.startswith(b"end "):
                _, code, text = line.decode(errors="replace").split(" ", 2)
                self._ended[rank] = Ended(int(code), text)
        if not data and rank not in self._ended:
            self._ended[rank] = Ended(None, f"rank {rank} is gone")

    def _judge(self, bad: dict[int, Ended]) -> None:
        """End the process for what ended the others, unless it is about to end with a reason of its own."""
        gone = next((ended for ended in bad.values() if ended.code is None), None)
        if gone is None and self._ending:
            return
        told = [each for each in bad.items() if each[1].text]
        rank, ended = next(iter(told or bad.items()))
        code = 1 if gone else ended.code
        if gone is not None:
            line = f"Error: {gone.text}: the other processes end too\n"
        else:
            by = "" if ended.text.startswith("rank ") else f"rank {rank}: "
            line = f"Error: {by}{ended.text}\n" if ended.text else ""
        # What the first rank has told the others, it has told the user.
        if self.rank == 0 or gone is not None:
            _say(line)
        self._send(f"end {code} \n")
        os._exit(code)

    def _send(self, line: str) -> None:
        for connection in self._connections.values():
            # Whether anybody is there is seen by listening.
            with contextlib.suppress(OSError):
                connection.sendall(line.encode())


def connect(group: Any) -> Lifeline | None:
    """A lifeline between all ranks of a group of mlx's; None, in all of them, where they can't reach the first one."""
    import mlx.core as mx

    from specmlx.speculation.shared import from_first

    rank, size, host = group.rank(), group.size(), first_address()
    listener = _listener(host, size) if rank == 0 and host else None
    told = [listener.getsockname()[1] if listener else 0, int.from_bytes(os.urandom(3), "little")]
    port, token = from_first(group, mx.array(told, dtype=mx.int32)).tolist()
    connections: dict[int, socket.socket] = {}
    if port and host:
        with contextlib.suppress(OSError, ValueError):
            connections = _accepted(listener, size, token) if listener else _reached(host, port, rank, token)
    if listener:
        listener.close()
    here = mx.array(len(connections) == (size - 1 if rank == 0 else 1), dtype=mx.int32)
    if mx.distributed.all_sum(here, group=group).item() < size:
        for connection in connections.values():
            connection.close()
        return None
    return Lifeline(rank, connections)


def first_address() -> str | None:
    """Where the first rank is, as mlx.launch told the ring and the JACCL backends; None for other backends."""
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        return coordinator.rpartition(":")[0]
    try:
        with open(os.environ["MLX_HOSTFILE"], encoding="utf-8") as file:
            return json.load(file)[0][0].rpartition(":")[0]
    except (KeyError, OSError, ValueError, IndexError, TypeError, AttributeError):
        return None


def _listener(host: str, size: int) -> socket.socket | None:
    try:
        listener = socket.create_server((host, 0), backlog=size)
    except OSError:
        return None
    listener.settimeout(_START)
    return listener


def _accepted(listener: socket.socket, size: int, token: int) -> dict[int, socket.socket]:
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _START
    while len(found) < size - 1 and time.monotonic() < deadline:
        connection, _ = listener.accept()
        connection.settimeout(_START)
        said = connection.recv(8)
        if len(said) == 8 and int.from_bytes(said[4:], "little") == token:
            found[int.from_bytes(said[:4], "little")] = connection
        else:
            connection.close()
    return found


def _reached(host: str, port: int, rank: int, token: int) -> dict[int, socket.socket]:
    connection = socket.create_connection((host, port), timeout=_START)
    connection.sendall(rank.to_bytes(4, "little") + token.to_bytes(4, "little"))
    return {0: connection}


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.__stdout__.flush()
    with contextlib.suppress(OSError):
        os.write(2, line.encode())
