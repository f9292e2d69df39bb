"""Prompt caches on disk: what comes back, what is refused, and what a killed writer or a full disk leaves."""

import errno
import os
import random
import resource
import signal
import stat
import time

import mlx.core as mx
import pytest
from click.testing import CliRunner
from rig import SMALL, same_bits, small_tokenizer, tiny, tokens

from specmlx import PromptCache
from specmlx.cli import main
from specmlx.formats.atomic import write_atomically
from specmlx.formats.checkpoint import safetensors
from specmlx.formats.sealed import load_sealed, save_sealed
from specmlx.generation.generate import stream_generate
from specmlx.generation.prompt_cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from specmlx.loading.load import load, load_drafter


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model():
    return tiny(3, **SMALL)


def ids(seed: int, n: int) -> list[int]:
    return tokens(seed, n, 282)[0].tolist()


@pytest.mark.linux_bits
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_prompts_come_back_from_a_file_bit_for_bit(tokenizer, tmp_path, dtype):
    model, file = tiny(3, dtype, **SMALL), tmp_path / "prompts.safetensors"
    prompts = [ids(1, 200), ids(1, 130) + ids(2, 70), [*ids(1, 200), *ids(3, 90)]]
    cache = PromptCache()
    for prompt in prompts:
        given = [r.token for r in stream_generate(model, tokenizer, prompt, 5, prompt_cache=cache)]
    cache.save(file, {"a": "b"})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    other = PromptCache()
    assert other.load(file, model.fingerprint) == {"a": "b"}
    assert other.nbytes == cache.nbytes
    for (space, a, kind), (space_, b, kind_) in zip(cache.snapshots(), other.snapshots(), strict=True):
        assert (space, kind, a.key) == (space_, kind_, b.key)
        assert same_bits(
            [x for r in a.recurrent.values() for x in r[:2]], [x for r in b.recurrent.values() for x in r[:2]]
        )
        assert same_bits([x for kv in a.piece.kvs.values() for x in kv], [x for kv in b.piece.kvs.values() for x in kv])
    warm = list(stream_generate(model, tokenizer, prompts[-1], 5, prompt_cache=other))
    assert [r.token for r in warm] == given and warm[-1].cached_tokens == 289
    small = PromptCache(max_bytes=cache.nbytes // 2)
    small.load(file)
    assert 0 < small.nbytes <= small.max_bytes


def test_a_drafters_context_comes_back_too(tmp_path):
    model, tokenizer = load(draft_model="demo/dspark")
    prompt = tokenizer.encode("<|im_start|>user\n" + "Can you count from 62 up to 73? " * 16 + "<|im_end|>\n")
    cache, other = PromptCache(), PromptCache()
    list(stream_generate(model, tokenizer, prompt, 2, prompt_cache=cache))
    cache.save(tmp_path / "a")
    other.load(tmp_path / "a")
    model, tokenizer = load(draft_model=None)
    drafter = load_drafter("demo/dspark", model)
    ends = [
        list(stream_generate(model, tokenizer, prompt, 30, drafter, prompt_cache=c, num_draft_tokens=8))[-1]
        for c in (cache, other)
    ]
    assert ends[1].cached_tokens > 64 and ends[0].stats.accept_histogram == ends[1].stats.accept_histogram
    short = PromptCache()
    list(stream_generate(model, tokenizer, [5], 2, drafter, prompt_cache=short))
    short.save(tmp_path / "a")
    other.load(tmp_path / "a")


def test_a_file_that_is_not_as_written_is_refused_in_one_line(model, tokenizer, tmp_path):
    cache, file = PromptCache(), tmp_path / "prompts.safetensors"
    list(stream_generate(model, tokenizer, ids(1, 70), 2, prompt_cache=cache))
    cache.save(file)
    whole = file.read_bytes()
    conversation = make_prompt_cache(model)
    list(stream_generate(model, tokenizer, ids(1, 70), 2, prompt_cache=conversation))
    saved = tmp_path / "conversation.safetensors"
    save_prompt_cache(saved, conversation)
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    talk = saved.read_bytes()
    bad = tmp_path / "bad"
    before = cache.snapshots()
    cases = [(whole[:n], "bad") for n in (0, 5, 100, len(whole) // 2, len(whole) - 1)]
    cases += [(whole[: len(whole) // 3] + b"\x55\xaa" + whole[len(whole) // 3 + 2 :], "checksum")]
    cases += [(whole.replace(b'\\"class\\": 1', b'\\"class\\": 0'), "checksum")]
    cases += [(whole.replace(b"specmlx-prompts-3", b"specmlx-prompts-0"), "specmlx-prompts-0")]
    cases += [(b"no tensors in here", "bad"), (talk, "no specmlx-prompts")]
    for data, word in cases:
        bad.write_bytes(data)
        with pytest.raises(ValueError, match=word) as raised:
            cache.load(bad)
        assert "\n" not in str(raised.value) and str(bad) in str(raised.value)
        assert cache.snapshots() == before
    # Of the last version: its states are not those of a cold run any more.
    bad.write_bytes(whole.replace(b"specmlx-prompts-3", b"specmlx-prompts-1"))
    with pytest.warns(UserWarning, match=f"{bad} is of an older specmlx: its prompts are run again") as warned:
        assert cache.load(bad) == {}
    assert len(warned) == 1 and cache.snapshots() == before
    for data, word in (
        (talk[:-1], "damaged"),
        (talk[:-9] + b"\x55" * 9, "checksum"),
        (talk.replace(b"conversation-2", b"conversation-1"), "specmlx-conversation-1"),
        (whole, "no specmlx-conversation"),
    ):
        bad.write_bytes(data)
        with pytest.raises(ValueError, match=word) as raised:
            load_prompt_cache(bad)
        assert "\n" not in str(raised.value) and str(bad) in str(raised.value)


def test_prompts_of_another_model_are_refused(model, tokenizer, tmp_path):
    other, file = tiny(4, **SMALL), tmp_path / "saved"
    conversation = make_prompt_cache(model)
    list(stream_generate(model, tokenizer, ids(1, 9), 2, prompt_cache=conversation))
    save_prompt_cache(file, conversation)
    for held in (conversation, load_prompt_cache(file)):
        with pytest.raises(ValueError, match="another model"):
            next(stream_generate(other, tokenizer, [5], 2, prompt_cache=held))
        assert next(stream_generate(model, tokenizer, [5], 2, prompt_cache=held))
    cache = PromptCache()
    list(stream_generate(model, tokenizer, ids(1, 90), 2, prompt_cache=cache))
    cache.save(file)
    with pytest.raises(ValueError, match="another model"):
        PromptCache().load(file, other.fingerprint)
    assert list(stream_generate(other, tokenizer, ids(1, 90), 2, prompt_cache=cache))[-1].cached_tokens == 0
    tuned = tiny(3, **SMALL)
    tuned.model.layers[2].mlp.up_proj.weight += 1e-3
    assert (
        len({model.fingerprint, other.fingerprint, tuned.fingerprint, tiny(3, mx.bfloat16, **SMALL).fingerprint}) == 4
    )
    assert model.fingerprint == tiny(3, **SMALL).fingerprint


class Killing:
    """The calls of `os` that a writer makes; before the n-th of those that change something, or within it, it ends."""

    def __init__(self, n: int, within: bool = False, end=lambda: os.kill(os.getpid(), signal.SIGKILL)):
        self.n, self.within, self.end = n, within, end

    def _counted(self, call, *args):
        self.n -= 1
        if self.n == 0:
            if self.within and call is os.write:
                os.write(args[0], args[1][: len(args[1]) // 2])
            self.end()
        return call(*args)

    def write(self, file, data):
        return self._counted(os.write, file, data)

    def fsync(self, file):
        return self._counted(os.fsync, file)

    def replace(self, source, target):
        return self._counted(os.replace, source, target)

    def open(self, *args):
        return self._counted(os.open, *args)

    def close(self, file):
        os.close(file)


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Two sealed files' bytes, part by part, in memory: a forked writer needs no mlx."""
    folder, found = tmp_path_factory.mktemp("versions"), []
    for n in (1, 2):
        arrays = {f"x{i}": mx.random.normal((4, 1 << 14), key=mx.random.key(n * 10 + i)) for i in range(4)}
        save_sealed(folder / "a", arrays, {"version": str(n)}, "test-1")
        arrays, metadata = load_sealed(folder / "a", "test-1")
        raw = (folder / "a").read_bytes()
        parts = [len(part) for part in safetensors(arrays, metadata)]
        parts[1] = len(raw) - parts[0] - sum(parts[2:])
        bounds = [sum(parts[:i]) for i in range(len(parts) + 1)]
        found.append([raw[a:b] for a, b in zip(bounds, bounds[1:], strict=False)])
    return found


def in_a_fork(work, kill_after: float | None = None) -> int:
    """Runs `work` in a process of its own; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def version(path) -> str:
    return load_sealed(path, "test-1")[1]["version"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks writers")
@pytest.mark.parametrize("within", [False, True])
def test_a_writer_killed_at_any_call_leaves_the_old_file_or_the_new_one(versions, within, tmp_path):
    file, seen = tmp_path / "prompts", []
    for n in range(1, 99):
        write_atomically(file, versions[0], private=True)
        status = in_a_fork(lambda: write_atomically(file, versions[1], True, Killing(n, within)))  # noqa: B023
        seen.append(version(file))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    # open, 6 writes, fsync, rename; then the directory's open and fsync: the new file is there.
    assert seen == ["1"] * 9 + ["2"] * 3
    write_atomically(file, versions[0])
    assert [path.name for path in tmp_path.iterdir()] == ["prompts"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks writers")
def test_a_writer_killed_at_a_random_moment_leaves_a_whole_file(versions, tmp_path):
    file, rng = tmp_path / "prompts", random.Random(0)
    write_atomically(file, versions[0])
    begin = time.perf_counter()
    assert in_a_fork(lambda: write_atomically(file, versions[1])) == 0
    whole = time.perf_counter() - begin
    for _ in range(50):
        old, new = rng.sample(versions, 2)
        write_atomically(file, old)
        in_a_fork(lambda: write_atomically(file, new), kill_after=rng.random() * 1.2 * whole)  # noqa: B023
        assert version(file) in "12"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(versions, error, tmp_path):
    def fail():
        raise OSError(error, os.strerror(error))

    file = tmp_path / "prompts"
    write_atomically(file, versions[0])
    for n in range(1, 10):
        with pytest.raises(OSError, match=os.strerror(error)):
            write_atomically(file, versions[1], system=Killing(n, True, fail))
        assert version(file) == "1" and [path.name for path in tmp_path.iterdir()] == ["prompts"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a writer")
def test_a_limit_of_the_system_on_files_is_no_half_file(versions, tmp_path):
    file = tmp_path / "prompts"
    write_atomically(file, versions[0])

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        write_atomically(file, versions[1])

    assert os.WEXITSTATUS(in_a_fork(work)) == 1
    assert version(file) == "1" and [path.name for path in tmp_path.iterdir()] == ["prompts"]


def run(*args, stdin=None):
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)


def test_a_chat_goes_on_from_its_file_and_the_file_can_be_listed_and_cleared(model, tokenizer, tmp_path):
    file = tmp_path / "chat.safetensors"
    chat = ("chat", "-m", 20, "--prompt-cache-file", file)
    system = "You count, and you say nothing else. " * 8
    first = run(*chat, "--system-prompt", system, stdin="Can you count from 62 up to 73?\n")
    second = run(*chat, "--system-prompt", system, stdin="Can you count from 62 up to 73?\n")
    assert first.exit_code == second.exit_code == 0 and first.stdout == second.stdout
    assert "of them cached" not in first.stderr and "of them cached" in second.stderr
    (tmp_path / "other.txt").write_text("mine")
    listed = run("cache", "list", tmp_path)
    assert listed.exit_code == 0 and listed.stdout.startswith(f"{file}: ") and " of demo, " in listed.stdout
    assert " tokens, 1 drafter, " in listed.stdout
    single = run("generate", "--prompt-cache-file", file, "--system-prompt", system, "-m", 20, "-p", "Can you count?")
    assert single.exit_code == 0 and "of them cached" in single.stderr
    for args in (
        ("cache", "list", tmp_path / "other.txt"),
        ("cache", "clear", tmp_path / "other.txt"),
        ("cache", "list"),
    ):
        refused = run(*args)
        assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
    assert run("cache", "clear", tmp_path).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]
    (tmp_path / "bad").write_bytes(b"\x07" * 40)
    refused = run("chat", "--prompt-cache-file", tmp_path / "bad", stdin="Hello\n")
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
    assert (tmp_path / "bad").read_bytes() == b"\x07" * 40


def test_the_demo_is_known_by_the_name_that_earlier_conversations_have():
    assert load("demo", draft_model=None)[0].fingerprint == "b0f39c1101d901063f7f0dc4f9b89db1"


def test_conversations_are_kept_under_the_names_of_the_version_before(model, tokenizer, tmp_path):
    conversation = make_prompt_cache(model)
    list(stream_generate(model, tokenizer, ids(1, 9), 2, prompt_cache=conversation))
    save_prompt_cache(tmp_path / "a", conversation)
    arrays, header = mx.load(str(tmp_path / "a"), format="safetensors", return_metadata=True)
    linear = [i for i, layer in enumerate(model.layers) if layer.is_linear]
    names = {
        f"{i}.{part}" for i in range(len(model.layers)) for part in (("S", "conv") if i in linear else ("kv.0", "kv.1"))
    }
    assert arrays.keys() == names and header["format"] == "specmlx-conversation-2"
