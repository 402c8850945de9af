"""An answer as it is written, round trip by round trip, with a seed and log-probabilities.

python examples/stream.py MODEL [CLOUD]
"""

import math
import sys

from aparte import Aparte
from aparte.errors import AparteError


def main(model: str, *clouds: str) -> None:
    with (
        Aparte.connect(model, cloud=clouds) as aparte,
        aparte.stream("Write a haiku.", max_new_tokens=24, temperature=0.8, seed=7, top_logprobs=0) as stream,
    ):
        for part in stream:  # one per round trip; leave the loop and the work ends, on the cloud as well
            step = part.piece.record
            least = min((math.exp(token.logprob) for token in part.logprobs), default=1.0)
            print(f"{len(part.tokens)} of {step.nodes} nodes, least p {least:.3f}: {part.text!r}")
    print(stream.answer.text)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except AparteError as error:
        sys.exit(f"Error: {error}")
