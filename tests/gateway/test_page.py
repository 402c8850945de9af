"""The page in a real browser: a chat, stopping, reconnecting, errors, the keyboard, accessibility."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aparte.cloud.server import MiddleServer
from gateway.browser import DESKTOP, PHONE, Page, chromium
from gateway.conftest import Served
from gateway.served import connected, serving, wait_for
from relay import relay_to
from running import running_server

QUESTION = "Why is the sky blue?"
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Page]]:
    pages: list[Page] = []

    def open_it(url: str, **options: Any) -> Page:
        pages.append(Page(browser, url, **options))
        return pages[-1]

    yield open_it
    for page in pages:
        page.close()


@pytest.fixture
def page(open_page: Callable[..., Page], served: Served) -> Page:
    page = open_page(served.url)
    page.set(**GREEDY)
    return page


@pytest.fixture(scope="module")
def bare(browser: Any, served: Served) -> Iterator[Page]:
    """The page, for tests that do not chat."""
    page = Page(browser, served.url)
    yield page
    page.close()


def slowly(server: MiddleServer, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have every pass of the cloud take so long."""
    compute = server.engine.run_pass

    def run(shares: Any) -> Any:
        time.sleep(seconds)
        return compute(shares)

    monkeypatch.setattr(server.engine, "run_pass", run)


def legend(answer: Any) -> list[str]:
    """Where an answer's time went, in words."""
    return [str(text) for text in answer.locator(".legend li").all_text_contents()]


class TestChat:
    def test_an_answer_and_all_that_is_told_of_it(self, page: Page, served: Served) -> None:
        written = served.model.generate(QUESTION, max_new_tokens=24)
        page.ask(QUESTION)
        answer = page.wait_for_answer()
        numbers = answer.locator(".numbers strong").all_text_contents()
        assert int(numbers[0]) == len(written.token_ids)
        told = [int(cell) for cell in answer.locator("details tr td:nth-child(2)").all_text_contents()]
        assert sum(told) == len(written.token_ids)
        assert len(told) == int(numbers[1])
        assert float(numbers[2]) == round(sum(told) / len(told), 2)
        # Each round trip's text has its number, and they come in order.
        marks = [int(one.get_attribute("data-trip")) for one in answer.locator(".text .trip").all()]
        assert marks == sorted(marks)
        assert set(marks) <= set(range(1, len(told) + 1))
        assert answer.locator(".text").inner_text().split() == written.text.split() or "`" in written.text
        self.where_its_time_went(answer)
        assert page.complaints == []
        assert {url.split("/")[2] for url in page.requests} == {served.url.split("/")[2]}
        page.keep("chat")

    def where_its_time_went(self, answer: Any) -> None:
        """All parts, in the bar and in words, which add up to the whole."""
        told = [re.fullmatch(r"(.+?) ([\d.]+) (ms|s)( in all)?", text) for text in legend(answer)]
        times = {one[1]: float(one[2]) * (1 if one[3] == "ms" else 1e3) for one in told[:-1] if one}
        assert {"network", "this device", "number formats", "cloud", "cloud's queue", "the rest"} <= set(
            times
        )
        whole = re.fullmatch(r"([\d.]+) (ms|s) in all", legend(answer)[-1])
        assert whole is not None
        whole_ms = float(whole[1]) * (1 if whole[2] == "ms" else 1e3)
        assert sum(times.values()) == pytest.approx(whole_ms, rel=0.02, abs=len(times))  # rounded to ms
        rects = answer.locator("svg.bar rect")
        assert rects.count() == len(times)
        widths = [float(rect.get_attribute("width")) for rect in rects.all()]
        assert sum(widths) == pytest.approx(100, abs=2)
        assert min(widths) >= 0

    def test_what_the_cloud_saw_is_beside_it(self, page: Page, served: Served) -> None:
        page.ask(QUESTION)
        answer = page.wait_for_answer()
        prompt = len(served.model.encode(QUESTION))
        of_question = page.tab.locator(".question .seen")
        of_answer = answer.locator(".seen")
        reused = prompt - int(of_question.inner_text().split("saw")[1].split()[0])
        assert 0 <= reused < prompt
        assert "32 numbers" in of_question.inner_text()
        strip = of_question.locator("svg.strip").get_attribute("aria-label")
        assert strip.startswith(f"{prompt - reused} hidden states, with lengths from ")
        assert of_answer.locator("svg.strip path").count() >= 1
        sample = of_answer.locator("code").inner_text().replace(" ", "")
        assert len(bytes.fromhex(sample)) == 24
        assert "of the prompt" in of_question.inner_text()
        assert "B up" in of_answer.inner_text()

    def test_a_conversation_is_one(self, page: Page, served: Served) -> None:
        page.ask(QUESTION)
        page.wait_for_answer()
        asked = page.tab.evaluate("performance.now()")
        page.ask("And then?")
        page.wait_for_answer(2)
        assert asked > 0
        said = page.tab.locator(".answer").first.locator(".text .trip").all_text_contents()
        assert "".join(said).strip() != ""
        # Only what is new of the prompt was sent.
        new = int(page.tab.locator(".question .seen").nth(1).inner_text().split("saw")[1].split()[0])
        assert new < len(served.model.encode("And then?")) + 30
        page.tab.click("#new")
        assert page.tab.locator("article").count() == 0
        assert page.tab.locator("#welcome").is_visible()

    def test_regenerate(self, page: Page) -> None:
        page.set(temperature=1.2, seed=5)
        page.ask(QUESTION)
        first = page.wait_for_answer().locator(".text").inner_text()
        page.set(seed=6)
        page.tab.click("text=Regenerate")
        page.until("document.querySelectorAll('.answer').length === 1")
        second = page.wait_for_answer().locator(".text").inner_text()
        assert first != second
        page.set(seed=5)
        page.tab.click("text=Regenerate")
        page.until("document.querySelector('.answer.done .text')?.innerText", lambda text: text == first)

    def test_draft_mode_says_that_the_cloud_reads(
        self, open_page: Callable[..., Page], llama_folder: Path
    ) -> None:
        with (
            running_server(llama_folder, whole=True) as (_, cloud),
            connected(llama_folder, cloud, target="draft") as model,
            serving(model, verdict="The cloud sees the text.") as url,
        ):
            page = open_page(url)
            assert "sees the text" in page.tab.locator("#about").inner_text()
            page.set(**GREEDY)
            page.ask(QUESTION)
            seen = page.wait_for_answer().locator(".seen").inner_text()
            assert "The text itself" in seen
            assert "The cloud sees the text." in seen


