"""The page at ``/`` in a real browser: it talks, shows what the engine does, and asks nobody else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from browsing import NEEDS_BROWSER, Tab, browser
from playwright.sync_api import Browser, Page, Route, expect
from serving import Server, dense, quantised, tokenizer_of_example

pytestmark = NEEDS_BROWSER

DESK = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(quantised(), tokenizer_of_example(), max_tokens=2048, others={"dense": dense()})
    yield made
    made.close()


@pytest.fixture
def tab(chromium: Browser, server: Server) -> Iterator[Tab]:
    with Tab(chromium, **DESK) as tab:
        opened(tab.page, server)
        yield tab
        assert tab.complaints == []
        assert {url.split("/")[2] for url in tab.asked} == {server.url.split("/")[2]}


def opened(page: Page, server: Server) -> None:
    page.goto(server.url)
    expect(page.locator("#status")).to_have_text("Idle. Figures are of what was done last.")


def ask(page: Page, text: str, *, tokens: int, temperature: float = 0) -> None:
    if not page.locator("#temperature").is_visible():
        page.get_by_text("Settings").click()
    page.locator("#temperature").fill(str(temperature))
    page.locator("#limit").fill(str(tokens))
    page.locator("#ask").fill(text)
    page.locator("#ask").press("Enter")


def endless(page: Page, server: Server) -> None:
    """An answer that does not end by itself within a test: the token that ends one is never drawn."""

    def without_end(route: Route) -> None:
        asked = route.request.post_data_json
        route.continue_(post_data=json.dumps(asked | {"logit_bias": {"0": -100}}))

    page.route("**/v1/chat/completions", without_end)
    ask(page, "def main(", tokens=1000, temperature=2)
    expect(page.locator(".growing")).to_have_text(re.compile(".{40}", re.DOTALL))


def test_a_question_is_answered_and_the_engine_is_seen(tab: Tab, server: Server) -> None:
    page = tab.page
    page.evaluate(
        """() => {
          window.lengths = new Set();
          const look = () => lengths.add(document.querySelector('.assistant')?.textContent.length ?? 0);
          const all = {subtree: true, childList: true, characterData: true};
          new MutationObserver(look).observe(document.getElementById('log'), all);
        }"""
    )
    ask(page, "def main(", tokens=200)
    expect(page.locator(".about")).to_contain_text("200 tokens")
    expect(page.locator("#welcome")).to_be_hidden()
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "def main("}], "temperature": 0}
    wanted = httpx.post(f"{server.url}/v1/chat/completions", json={"model": "tiny", "max_tokens": 200, **asked}).json()
    wanted_text = wanted["choices"][0]["message"]["content"]
    assert "".join(page.locator(".assistant .text").all_inner_texts()).strip() == wanted_text.strip()
    assert page.evaluate("lengths.size") > 4  # it grew
    expect(page.locator("#status")).to_have_text("Idle. Figures are of what was done last.")
    rows = page.locator(".layer")
    assert rows.count() == 5
    for i in range(5):
        expect(rows.nth(i).locator("b")).to_contain_text(" %")
        assert page.evaluate("(i) => document.querySelectorAll('.layer .cold')[i].clientWidth", i) > 0
    assert page.locator("#fired").inner_text().endswith(" %")
    assert page.locator("#used").inner_text().endswith(" %")
    assert float(page.locator("#speed").inner_text()) > 0
    assert page.locator("#step-ms").inner_text().endswith(" ms")
    painted = "id => { const c = document.getElementById(id);"
    painted += " return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v > 0); }"
    assert page.evaluate(painted, "heat")
    assert page.evaluate(painted, "speeds")


@pytest.mark.parametrize("how", ["Escape", "button", "New chat"])
def test_an_answer_is_stopped(tab: Tab, server: Server, how: str) -> None:
    page, before = tab.page, server.batch.counts.ended.get("cancelled", 0)
    endless(page, server)
    if how == "Escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop" if how == "button" else how, exact=True).click()
    expect(page.locator("#send")).to_be_visible()
    if how == "New chat":
        expect(page.locator(".said")).to_have_count(0)
        expect(page.locator("#welcome")).to_be_visible()
    else:
        expect(page.locator(".about")).to_contain_text("stopped")
    for _ in range(100):
        if server.batch.counts.ended.get("cancelled", 0) > before:
            break
        page.wait_for_timeout(100)
    assert server.batch.counts.ended["cancelled"] == before + 1
    ask(page, "import", tokens=8)  # and it goes on
    expect(page.locator(".about").last).to_contain_text("8 tokens")


def test_text_is_text(tab: Tab) -> None:
    page = tab.page
    evil = "<img src=x onerror=\"document.title = 'evil'\"> & <b>bold</b>"
    page.locator("#ask").fill(evil)
    page.locator("#ask").press("Shift+Enter")
    page.locator("#ask").type("a second line")
    page.locator("#limit").evaluate("(field) => { field.value = 4; }")
    page.locator("#ask").press("Enter")
    expect(page.locator(".user .text")).to_have_text(f"{evil}\na second line")
    expect(page.locator(".about")).to_contain_text("tokens")
    assert page.locator("#log img, #log b").count() == 0
    shown = page.evaluate(
        """async () => {
          const { show } = await import('/page/plain.js');
          const parent = document.createElement('div');
          const whole = 'One <i>\\n```python\\nif a < b:\\n    pass\\n```\\ntwo\\n'
            + '~~~\\n```\\n~~~\\n````html\\n<b>\\n```\\n';
          for (let end = 0; end <= whole.length; end += 1) show(parent, whole.slice(0, end));
          return [...parent.children].map((node) => node.className === 'code'
            ? ['code', node.querySelector('span').textContent, node.querySelector('code').textContent]
            : ['text', '', node.textContent]);
        }"""
    )
    assert shown == [
        ["text", "", "One <i>"],
        ["code", "python", "if a < b:\n    pass"],
        ["text", "", "two"],
        ["code", "code", "```"],
        ["code", "html", "<b>\n```"],
    ]


def test_what_is_refused_is_said_and_can_be_asked_again(tab: Tab) -> None:
    page = tab.page
    long = "x = 1; " * 1800  # one line: Chromium takes ten seconds to fill in so many
    ask(page, long, tokens=8)
    expect(page.locator(".error")).to_contain_text("1 token of each or more, at most 2048 together")
    assert page.locator("#ask").input_value() == long
    tab.complaints[:] = [line for line in tab.complaints if "400 (Bad Request)" not in line]  # the browser's own
    ask(page, "import", tokens=8)
    expect(page.locator(".about")).to_contain_text("8 tokens")


def test_a_key_is_asked_for_and_kept_for_the_tab(chromium: Browser, server: Server) -> None:
    locked = Server(server.model, tokenizer_of_example(), api_key="a key")
    try:
        with Tab(chromium, **DESK) as tab:
            page = tab.page
            page.goto(locked.url)
            expect(page.locator("#key-dialog")).to_be_visible()
            page.locator("#key").fill("ключ…")
            page.locator("#key").press("Enter")
            expect(page.locator("#key-why")).to_have_text("This key has letters that cannot be sent.")
            page.locator("#key").press("Escape")
            expect(page.locator("#status")).to_have_text("The server asks for a key: reload the page to give it one.")
            page.reload()
            expect(page.locator("#key-dialog")).to_be_visible()
            page.locator("#key").fill("another")
            page.locator("#key").press("Enter")
            expect(page.locator("#key-why")).to_contain_text("expected the server's API key")
            page.locator("#key").fill("a key")
            page.locator("#key").press("Enter")
            expect(page.locator("#status")).to_contain_text("Idle")
            ask(page, "import", tokens=40)
            expect(page.locator(".about")).to_contain_text("40 tokens")
            expect(page.locator("#speed")).not_to_have_text("–")
            page.reload()
            expect(page.locator("#status")).to_contain_text("Idle")
            expect(page.locator("#key-dialog")).to_be_hidden()
            assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
            assert all("401 (Unauthorized)" in line for line in tab.complaints)
            assert not any("key" in url for url in tab.asked)
    finally:
        locked.close()
