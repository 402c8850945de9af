"""A conversation: a follow-up sends only what is new, because the cloud keeps the beginning.

python examples/chat.py MODEL [CLOUD]
"""

import sys

from aparte import Aparte
from aparte.errors import AparteError


def main(model: str, *clouds: str) -> None:
    with Aparte.connect(model, cloud=clouds) as aparte:
        chat = aparte.chat(system="Be brief.", max_new_tokens=16)
        for line in ("What is a prime?", "And what is not?"):
            answer = chat.say(line)
            print(f"> {line}\n{answer.text}")
            print(f"({answer.prompt_tokens} tokens of prompt, {answer.reused_tokens} of them kept)")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except AparteError as error:
        sys.exit(f"Error: {error}")
