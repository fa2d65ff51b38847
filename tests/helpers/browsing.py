"""A real browser, where one is installed, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

Test = TypeVar("Test", bound=Callable[..., Any])

#: Of what is installed, not what Playwright would download.
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


#: Marks of tests that are skipped, by name, where there is none: of a module, and of one test.
NEEDS_BROWSER = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome (Debian: chromium)"),
]


def needs_browser(test: Test) -> Test:
    for mark in NEEDS_BROWSER:
        test = mark(test)
    return test


@contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


class Tab:
    """A page, what it says on its console, and what it asks of whom."""

    def __init__(self, found: Browser, **settings: Any) -> None:
        self._context = found.new_context(**settings)
        self.page: Page = self._context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()
