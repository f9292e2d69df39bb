"""One program that decodes, as a server on its standard input and output: a JSON object a line, asked and answered.

`python benchmarks/worker.py NAME PAIR` runs in that program's own environment. The first line that it writes is
"ready"; then each {"prompt": ids, "max_tokens": n} gets {"tokens", "seconds", "ttft", "passes", "peak_memory"}: seconds
end to end, passes over the target that gave tokens, peak memory in GB.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx

Answer = Callable[[list[int], int], tuple[list[int], float, int]]
"""(prompt, max_tokens) -> the tokens, when the first one was there (perf_counter), the passes."""


def mlx_lm(pair: Path) -> Answer:
    from mlx_lm import load, stream_generate

    model, tokenizer = load(str(pair))

    def answer(prompt, max_tokens):
        return _stream(stream_generate(model, tokenizer, prompt, max_tokens), lambda tokens: len(tokens))

    return answer


def specmlx(pair: Path, drafter: str | None, width: int | str) -> Answer:
    from specmlx import load, load_drafter, stream_generate

    model, tokenizer = load(str(pair), draft_model=None)
    draft_model = load_drafter(str(pair / drafter), model) if drafter else None

    def answer(prompt, max_tokens):
        last = []

        def responses():
            for response in stream_generate(
                model, tokenizer, prompt, max_tokens, draft_model, num_draft_tokens=width if draft_model else 0
            ):
                last[:] = [response]
                yield response

        return _stream(responses(), lambda _: last[0].stats.rounds)

    return answer


def mlx_dspark(pair: Path, drafter: str) -> Answer:
    from mlx_dspark.generate import dflash_generate, speculative_generate
    from mlx_dspark.load import load_dflash, load_drafter, load_target

    target, tokenizer = load_target(str(pair), require_tap=True)
    if drafter == "dspark":
        model, _ = load_drafter(str(pair / drafter), quantize=False)
        generate, options = speculative_generate, {"max_draft_tokens": 8, "lookup_drafts": False}
    else:
        model, _ = load_dflash(str(pair / drafter), quantize=False)
        model.bind(target.model)
        generate, options = dflash_generate, {}

    def answer(prompt, max_tokens):
        first = []

        def on_text(text):
            if not first:
                first.append(time.perf_counter())

        result = generate(
            target, tokenizer, model, prompt_ids=prompt, max_new_tokens=max_tokens, on_text=on_text, **options
        )
        # It may give a few more than it was asked for.
        return list(result.token_ids), first[0] if first else time.perf_counter(), result.target_forwards

    return answer


def z_lab(pair: Path, drafter: str) -> Answer:
    from dflash import model_mlx

    # It asks the Hub even for a directory.
    model_mlx.snapshot_download = lambda path, **_: path
    model, tokenizer = model_mlx.load(str(pair))
    draft = model_mlx.load_draft(str(pair / drafter))

    def answer(prompt, max_tokens):
        tokens, first, passes = [], 0.0, 0
        for response in model_mlx.stream_generate(model, draft, tokenizer, prompt, max_tokens=max_tokens):
            tokens += response.tokens
            first = first or time.perf_counter()
            passes += 1
        return tokens, first, passes

    return answer


def mlx_vlm(pair: Path, drafter: str) -> Answer:
    from mlx_lm.utils import load_tokenizer
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.speculative.drafters import load_drafter
    from mlx_vlm.utils import load_model

    with tempfile.TemporaryDirectory() as copies:
        target = load_model(_for_mlx_vlm(pair, Path(copies) / "target"))
        model, kind = load_drafter(str(_for_mlx_vlm(pair / drafter, Path(copies) / "drafter")))
        # It reads lazily.
        mx.eval(target.parameters(), model.parameters())
    stops = load_tokenizer(pair).eos_token_ids

    def answer(prompt, max_tokens):
        tokens, first, before = [], 0.0, getattr(model, "speculative_total_rounds", 0)
        for token, _ in generate_step(
            mx.array([prompt]),
            target,
            None,
            None,
            max_tokens=max_tokens,
            temperature=0.0,
            draft_model=model,
            draft_kind=kind,
        ):
            tokens.append(int(token))
            first = first or time.perf_counter()
            if token in stops:
                break
        # The first token comes from a pass of its own.
        return tokens, first, getattr(model, "speculative_total_rounds", 0) - before + 1

    return answer


def _for_mlx_vlm(directory: Path, copy: Path) -> Path:
    """The same files, whose config says what it asks for: the text-only type, its rope's sections, DSpark's section."""
    config = json.loads((directory / "config.json").read_text())
    if "linear_num_value_heads" in config:
        pairs = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]) // 2
        config["model_type"] = "qwen3_5_text"
        config["rope_parameters"] |= {"type": "default", "mrope_section": [pairs - 2 * (pairs // 3), *[pairs // 3] * 2]}
    elif "markov_rank" in config:
        names = ("target_layer_ids", "mask_token_id", "num_target_layers", "markov_rank", "markov_head_type")
        config = {"tie_word_embeddings": True, "dflash_config": {name: config[name] for name in names}} | config
    copy.mkdir()
    for file in directory.iterdir():
        if file.name != "config.json":
            (copy / file.name).symlink_to(file.resolve())
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def programs(pair: Path) -> dict[str, Callable[[Path], Answer]]:
    """What there is to run on a pair, by name: as many of its drafters as the program reads."""
    found = {"mlx-lm": mlx_lm, "specmlx plain": partial(specmlx, drafter=None, width=0)}
    drafters = [name for name in ("dspark", "dflash", "dflash2") if (pair / name).is_dir()]
    for name in drafters:
        found[f"specmlx {name}"] = partial(specmlx, drafter=name, width="auto")
        found[f"specmlx {name} full"] = partial(specmlx, drafter=name, width="full")
    for peer, run in (("mlx-dspark", mlx_dspark), ("dflash", z_lab), ("mlx-vlm", mlx_vlm)):
        for name in drafters:
            # z-lab's reads its own two kinds.
            if not (run is z_lab and name == "dspark"):
                found[f"{peer} {name}"] = partial(run, drafter=name)
    return found


def _stream(responses, passes: Callable[[list[int]], int]):
    tokens, first = [], 0.0
    for response in responses:
        tokens.append(response.token)
        first = first or time.perf_counter()
    return tokens, first, passes(tokens)


def main() -> None:
    name, pair = sys.argv[1], Path(sys.argv[2])
    out, sys.stdout = sys.stdout, sys.stderr
    answer = programs(pair)[name](pair)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        mx.synchronize()
        mx.reset_peak_memory()
        begin = time.perf_counter()
        tokens, first, passes = answer(asked["prompt"], asked["max_tokens"])
        mx.synchronize()
        seconds = time.perf_counter() - begin
        found = {
            "tokens": tokens,
            "seconds": seconds,
            "ttft": first - begin,
            "passes": passes,
            "peak_memory": mx.get_peak_memory() / 1e9,
        }
        print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
