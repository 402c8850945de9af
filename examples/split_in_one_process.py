"""Front, middle and back of a model in one process, over the same frames as between two machines.

    python examples/split_in_one_process.py MODEL [PROMPT]

MODEL is smollm2-135m, a folder, a GGUF file or a hub id. With ``cloud="ws://host:port"`` for ``open_writer``
the middle is on another machine instead.
"""

import sys

from aparte.config import Compute, Cut, Sampling, Stopping
from aparte.device import open_writer
from aparte.errors import AparteError
from aparte.model.parts import Blueprint
from aparte.model.registry import resolve
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding


def main(model: str, prompt: str = "Why is the sky blue?") -> None:
    blueprint = Blueprint.open(resolve(model), Compute())
    writer = open_writer(blueprint, model, Cut(front=2, back=2))
    decoding = Decoding(decode="lookahead")
    answer, pieces = writer.write(
        writer.codec.encode_chat([{"role": "user", "content": prompt}]),
        make_drafter(decoding),
        sampling=Sampling(),  # greedy
        decoding=decoding,
        stopping=Stopping(max_new_tokens=32),
    )
    for piece in pieces:  # one per round trip
        print(piece.text, end="", flush=True)
    print()

    up, down = answer.bytes_per_token
    print(f"{len(answer.token_ids)} tokens in {answer.round_trips} round trips: MAT {answer.mat:.2f}")
    print(f"bytes per token: {up:.0f} up, {down:.0f} down")
    writer.target.close()


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except AparteError as error:
        sys.exit(f"Error: {error}")
