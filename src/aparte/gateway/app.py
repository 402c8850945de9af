"""The HTTP application: endpoints, errors, and the page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aparte import __version__
from aparte.api import Aparte
from aparte.gateway.door import Door
from aparte.gateway.events import EventStream, next_of, until_gone
from aparte.gateway.hiding import Hiding
from aparte.gateway.metrics import Metrics
from aparte.gateway.problems import ApiError, from_exception, from_validation, shown
from aparte.gateway.requests import ChatRequest, CompletionRequest
from aparte.gateway.service import Service
from aparte.gateway.translate import Order, order_chat, order_completion

#: Seconds of silence after which a stream gets a comment.
KEEP_ALIVE_S = 5.0
#: For the log and the numbers only: there is nobody left to read it.
CLIENT_LEFT = 499

#: The page may load what lies beside it and talk to this gateway, and nothing else.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/models")
PAGE_FILES = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "answer.js": "text/javascript",
    "api.js": "text/javascript",
    "markdown.js": "text/javascript",
    "seen.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
    for status, text in (
        (400, "Something in the request can't be had; `param` names it."),
        (401, "The key is missing or wrong."),
        (403, "Asked by a page of another site, or under another name."),
        (404, "No such model."),
        (413, "The request is too large."),
        (429, "Too many answers wait."),
        (500, "A fault of the gateway."),
        (502, "The cloud failed."),
        (503, "The cloud can't be reached."),
    )
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream` as server-sent events.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}

T = TypeVar("T", ChatRequest, CompletionRequest)


def create_app(
    model: Aparte,
    name: str,
    *,
    key: str | None = None,
    aliases: tuple[str, ...] = (),
    hiding: Hiding | None = None,
    verdict: str | None = None,
    keep_alive_s: float = KEEP_ALIVE_S,
) -> ASGIApp:
    """The application for a model that is ready; ``aliases`` are further names that it answers to.

    ``hiding`` replaces names before the model sees them; ``verdict`` says in a sentence what the cloud can
    recover.
    """
    app = FastAPI(
        title="aparte gateway", version=__version__, docs_url=None, redoc_url=None, responses=_PROBLEMS
    )
    metrics = Metrics(model.pool)
    service = Service(model, name, metrics)
    _answer_errors(app)

    async def answer(request: Request, body: T, order_of: Callable[[Aparte, T], Order]) -> Response:
        try:
            return await try_to_answer(request, body, order_of)
        except Exception as error:
            raise from_exception(error) from error

    async def try_to_answer(request: Request, body: T, order_of: Callable[[Aparte, T], Order]) -> Response:
        if body.model not in (name, *aliases):
            raise ApiError(
                404,
                f"There is no model `{shown(body.model)}` here, but `{shown(name)}`. Ask for that one, or "
                "start the gateway with --alias.",
                param="model",
                code="model_not_found",
            )
        # A long prompt takes the tokenizer a while.
        order = await asyncio.to_thread(order_of, model, body)
        if not order.stream:
            return await _whole(request, service, order)
        events = service.events(order)
        first = next_of(events)
        # What fails at once is answered with a status, and not with an event.
        await asyncio.wait({first}, timeout=keep_alive_s)
        if first.done() and (error := first.exception()) is not None:
            raise error
        return EventStream(events, first, keep_alive_s)

    @app.post("/v1/chat/completions", responses=_STREAM, response_model=None)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """The next turn of a conversation."""
        return await answer(request, body, partial(order_chat, hiding=hiding))

    @app.post("/v1/completions", responses=_STREAM, response_model=None)
    async def complete(request: Request, body: CompletionRequest) -> Response:
        """The continuation of a text."""
        return await answer(request, body, partial(order_completion, hiding=hiding))

    card = _card(model, name, hiding is not None, verdict)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that there is, under all its names."""
        return {"object": "list", "data": [card | {"id": each} for each in (name, *aliases)]}

    @app.get("/v1/models/{model_name:path}")
    async def one_model(model_name: str) -> dict[str, Any]:
        """What is known of a model."""
        if model_name not in (name, *aliases):
            raise ApiError(404, f"There is no model `{shown(model_name)}` here.", code="model_not_found")
        return card | {"id": model_name}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether the gateway is alive; says nothing about the cloud."""
        return {"status": "ok", "busy": model.pool.busy, "waiting": model.pool.waiting}

    @app.get("/metrics", response_class=Response)
    async def numbers() -> Response:
        """For Prometheus."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    _serve_page(app)
    _describe(app)
    return Door(_Counted(app, metrics), key)


async def _whole(request: Request, service: Service, order: Order) -> Response:
    """The answer in one piece, unless the client leaves first: then nothing goes on."""
    work = asyncio.ensure_future(service.complete(order))
    gone = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return JSONResponse(work.result())
        return Response(status_code=CLIENT_LEFT)
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


def _card(model: Aparte, name: str, pseudonyms: bool, verdict: str | None) -> dict[str, Any]:
    connection = model.connection
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "aparte",
        "aparte": {
            "target": connection.target,
            "cut": str(connection.cut) if connection.target == "split" else None,
            "max_context": model.max_context,
            "chat_template": model.codec.has_chat_template,
            "tools": model.codec.takes_tools,
            "cloud_sees_text": connection.target == "draft",
            "defence": connection.protection.defence,
            "pseudonyms": pseudonyms,
            "verdict": verdict,
        },
    }


def _answer_errors(app: FastAPI) -> None:
    def answer(error: ApiError) -> Response:
        return JSONResponse(error.to_json(), error.status)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(from_validation(error.errors()))

    async def routing(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse(
            ApiError(error.status_code, str(error.detail)).to_json(), error.status_code, error.headers
        )

    async def failed(_: Request, error: Exception) -> Response:
        return answer(from_exception(error))

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(ApiError, failed)


def _describe(app: FastAPI) -> None:
    """The schema at ``/openapi.json``: what is wrong with a request is a 400 here, never FastAPI's 422."""
    make = app.openapi

    def describe() -> dict[str, Any]:
        schema = make()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = describe  # type: ignore[method-assign]


class _Counted:
    """Counts the requests that came through the door, by endpoint and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                endpoint = scope["path"] if scope["path"] in ENDPOINTS else "other"
                self._metrics.request(endpoint, message["status"])
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


def _serve_page(app: FastAPI) -> None:
    folder = resources.files("aparte.gateway") / "static"
    headers = {
        "content-security-policy": PAGE_POLICY,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(
            (folder / "page.html").read_bytes(), media_type="text/html; charset=utf-8", headers=headers
        )

    @app.get("/static/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise ApiError(404, "There is no such file.")
        return Response((folder / name).read_bytes(), media_type=PAGE_FILES[name], headers=headers)
