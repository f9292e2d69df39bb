"""A headless Chrome or Chromium over its debugging pipe, by the standard library alone."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = ("google-chrome", "google-chrome-stable", "chromium", "chromium-browser", "chrome", "microsoft-edge")
_MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
_PLAYWRIGHT = (
    "chromium*/chrome-*/*hrome",
    "chromium*/chrome-*/headless_shell",
    "chromium*/chrome-*/chrome-headless-shell",
)
_PATIENCE = 60
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--mute-audio")


def find_browser() -> str | None:
    """The path of $CHROME, of a browser of the system's, or of one that playwright installed."""
    named = [os.environ.get("CHROME"), *map(shutil.which, _NAMES), _MAC]
    caches = (Path.home() / ".cache" / "ms-playwright", Path.home() / "Library" / "Caches" / "ms-playwright")
    named += [str(path) for cache in caches for pattern in _PLAYWRIGHT for path in sorted(cache.glob(pattern))]
    return next((path for path in named if path and os.access(path, os.X_OK) and not os.path.isdir(path)), None)


class Page:
    """One tab. `errors` are what scripts threw and what the page's policy refused."""

    def __init__(self, read: int, write: int):
        self._answers, self._commands = read, write
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the DevTools protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, file: Path) -> None:
        self.send("Page.navigate", url=file.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], _PATIENCE)[0]:
                raise RuntimeError(f"the browser has said nothing for {_PATIENCE} s")
            if not (more := os.read(self._answers, 65536)):
                raise RuntimeError("the browser ended")
            self._buffer += more
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(raw)
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["text"])
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        return message


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile, and its one tab; it ends with the block."""
    # Chrome talks over its descriptors 3 and 4: ours must be out of the way of these in the child.
    commands, answers = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (commands[0], answers[1])]

    def arrange() -> None:
        os.dup2(theirs[0], 3)
        os.dup2(theirs[1], 4)

    process = subprocess.Popen(
        [find_browser(), *_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=arrange,
        pass_fds=(3, 4),
    )
    for fd in (commands[0], answers[1], *theirs):
        os.close(fd)
    try:
        yield Page(answers[0], commands[1])
    finally:
        os.close(answers[0])
        os.close(commands[1])
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
