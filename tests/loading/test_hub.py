"""Downloads from a Hub: what is fetched, once, at which revision; nothing where the machine is offline."""

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "scripts" / "hub_downloads.py"
COMMITS = {"main": "1" * 40, "old": "2" * 40}
FILES = {
    "config.json": b'{"model_type": "qwen3_5"}',
    "model.safetensors": b"\x02\x00\x00\x00\x00\x00\x00\x00{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"---\nbase_model: a/b\n---\n",
    "modeling_evil.py": b"raise SystemExit('remote code ran')",
    "pytorch_model.bin": b"pickle",
    "model-Q4_K_M.gguf": b"GGUF",
    "consolidated.safetensors": b"twice",
    "original/model.safetensors": b"twice",
}
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"}


class Hub(http.server.BaseHTTPRequestHandler):
    """The parts of the Hub's API that a snapshot needs."""

    asked: list[tuple[str, str]]

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool):
        path = self.path.partition("?")[0]
        self.asked.append((self.command, path))
        parts = path.strip("/").split("/")
        if parts[:4] == ["api", "models", "owner", "name"]:
            revision = parts[5] if len(parts) > 5 else "main"
            sha = COMMITS.get(revision, revision)
            files = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            if parts[4:5] == ["tree"]:
                files = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in FILES.items()
                ]
                return self.send(json.dumps(files).encode(), {}, body)
            listing = {"id": "owner/name", "modelId": "owner/name", "sha": sha, "siblings": files}
            return self.send(json.dumps(listing).encode(), {}, body)
        if parts[:3] == ["owner", "name", "resolve"] and (data := FILES.get("/".join(parts[4:]))) is not None:
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMITS.get(parts[3], parts[3])}
            return self.send(data, headers, body)
        return self.send_error(404)

    def send(self, data: bytes, headers: dict[str, str], body: bool):
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    handler = type("Handler", (Hub,), {"asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        env = os.environ | {
            "HF_ENDPOINT": f"http://127.0.0.1:{running.server_port}",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN"):
            env.pop(name, None)
        yield env, handler.asked
        running.shutdown()


def run(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(PROGRAM), *arguments], env=env, capture_output=True, text=True)


def test_a_model_is_downloaded_once_without_code_and_without_other_copies_of_its_weights(hub):
    env, asked = hub
    done = run(env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Fetching 5 files" in done.stderr, "progress is shown"
    first, second = map(Path, done.stdout.split())
    assert first == second and first.name == COMMITS["main"]
    assert {file.relative_to(first).as_posix() for file in first.rglob("*") if file.is_file()} == WANTED
    files = [path.partition("/resolve/")[2] for command, path in asked if command == "GET"]
    fetched = [file.partition("/")[2] for file in files if file]
    assert sorted(fetched) == sorted(WANTED), "each wanted file once, and no other"

    pinned = run(env, "old")
    assert Path(pinned.stdout.split()[0]).name == COMMITS["old"], pinned.stderr[-2000:]
    assert run(env, "@old").stdout.split() == pinned.stdout.split()
    both = run(env, "@old", COMMITS["main"])
    assert both.returncode and "names the revision old, revision= another one" in both.stderr
    before = len(asked)
    offline = run(env | {"HF_HUB_OFFLINE": "1"})
    assert offline.stdout.split() == done.stdout.split() and len(asked) == before, "offline asks nobody"
    gone = run(env | {"HF_HUB_OFFLINE": "1"}, "3" * 40)
    assert gone.returncode and "neither a directory nor in the local Hub cache" in gone.stderr


def test_a_hub_that_can_not_be_reached_is_asked_once_and_what_is_in_the_cache_is_used(hub):
    env, _ = hub
    done = run(env)
    with socket.socket() as dead:
        # A port that nobody listens on.
        dead.bind(("127.0.0.1", 0))
        gone = env | {"HF_ENDPOINT": f"http://127.0.0.1:{dead.getsockname()[1]}"}
        again = run(gone)
        assert again.stdout.split() == done.stdout.split() and "Retrying" not in again.stderr, again.stderr[-2000:]
        never = run(gone, "3" * 40)
    assert "neither a directory nor in the local Hub cache, and the Hub can't be reached" in never.stderr
    assert never.returncode and "Retrying" not in never.stderr
