"""The transport that paper A began with, for comparison: a step is an HTTP request, tensors base64 in JSON.

A request per step and a number format that grows by a third: what a binary WebSocket saves is the difference.
Nothing in the product uses this. (The paper's first version also pickled its tensors, which this project
never does.)
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import json
from collections import deque
from typing import Any
from urllib.parse import urlsplit

from aparte.errors import FrameError, LinkError, SlotError
from aparte.step import Step
from aparte.wire.frames import Frame, ResultFrame, StepFrame, decode
from aparte.wire.link import printable

#: Where a session is opened, and where steps go.
OPEN, STEP = "/session", "/step"
_TIMEOUT_S = 60.0


class HttpLink:
    """A session of a cloud at ``url``, one request per step.

    With ``keep`` all requests share a connection; without, each one makes its own, as a client without
    sessions does, and pays for the handshake.
    """

    def __init__(self, url: str, token: str, wire: str, *, keep: bool = True) -> None:
        self._host, self._port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        self._token = token
        self._wire = wire
        self._keep = keep
        self._connection: http.client.HTTPConnection | None = None
        self._session = ""
        self._asked = 0  # requests whose answer is not read yet
        self._answers: deque[tuple[dict[str, Any], int]] = deque()
        #: Of all requests and answers since the beginning, without the HTTP headers.
        self.bytes_up = 0
        self.bytes_down = 0
        self.max_nodes = 1
        self.max_context = 1

    @property
    def where(self) -> str:
        return f"The cloud at http://{self._host}:{self._port}"

    def open(self) -> bool:
        if self._session:
            return True
        self._request(OPEN, {"wire": self._wire})
        welcome, _ = self._read()
        try:
            self._session = str(welcome["session"])
            self.max_nodes, self.max_context = int(welcome["nodes"]), int(welcome["context"])
        except (KeyError, TypeError, ValueError):
            raise FrameError(f"{self.where} gives no session.") from None
        return False

    def send(self, message: bytes) -> None:
        frame = decode(message)
        if not isinstance(frame, StepFrame):
            raise FrameError("Only steps are sent this way.")
        while self._asked:  # HTTP answers before it is asked again
            self._answers.append(self._read())
        self._request(STEP, {"session": self._session, **step_to_json(frame)})

    def receive(self) -> tuple[Frame, int]:
        answer, size = self._answers.popleft() if self._answers else self._read()
        try:
            payload = base64.b64decode(answer["hidden"], validate=True)
            return ResultFrame(int(answer["s"]), float(answer["ms"]), 0.0, payload), size
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise FrameError(f"{self.where} answered something else than a step.") from None

    def close(self) -> None:
        self._hang_up()
        self._session, self._asked = "", 0
        self._answers.clear()

    def _request(self, path: str, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.bytes_up += len(body)
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        if not self._keep:
            headers["Connection"] = "close"
        try:
            self._connection.request("POST", path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            raise LinkError(f"{self.where} cannot be reached ({type(error).__name__}).") from error
        self._asked += 1

    def _read(self) -> tuple[dict[str, Any], int]:
        if self._connection is None or not self._asked:
            raise LinkError(f"{self.where} has nothing to answer.")
        try:
            response = self._connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise LinkError(f"{self.where} went away ({type(error).__name__}).") from error
        self._asked -= 1
        if not self._keep:
            self._hang_up()
        self.bytes_down += len(body)
        try:
            answer = json.loads(body)
        except ValueError:
            answer = {}
        if response.status != 200 or not isinstance(answer, dict):
            said = printable(str(answer.get("error", ""))) if isinstance(answer, dict) else ""
            raise LinkError(f"{self.where} refused a request ({response.status}). {said}".strip())
        return answer, len(body)

    def _hang_up(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None


def step_to_json(frame: StepFrame) -> dict[str, Any]:
    """A step with its hidden states as base64."""
    step = frame.step
    return {
        "s": step.number,
        "e": step.epoch,
        "c": step.commit,
        "b": step.base,
        "p": list(step.parents),
        "hidden": base64.b64encode(frame.payload).decode("ascii"),
    }


def step_from_json(data: dict[str, Any]) -> StepFrame:
    """What :func:`step_to_json` wrote. Raises :class:`~aparte.errors.FrameError` for anything else."""
    try:
        number, epoch, commit, base = (data[key] for key in "secb")
        parents = data["p"]
        if not all(type(one) is int for one in (number, epoch, commit, base, *parents)):
            raise TypeError
        step = Step(number, epoch, commit, base, tuple(parents))
        return StepFrame(step, base64.b64decode(data["hidden"], validate=True))
    except (KeyError, TypeError, ValueError, SlotError):  # binascii.Error is a ValueError
        raise FrameError("A request is no step.") from None