class TestInterruptions:
    def test_stop_and_go_on(
        self, open_page: Callable[..., Page], llama_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with (
            running_server(llama_folder) as (server, cloud),
            connected(llama_folder, cloud, sessions=1, decode="sequential") as model,
            serving(model) as url,
        ):
            slowly(server, monkeypatch, 0.04)
            page = open_page(url)
            page.forbid(model.codec.eos)
            page.set(temperature=0, max_tokens=400)
            page.ask(QUESTION)
            page.tab.wait_for_selector(".answer .trip")
            page.keep("streaming")
            assert page.tab.locator("#stop").is_visible()
            page.tab.keyboard.press("Escape")
            answer = page.wait_for_answer()
            assert "stopped" in answer.locator("h2").inner_text()
            wait_for(lambda: model.pool.busy == 0)
            steps = server.counters.steps
            time.sleep(0.15)
            assert server.counters.steps == steps, "the cloud does nothing more"
            kept = answer.locator(".text").inner_text()
            assert kept
            page.set(max_tokens=4)
            page.ask("And then?")
            page.wait_for_answer(2)
            assert page.tab.locator(".answer .text").first.inner_text() == kept
            assert page.tab.locator(".problem").count() == 0

    def test_a_cloud_that_is_restarted_in_the_middle(
        self, open_page: Callable[..., Page], llama_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = running_server(llama_folder)
        server, cloud = first.__enter__()
        with (
            relay_to(cloud) as relay,
            connected(llama_folder, relay.url, decode="sequential") as model,
            serving(model) as url,
        ):
            page = open_page(url)
            bias = page.forbid(model.codec.eos)
            expected = model.generate(QUESTION, max_new_tokens=40, logit_bias=bias).text
            slowly(server, monkeypatch, 0.1)
            page.set(temperature=0, max_tokens=40)
            page.ask(QUESTION)
            page.until("document.querySelectorAll('.trip').length > 3")
            first.__exit__(None, None, None)
            with running_server(llama_folder) as (_, again):
                relay.upstream = int(again.rpartition(":")[2])
                page.until("document.querySelector('.state').textContent.includes('found again')")
                answer = page.wait_for_answer()
                text = "".join(answer.locator(".text .trip").all_text_contents())
                assert text.split() == expected.split() or "`" in expected
                assert page.tab.locator(".problem").count() == 0

    def test_a_cloud_that_is_gone_and_comes_back(
        self, open_page: Callable[..., Page], llama_folder: Path
    ) -> None:
        with (
            running_server(llama_folder) as (_, cloud),
            relay_to(cloud) as relay,
            connected(llama_folder, relay.url) as model,
            serving(model) as url,
        ):
            object.__setattr__(model.connection.link, "retries", 0)
            page = open_page(url)
            page.set(**GREEDY)
            relay.upstream = 1
            relay.cut()
            page.ask(QUESTION)
            problem = page.tab.locator("[role=alert]")
            problem.wait_for()
            assert problem.locator("p").inner_text().strip()
            page.keep("error")
            relay.upstream = int(cloud.rpartition(":")[2])
            page.tab.click("text=Try again")
            page.wait_for_answer()
            assert problem.count() == 0
            assert page.tab.locator(".question").count() == 1

    def test_a_gateway_that_is_gone(self, page: Page) -> None:
        page.tab.route("**/v1/chat/completions", lambda route: route.abort())
        page.ask(QUESTION)
        page.tab.wait_for_selector("text=The gateway cannot be reached. Is it still running?")

    def test_a_mistake_in_the_settings_is_named(self, page: Page) -> None:
        page.set(temperature=9)
        page.ask(QUESTION)
        page.tab.wait_for_selector(".problem >> text=temperature")
        page.set(**GREEDY)
        page.tab.click("text=Try again")
        page.wait_for_answer()

    def test_the_key_is_asked_for(self, open_page: Callable[..., Page], served: Served) -> None:
        with serving(served.model, key="open-sesame") as url:
            page = open_page(url)
            page.tab.click("text=Give the key")
            assert page.tab.evaluate("document.activeElement.id") == "key"
            page.tab.fill("#key", "open-sesame")
            page.tab.click("#close-settings")
            page.tab.wait_for_selector("#about >> text=tiny")
            assert page.tab.locator(".problem").count() == 0
            assert "open-sesame" not in str(page.tab.evaluate("({...localStorage})"))


class TestKeyboard:
    def test_all_of_it_without_a_mouse(self, page: Page) -> None:
        tab = page.tab
        tab.evaluate("document.activeElement.blur()")
        tab.keyboard.press("/")
        assert tab.evaluate("document.activeElement.id") == "prompt"
        tab.keyboard.type("one")
        tab.keyboard.press("Shift+Enter")
        tab.keyboard.type("two")
        assert tab.input_value("#prompt") == "one\ntwo"
        tab.keyboard.press("Enter")
        page.wait_for_answer()
        assert tab.locator(".question .text").inner_text() == "one\ntwo"
        assert tab.input_value("#prompt") == ""
        tab.focus("#marks")
        order = []
        for _ in range(3):
            tab.keyboard.press("Tab")
            order.append(tab.evaluate("document.activeElement.id"))
        assert order == ["theme", "open-settings", "new"]
        tab.focus("#open-settings")
        tab.keyboard.press("Enter")
        assert tab.locator("#settings").is_visible()
        tab.keyboard.press("Escape")
        # Closing takes the focus to the prompt, some time after the dialog is gone.
        page.until("document.activeElement.id === 'prompt'")
        assert not tab.locator("#settings").is_visible()
        tab.focus("summary")
        tab.keyboard.press("Enter")
        assert tab.locator("details table").is_visible()

    def test_looks_and_sampling_are_remembered_and_nothing_said(self, page: Page) -> None:
        page.ask("a secret question")
        page.wait_for_answer()
        page.tab.click("#theme")
        page.tab.click("#theme")
        page.tab.click("#marks")
        page.set(system="be brief", top_p=0.5)
        page.tab.reload()
        assert page.tab.get_attribute("html", "data-theme") == "dark"
        assert page.tab.get_attribute("#marks", "aria-pressed") == "false"
        assert page.tab.input_value("#top_p") == "0.5"
        assert page.tab.input_value("#system") == ""
        kept = str(page.tab.evaluate("({...localStorage, ...sessionStorage})"))
        assert "secret" not in kept
        assert "brief" not in kept


MARKDOWN = """# Title

Some *emphasis*, **strong words**, `a < b` and ~~gone~~, snake_case_name, 2 * 3 * 4.
A [link](https://example.org/a_(b)) and https://example.org/plain.

- one
- two
  - nested **bold**
- three

3. third
4. fourth

> quoted
> on

| a | b |
|---|--:|
| 1 | `x` |

```python
if a < b:
    print("**no**")
```
---
last"""


class TestMarkdown:
    def render(self, bare: Page, source: str) -> str:
        """The HTML that the page makes of ``source``, without marks."""
        return str(
            bare.tab.evaluate(
                """async (source) => {
                  const { blocks } = await import("/static/markdown.js");
                  const put = (into, { text, at }) => {
                    for (const [place, char] of [...text].entries())
                      if (source[at[place]] !== char && char !== "\\n") throw new Error("misplaced " + char);
                    into.append(text);
                  };
                  const box = document.createElement("div");
                  for (const block of blocks(source)) box.append(block.build(put));
                  return box.innerHTML;
                }""",
                source,
            )
        )

    def test_what_models_write(self, bare: Page) -> None:
        html = self.render(bare, MARKDOWN)
        for piece in (
            "<h3>Title</h3>",
            "<em>emphasis</em>",
            "<strong>strong words</strong>",
            "<code>a &lt; b</code>",
            "<del>gone</del>",
            "snake_case_name, 2 * 3 * 4.",
            'href="https://example.org/a_(b)"',
            ">https://example.org/plain</a>.",
            "<ul><li>one</li><li>two<ul><li>nested <strong>bold</strong></li></ul></li><li>three</li></ul>",
            '<ol start="3"><li>third</li><li>fourth</li></ol>',
            "<blockquote><p>quoted\non</p></blockquote>",
            '<td class="end"><code>x</code></td>',
            'if a &lt; b:\n    print("**no**")',
            "<hr><p>last</p>",
        ):
            assert piece in html, piece

    def test_nothing_in_it_acts(self, bare: Page) -> None:
        before = len(bare.requests)
        for source in (
            "<img src=x onerror=\"document.title='bad'\">",
            "<script>document.title='bad'</script>",
            "[click](javascript:document.title='bad')",
            "![x](https://example.org/pixel.png)",
            "```html\n<script>document.title='bad'</script>",
            "[a](data:text/html,<script>1</script>) <svg/onload=alert(1)>",
            "`<b>`" + "[" * 3000 + "*" * 3000 + "_a" * 3000 + "`" * 3000,
        ):
            html = self.render(bare, source)
            for name in ("<img", "<script", "<svg", 'href="javascript', 'href="data:'):
                assert name not in html, source
        assert bare.tab.title() == "aparte"
        assert not [url for url in bare.requests[before:] if "example.org" in url]
        # And if somebody put it in, the browser would not have it.
        assert "TrustedHTML" in bare.tab.evaluate(
            "try { document.body.innerHTML = 'x'; 'done' } catch (error) { error.message }"
        )

    def test_text_may_end_anywhere(self, bare: Page) -> None:
        for source in ("", "\n\n", "```", "|", "- ", "1.", "**", "> ", "#", "\\", "a\n|-", "- a\n\n\n"):
            self.render(bare, source)
        for end in range(0, len(MARKDOWN), 17):
            self.render(bare, MARKDOWN[:end])


def faults(page: Page) -> list[str]:
    """What axe-core finds serious or worse."""
    axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    if not page.tab.evaluate("'axe' in window"):
        page.tab.evaluate(f"{script}; undefined")
    found = page.tab.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{one['id']} ({one['impact']}): {node['html'][:120]} {node['failureSummary'][:300]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_everybody_can_use_it(
    open_page: Callable[..., Page], served: Served, viewport: dict[str, int], theme: str
) -> None:
    page = open_page(served.url, viewport=viewport, theme=theme)
    name = f"{'phone' if viewport is PHONE else 'desktop'}-{theme}"
    page.keep(f"welcome-{name}")
    page.set(**GREEDY)
    page.ask(QUESTION)
    page.wait_for_answer().locator("summary").click()
    page.keep(f"answer-{name}")
    wide = page.tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, "nothing is wider than the window"
    page.set(temperature=9)
    page.ask("x")
    page.tab.wait_for_selector(".problem")
    assert faults(page) == []
    page.tab.click("#open-settings")
    page.keep(f"settings-{name}")
    assert faults(page) == []
    page.tab.click("#close-settings")
    page.tab.click("#new")
    assert faults(page) == []
    assert page.complaints == []
