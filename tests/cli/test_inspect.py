"""What inspection says of checkpoints, here and on a server, without reading a weight."""

import http.server
import json
import threading
from pathlib import Path

import httpx2
import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from mlx_lm.utils import save_config, save_model
from publishers import as_published, modelopt, write_safetensors
from rig import EXPERTS, TINY, mlx_lm_twin, tiny

from specmlx.cli import main
from specmlx.loading.hub import remote_header, remote_repo
from specmlx.loading.inspect import inspect_path
from specmlx.loading.load import resolve

SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2}
GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    config = TINY | SMALL | EXPERTS
    save_model(path, mlx_lm_twin(tiny(0, mx.float16, **config), **config))
    save_config(dict(config), path / "config.json")
    return path


def test_bytes_by_group_are_the_files_own_and_a_pass_reads_the_experts_that_a_token_is_sent_to(experts):
    found = inspect_path(experts)
    weights = mx.load(str(experts / "model.safetensors"))
    assert (found.what, found.kind) == ("target", "qwen3_5_moe") and "F16" in found.packaging
    assert found.bytes == sum(w.nbytes for w in weights.values()) and found.tensors == len(weights)
    assert sum(group.bytes for group in found.groups.values()) == found.bytes
    experts_bytes = sum(w.nbytes for name, w in weights.items() if "switch_mlp" in name)
    assert found.groups["experts"].bytes == experts_bytes
    embedding = weights["language_model.model.embed_tokens.weight"].nbytes
    assert found.bytes_per_pass == found.bytes - embedding - experts_bytes + round(experts_bytes * 3 / 8)
    assert found.geometry["num_experts"] == 8 and not found.questions


def test_a_modelopt_checkpoint_is_told_with_its_mtp_head_left_out_of_a_pass(tmp_path):
    config = TINY | SMALL
    tensors, _ = modelopt(as_published(tiny(0, **config)), np.random.default_rng(0))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    found = inspect_path(tmp_path)
    assert found.packaging == "modelopt, MIXED_PRECISION" and found.geometry["mtp"]
    left = found.groups["MTP head"].bytes + found.groups["embedding"].bytes
    assert found.bytes_per_pass == found.bytes - left


@pytest.mark.parametrize(
    ("name", "what", "kind"),
    [("demo", "target", "qwen3_5"), ("demo/dflash", "drafter", "dflash"), ("demo/dspark", "drafter", "dspark")],
)
def test_the_demos_parts_are_what_they_are(name, what, kind):
    found = inspect_path(resolve(name))
    assert (found.what, found.kind, found.questions) == (what, kind, [])


def test_a_gguf_file_is_told_by_its_header():
    found = inspect_path(GOLDENS / "gguf" / "model.gguf")
    assert found.kind == "qwen35" and "Q5_1" in found.packaging and found.geometry["hidden_size"] == 64
    assert found.bytes == sum(group.bytes for group in found.groups.values()) and "head" in found.groups
    experts = inspect_path(GOLDENS / "gguf" / "experts.gguf")
    left = experts.groups["embedding"].bytes + experts.groups["experts"].bytes // 2
    assert experts.bytes_per_pass == experts.bytes - left


def test_questions_that_a_file_leaves_open_are_printed(tmp_path):
    config = json.loads((resolve("demo/dflash") / "config.json").read_text())
    del config["dflash_config"]["mask_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((resolve("demo/dflash") / "model.safetensors").read_bytes())
    result = CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert result.exit_code == 0 and "open: config.json lacks mask_token_id" in result.output
    result = CliRunner().invoke(main, ["inspect", str(tmp_path), "--json"])
    assert json.loads(result.stdout)["questions"]


class Server(http.server.BaseHTTPRequestHandler):
    """A Hub of one repository, whose files it gives in parts or, if it is told so, always whole."""

    folder: Path
    ranges = True
    sent = 0

    def do_GET(self):
        if self.path == "/api/models/owner/name/revision/main":
            body = json.dumps({"siblings": [{"rfilename": file.name} for file in self.folder.iterdir()]}).encode()
        elif self.path.startswith("/owner/name/resolve/main/"):
            file = self.folder / self.path.rpartition("/")[2]
            body = file.read_bytes() if file.is_file() else None
        else:
            body = None
        if body is None:
            self.send_error(404)
            return
        asked, whole = self.headers.get("Range"), len(body)
        if asked and self.ranges:
            start, end = asked.removeprefix("bytes=").split("-")
            body = body[int(start) : int(end) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end}/{whole}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            for i in range(0, len(body), 1 << 14):
                self.wfile.write(body[i : i + (1 << 14)])
                type(self).sent += len(body[i : i + (1 << 14)])
        except OSError:
            # The client has hung up, as it should.
            self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture(params=["ranges", "whole files only"])
def server(request, tmp_path):
    config = TINY | SMALL | {"vocab_size": 20_000}
    save_model(tmp_path, mlx_lm_twin(tiny(0, mx.float32, **config), **config))
    save_config(dict(config), tmp_path / "config.json")
    handler = type("Handler", (Server,), {"folder": tmp_path, "ranges": request.param == "ranges", "sent": 0})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", handler, tmp_path
        running.shutdown()


def test_a_remote_file_is_inspected_without_its_weights(server):
    endpoint, handler, folder = server
    # A file that the index doesn't name.
    mx.save_safetensors(str(folder / "model-left-over.safetensors"), {"language_model.model.norm.weight": mx.zeros(2)})
    with httpx2.Client() as client:
        config, tensors, files = remote_repo("owner/name", client=client, endpoint=endpoint)
    size = (folder / "model.safetensors").stat().st_size
    assert size > 9_000_000
    # A server that sends whole files may have filled the sockets' buffers before it learns of the hang-up.
    assert handler.sent < (100_000 if handler.ranges else size)
    local = inspect_path(folder)
    assert sum(entry.nbytes for entry in tensors.values()) == local.bytes and files == local.files == 1
    assert config["hidden_size"] == 64


@pytest.mark.parametrize("body", [b"", b"short", b"\x00" * 64, (20).to_bytes(8, "little") + b"{" * 20, b"\xff" * 99])
def test_what_a_server_sends_that_is_no_model_is_refused_in_one_line(server, body):
    endpoint, _, folder = server
    (folder / "model.safetensors").write_bytes(body)
    url = f"{endpoint}/owner/name/resolve/main/model.safetensors"
    with httpx2.Client() as client:
        for address in (url, f"{url}.not", "http://127.0.0.1:9/x"):
            with pytest.raises(ValueError) as error:
                remote_header(client, address)
            assert "\n" not in str(error.value) and address in str(error.value)
