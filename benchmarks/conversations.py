"""Time to the first token of a chat's later turns, against a cold start in the same run; and keys in fewer bits.

`python benchmarks/conversations.py` talks six turns with the embedded pair behind a system prompt of 4,000 tokens (its
config's positions raised to 16,384: what it says there is no matter, only how long it takes) and prints what each turn
ran and how long its first token took, with a `PromptCache` and without.
`python benchmarks/conversations.py kv` answers held-out questions with keys and values in several formats and prints
how often the answers are right, τ, and how many of them are those of full precision.
"""

import statistics
import time

import click

from specmlx import PromptCache
from specmlx.cli.dialogue import Dialogue
from specmlx.demo.tasks import held_out_examples
from specmlx.generation.generate import stream_generate
from specmlx.loading.load import load, load_drafter

QUESTIONS = [f"Can you count from {n} up to {n + 11}?" for n in (62, 3, 41, 17, 80, 25)]
FORMATS = {
    "as computed (float32)": {},
    "8 bits, groups of 32": dict(kv_bits=8),
    "4 bits, groups of 32": dict(kv_bits=4),
    "int8, a scale per token and head": dict(kv_bits="int8"),
}


@click.group(invoke_without_command=True)
@click.pass_context
def main(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        turns()


def turns(history: int = 4000, chats: int = 3) -> None:
    """The table of six turns, medians over `chats`, of which only the first runs the system prompt."""
    model, tokenizer = load(model_config={"max_position_embeddings": 16_384})
    words = "You count for people who ask you to, and you say nothing but the numbers that they want. "
    system = words * (history // len(tokenizer.encode(words)) + 1)
    warm, cold, held = [[] for _ in QUESTIONS], [], []
    for _ in range(chats):
        talk = Dialogue(model, tokenizer, system, max_tokens=40)
        for each in held:
            talk.prompt_cache.put(*each)
        for turn, question in enumerate(QUESTIONS):
            begin = time.perf_counter()
            stream = talk.ask(question)
            next(stream)
            first = time.perf_counter() - begin
            *_, last = stream
            if turn or not held:
                warm[turn].append((first, last))
            held = held or talk.prompt_cache.snapshots()
        prompt = talk.tokens[: last.prompt_tokens]
        begin = time.perf_counter()
        next(stream_generate(model, tokenizer, prompt, 1, prompt_cache=PromptCache()))
        cold.append(time.perf_counter() - begin)
    click.echo("turn  prompt  cached     run   first token")
    seconds = [statistics.median(found[0] for found in turn) for turn in warm]
    for turn, found in enumerate(warm):
        last = found[0][1]
        counts = f"{last.prompt_tokens:6}  {last.cached_tokens:6}  {last.prompt_tokens - last.cached_tokens:6}"
        click.echo(f"{turn + 1:4}  {counts}   {seconds[turn] * 1e3:8.0f} ms")
    whole = statistics.median(cold)
    click.echo(f"turn 6, cold start              {whole * 1e3:8.0f} ms")
    click.echo(f"turn 6 ÷ turn 2: {seconds[5] / seconds[1]:.2f}; cold start ÷ turn 6: {whole / seconds[5]:.1f}")


@main.command()
@click.option("--per-kind", default=4, show_default=True, help="Held-out questions of each kind.")
def kv(per_kind: int) -> None:
    """Answers with keys and values in fewer bits from the first token on."""
    model, tokenizer = load(draft_model=None)
    drafter = load_drafter("demo/dspark", model)
    examples, plain = held_out_examples(per_kind), []
    for name, options in FORMATS.items():
        if options:
            options = options | dict(kv_group_size=32, quantized_kv_start=0)
        found, right, rounds = [], 0, 0
        for example in examples:
            messages = [{"role": "user", "content": example.question}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            given = list(
                stream_generate(model, tokenizer, prompt, 160, drafter, num_draft_tokens=drafter.max_width, **options)
            )
            found.append([response.token for response in given])
            right += "".join(response.text for response in given) == example.answer
            rounds += given[-1].stats.rounds
        plain = plain or found
        same = sum(a == b for a, b in zip(plain, found, strict=True))
        click.echo(
            f"{name}: {right / len(examples):.1%} of {len(examples)} right, τ {sum(map(len, found)) / rounds:.2f}, "
            f"{same} answers as in full precision"
        )


if __name__ == "__main__":
    main()
