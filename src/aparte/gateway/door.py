"""Who may come in: the key, and without one only programs of this machine; and how much they may send."""

from __future__ import annotations

import hmac
import json
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aparte.address import is_loopback
from aparte.gateway.problems import ApiError

#: Largest body of a request, in bytes.
MOST_BYTES = 16_000_000
#: What anybody may see: that it is alive, and the page, which holds nothing.
OPEN_PATHS = ("/", "/health", "/static/")


class Door:
    """An ASGI application in front of another one.

    Without a key a web page in this machine's browser must not reach the gateway. It could by posting from
    another origin, or by a name of its own that leads to this address, so both are refused.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await _answer(refusal, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MOST_BYTES:
                raise _TooLargeError
            return message

        try:
            await self._app(scope, counted, send)
        except _TooLargeError:
            await _answer(_too_large(), send)

    def _refusal(self, path: str, headers: dict[str, str]) -> ApiError | None:
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > MOST_BYTES:
            return _too_large()
        origin = headers.get("origin")
        host = headers.get("host", "")
        if origin is not None and origin.partition("://")[2] != host:
            return ApiError(403, "Pages of other sites may not use this gateway.", code="wrong_origin")
        if self._key is None:
            if not is_loopback(_name_in(host)):
                return ApiError(
                    403,
                    "Without a key this gateway answers at 127.0.0.1 and localhost only. Use one of these "
                    "names, or start it with --api-key-file.",
                    code="wrong_host",
                )
            return None
        if path in OPEN_PATHS or path.startswith(OPEN_PATHS[-1]):
            return None
        given = headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
            return None
        return ApiError(
            401,
            "The API key is missing or wrong. Send the gateway's key as `Authorization: Bearer KEY`.",
            code="invalid_api_key",
        )


def _name_in(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class _TooLargeError(Exception):
    pass


def _too_large() -> ApiError:
    return ApiError(413, f"The request is larger than {MOST_BYTES} bytes. Send less.")


async def _answer(error: ApiError, send: Send) -> None:
    body = json.dumps(error.to_json()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
