"""One answer, and what it took.

    python examples/generate.py MODEL [CLOUD]

MODEL is smollm2-135m, a folder, a GGUF file or a hub id. CLOUD is ws://host:port, wss://host:port or
ssh://user@host/port; without it the middle runs in this process.
"""

import sys

from aparte import Aparte
from aparte.errors import AparteError


def main(model: str, *clouds: str) -> None:
    with Aparte.connect(model, cloud=clouds) as aparte:
        answer = aparte.generate("Why is the sky blue?", max_new_tokens=24)
    print(answer.text)
    up, down = answer.bytes_per_token
    print(f"{len(answer.token_ids)} tokens in {answer.round_trips} round trips: MAT {answer.mat:.2f}")
    print(f"bytes per token: {up:.0f} up, {down:.0f} down; {answer.tok_s:.1f} tok/s; {answer.finish_reason}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except AparteError as error:
        sys.exit(f"Error: {error}")
