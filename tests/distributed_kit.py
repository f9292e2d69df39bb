"""A hybrid whose heads and columns divide by 2 and by 3 with its drafters, and programs in rings of processes."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
from demo_kit import DFLASH, DSPARK, write
from mlx_lm.models import llama
from rig import EXPERTS, TINY, small_tokenizer, tiny

from specmlx.drafters.checkpoint import build
from specmlx.drafters.config import DrafterConfig

# Quantized in groups of 32, too.
DIVISIBLE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "linear_num_value_heads": 12,
    "linear_num_key_heads": 6,
    "vocab_size": 282,
}
DIVISIBLE_EXPERTS = DIVISIBLE | EXPERTS | {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 192}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "rms_norm_eps": 1e-5,
    "vocab_size": 282,
    "eos_token_id": 2,
}
TAPS = {"mask_token_id": 3, "target_layer_ids": [0]}


def write_pair(directory: Path) -> Path:
    """A model directory in float32, with drafters in dflash/ and dspark/."""
    target = tiny(**DIVISIBLE)
    small_tokenizer(directory)
    write(directory, TINY | DIVISIBLE | {"eos_token_id": 2}, target)
    sizes = {name: DIVISIBLE[name] for name in ("hidden_size", "vocab_size")}
    sizes |= {"num_target_layers": DIVISIBLE["num_hidden_layers"], "block_size": 8}
    for name, config in (("dflash", DFLASH), ("dspark", DSPARK)):
        config = config | sizes
        config["dflash_config"] = config["dflash_config"] | TAPS
        mx.random.seed(7)
        write(directory / name, config, build(DrafterConfig.from_dict(config), target).model)
    return directory


def write_llama(directory: Path) -> Path:
    """A model directory of mlx-lm's llama, without a drafter."""
    mx.random.seed(5)
    small_tokenizer(directory)
    write(directory, LLAMA, llama.Model(llama.ModelArgs.from_dict(LLAMA)))
    return directory


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, below those that the system gives away by itself."""
    while True:
        first = random.randrange(20000, 32000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def start_ring(directory: Path, size: int, *command: str, **options) -> list[subprocess.Popen]:
    """The processes of a ring on this machine, as mlx.launch starts them, each with its own output."""
    port = free_ports(size)
    hosts = directory / f"hosts-{port}.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port + rank}"] for rank in range(size)]))
    here = Path(__file__).parent
    env = os.environ | {"MLX_HOSTFILE": str(hosts), "PYTHONPATH": f"{here.parent / 'src'}{os.pathsep}{here}"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    return [
        subprocess.Popen([sys.executable, *command], env=env | {"MLX_RANK": str(rank)}, **pipes, **options)
        for rank in range(size)
    ]


def finished(ring: list[subprocess.Popen], timeout: float) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each process; those that are still there at the end of the time are killed."""
    try:
        outputs = [process.communicate(timeout=timeout) for process in ring]
    finally:
        for process in ring:
            process.kill()
            process.wait()
    return [(process.returncode, *output) for process, output in zip(ring, outputs, strict=True)]


class FakeGroup:
    """A process's place among others that are not there."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size
