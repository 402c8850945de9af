"""What goes wrong, as the OpenAI API says it: a status and an ``error`` object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aparte.errors import AparteError, LinkError, UserError
from aparte.pool import BusyError

#: Characters of a client's own words that an error repeats, at most.
SHOWN = 100


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def to_json(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def unsupported(param: str, why: str = "") -> ApiError:
    """The client asked for something that there is not."""
    reason = f": {why}" if why else ""
    return ApiError(
        400,
        f"`{shown(param)}` is not supported by this gateway{reason}. Leave it out.",
        param=shown(param),
        code="unsupported_parameter",
    )


def from_exception(error: BaseException) -> ApiError:
    """What to answer when an answer failed. Texts of unknown exceptions are not passed on."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RecursionError):
        return ApiError(400, "The request is nested too deeply.")
    if isinstance(error, BusyError):
        return ApiError(429, str(error), code="busy")
    if isinstance(error, LinkError):
        return ApiError(503, str(error), code="cloud_unreachable")
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, AparteError):
        return ApiError(502, str(error), code="cloud_failed")
    return ApiError(500, f"Something unexpected happened in the gateway ({type(error).__name__}).")


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's findings about a request."""
    error = errors[0]
    # Names of alternatives of a union are in the path too; they say nothing to a client.
    path = [part for part in error["loc"] if part != "body" and not _is_alternative(part)]
    param = shown("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip("."))
    match error["type"]:
        case "extra_forbidden":
            return unsupported(param)
        case "missing":
            return ApiError(
                400, f"`{param}` is missing." if param else "The request has no body.", param=param
            )
        case "json_invalid":
            return ApiError(400, "The request's body is not JSON.")
        case _:
            return ApiError(400, f"`{param}`: {shown(error['msg'], 300)}.", param=param or None)


def _is_alternative(part: object) -> bool:
    return isinstance(part, str) and (
        part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper()
    )


def shown(text: str, limit: int = SHOWN) -> str:
    """A client's own words in an error, such as a field's name: short, and printable ASCII."""
    plain = text.encode("ascii", "backslashreplace").decode("ascii")
    return "".join(char if char.isprintable() else "?" for char in plain)[:limit]
