"""Several answers at a time on one event loop. With a cloud each has a session of its own there.

python examples/async_answers.py MODEL [CLOUD]
"""

import asyncio
import sys

from aparte import Aparte
from aparte.errors import AparteError

QUESTIONS = ("Why is the sky blue?", "What is a prime?", "Name three colours.")


async def main(model: str, *clouds: str) -> None:
    with Aparte.connect(model, cloud=clouds) as aparte:
        answers = await asyncio.gather(*(aparte.agenerate(text, max_new_tokens=16) for text in QUESTIONS))
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(f"{question} {answer.text}")
        async for part in aparte.astream("Count to five.", max_new_tokens=16):
            print(part.text, end="", flush=True)
        print()


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    try:
        asyncio.run(main(*sys.argv[1:]))
    except AparteError as error:
        sys.exit(f"Error: {error}")
