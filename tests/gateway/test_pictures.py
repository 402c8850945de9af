"""Pictures of the page for the documentation: the default model behind an emulated link, in Chromium.

With ``APARTE_DOCS_PICTURES=1`` they replace those in ``docs/img``; otherwise they are kept with the others.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aparte.address import format_address, parse_address
from aparte.api import Aparte
from aparte.cli.protection import privacy_line
from aparte.config import DEFAULT_MODEL, Compute
from aparte.measure.wan_link import WanProfile
from aparte.measure.wan_process import wan_process
from gateway.browser import PHONE, PICTURES, ROOT, Page, chromium
from gateway.served import serving
from running import running_server

pytestmark = [pytest.mark.slow, pytest.mark.model]

FOLDER = ROOT / "docs" / "img" if os.environ.get("APARTE_DOCS_PICTURES") else PICTURES
WIDE = {"width": 1120, "height": 800}
MOST_BYTES = 200_000


@pytest.mark.usefixtures("all_cores")
def test_a_chat_with_the_default_model(default_model: Path) -> None:
    with (
        chromium() as browser,
        running_server(default_model, compute=Compute(), name=DEFAULT_MODEL) as (_, cloud),
        wan_process(parse_address(cloud.removeprefix("ws://")), WanProfile(rtt_ms=80)) as there,
        Aparte.connect(DEFAULT_MODEL, cloud=f"ws://{format_address(there)}") as model,
        serving(
            model, verdict=privacy_line(model.blueprint, model.connection.cut, "none"), name=DEFAULT_MODEL
        ) as url,
    ):
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, viewport, theme, top in (
            ("page-light", WIDE, "light", ".question"),
            ("page-dark", WIDE, "dark", ".question ~ .question"),
            ("page-phone", PHONE, "light", ".question"),
        ):
            page = Page(browser, url, viewport=viewport, theme=theme)
            page.set(temperature=0, max_tokens=100)
            page.ask("Why is the sky blue?")
            page.wait_for_answer(patience=4)
            page.ask("Write a Python function that adds two numbers, and say how it works.")
            page.wait_for_answer(2, patience=4)
            page.tab.evaluate(
                f"document.activeElement.blur(); document.querySelector('{top}').scrollIntoView()"
            )
            path = FOLDER / f"{name}.png"
            page.tab.screenshot(path=path, animations="disabled")
            assert page.complaints == []
            assert path.stat().st_size < MOST_BYTES
            page.close()
