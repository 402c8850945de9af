"""aparte: a language model on two machines that do not trust each other equally.

Importing this package is cheap: torch and transformers are only imported by the modules that compute, and
:class:`Aparte` brings them in when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aparte.answer import Answer as Answer
    from aparte.api import Aparte as Aparte
    from aparte.options import Options as Options
    from aparte.pool import Part as Part

__version__ = "0.1.0"

_EXPORTS = {
    "Answer": "aparte.answer",
    "Aparte": "aparte.api",
    "Options": "aparte.options",
    "Part": "aparte.pool",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
