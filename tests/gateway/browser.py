"""A real browser for tests of the page: Chromium as the system has it, driven by Playwright."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
#: Where the tests keep what they saw.
PICTURES = Path(os.environ.get("APARTE_TEST_PICTURES", ROOT / "build" / "page"))
DESKTOP = {"width": 1180, "height": 860}
PHONE = {"width": 390, "height": 780}
SECONDS = 60_000  # milliseconds that anything may take


def executable() -> str:
    """Chromium's program; skips where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no Chromium is installed (Debian's package is chromium)")
    return found


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without windows."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = executable()
    with api.sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=program, args=options)
        try:
            yield browser
        finally:
            browser.close()


class Page:
    """The gateway's page in a tab of its own; what it asked for and complained about is in lists."""

    def __init__(self, browser: Any, url: str, *, viewport: Any = None, theme: str = "light") -> None:
        self.context = browser.new_context(viewport=viewport or DESKTOP, color_scheme=theme)
        self.tab = self.context.new_page()
        self.tab.set_default_timeout(SECONDS)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("console", self._hear)
        self.tab.goto(url)
        self.until("document.querySelector('#about').textContent !== '…'")

    def _hear(self, message: Any) -> None:
        # The browser itself notes every status that is an error, which some tests are about.
        if message.type == "error" and "the server responded with a status" not in message.text:
            self.complaints.append(message.text)

    def until(self, expression: str, holds: Callable[[Any], Any] = bool, patience: int = 1) -> None:
        """Wait until an expression's value is right. The page's policy forbids Playwright's own way."""
        end = time.monotonic() + patience * SECONDS / 1e3
        while not holds(value := self.tab.evaluate(expression)):
            assert time.monotonic() < end, f"{expression} is still {value!r}"
            self.tab.wait_for_timeout(20)

    def set(self, **settings: Any) -> None:
        """Fill in the settings."""
        self.tab.click("#open-settings")
        for name, value in settings.items():
            self.tab.fill(f"#{name}", str(value))
        self.tab.click("#close-settings")
        self.until("document.activeElement.id === 'prompt'")  # the dialog closes in its own time

    def ask(self, text: str) -> None:
        self.tab.fill("#prompt", text)
        self.tab.press("#prompt", "Enter")

    def forbid(self, tokens: Iterable[int]) -> dict[int, float]:
        """Have no answer hold one of ``tokens``, which the page has no setting for; the bias that does it."""
        bias = dict.fromkeys(tokens, -100.0)

        def biased(route: Any) -> None:
            route.continue_(post_data=json.dumps(route.request.post_data_json | {"logit_bias": bias}))

        self.tab.route("**/v1/chat/completions", biased)
        return bias

    def wait_for_answer(self, number: int = 1, patience: int = 1) -> Any:
        """The answer with this number, when it has ended."""
        self.until(f"document.querySelectorAll('.answer.done').length >= {number}", patience=patience)
        return self.tab.locator(".answer").nth(number - 1)

    def keep(self, name: str, *, whole: bool = False) -> Path:
        """Keep a picture of what is seen now."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        path = PICTURES / f"{name}.png"
        self.tab.screenshot(path=path, full_page=whole, animations="disabled")
        return path

    def close(self) -> None:
        self.context.close()
