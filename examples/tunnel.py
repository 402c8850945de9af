"""A cloud behind SSH: what the tunnel takes, and an answer through it that survives a lost connection.

    python examples/tunnel.py MODEL ssh://user@host/7600

The keys, agent, configuration and known hosts are those of ``ssh``; ``ssh user@host`` has to work without a
password. Nothing listens on this machine.
"""

import sys

from aparte import Aparte
from aparte.errors import AparteError
from aparte.measure.doctor import examine
from aparte.measure.doctor_path import Door


def main(model: str, cloud: str) -> None:
    found = examine(Door(cloud))
    if found.failure is not None:
        raise found.failure
    times = found.to_json()
    print(f"SSH took {times['ssh_ms']:.0f} ms to set up; a round trip takes {times['ws_rtt_ms']:.1f} ms")
    with Aparte.connect(model, cloud=cloud, notice=print) as aparte:
        answer = aparte.generate("Why is the sky blue?", max_new_tokens=24)
    print(answer.text)
    print(f"{answer.round_trips} round trips, {answer.reconnects} reconnects")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except AparteError as error:
        sys.exit(f"Error: {error}")
