"""An async app around one engine: answers stream to their askers, and one of them changes its mind."""

import asyncio

from specmlx import Engine, load


async def ask(engine: Engine, tokenizer, question: str, most: int = -1) -> str:
    """The answer, or its first `most` pieces: leaving the loop early cancels the rest."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    text = ""
    async for response in engine.submit(prompt, max_tokens=128):
        text += response.text
        most -= 1
        if most == 0:
            break
    return text


async def main() -> None:
    model, tokenizer = load()
    questions = ["Write the capital letters from G to W.", "Can you count from 62 up to 73?"]
    with Engine(model, tokenizer, max_lanes=4) as engine:
        answers = await asyncio.gather(
            *(ask(engine, tokenizer, question) for question in questions), ask(engine, tokenizer, questions[1], most=4)
        )
    for question, answer in zip([*questions, f"{questions[1]} (stopped early)"], answers, strict=True):
        print(f"> {question}\n{answer}")


if __name__ == "__main__":
    asyncio.run(main())
