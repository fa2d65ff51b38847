"""Links of the site: those to files of the repository lead there, and every other one leads to something.

A page of docs/ links to ``../csrc/x.cc`` as it does on the disk. A link that leads out of docs/ becomes one to the
repository's address (pyproject.toml); one to a file that is not there stays, and mkdocs warns. After the build every
page is read once more: what it links to in the site is there, and what a browser would load by itself comes from the
site.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
_log = logging.getLogger("mkdocs.hooks.links")

#: ``](target)`` of Markdown, but for addresses and anchors.
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
#: A fenced block or a span of code, in which nothing is a link.
_CODE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1|(`+)[^`].*?\2", re.MULTILINE | re.DOTALL)
#: What a browser loads without being asked: element -> attribute.
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


def repository() -> str:
    """Its address, without a slash at the end."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["urls"]["Homepage"]).rstrip("/")


def to_repository(markdown: str, page: Path, docs: Path) -> str:
    """``markdown`` of the file ``page`` with links out of ``docs`` as links to the repository."""

    def changed(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / found[1]))
        if target.is_relative_to(docs) or not target.is_relative_to(docs.parent) or not target.exists():
            return found[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"]({repository()}/{kind}/main/{target.relative_to(docs.parent).as_posix()}{found[2] or ''})"

    pieces, at = [], 0
    for code in _CODE.finditer(markdown):
        pieces += [_LINK.sub(changed, markdown[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*pieces, _LINK.sub(changed, markdown[at:])])


class _Page(HTMLParser):
    """Names that can be linked to, links, and what is loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value is not None}
        self.names |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in _LOADED and _LOADED[tag] in found and found.get("rel") not in ("next", "prev", "canonical"):
            self.loaded.append(found[_LOADED[tag]])


def broken(site: Path) -> Iterator[str]:
    """What is wrong with the built ``site``, a line each."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    for path, page in pages.items():
        where = path.relative_to(site)
        for link in page.loaded:
            if urlsplit(link).netloc:
                yield f"{where} loads {link}: everything has to come from the site"
        for link in [*page.links, *page.loaded]:
            to = urlsplit(link)
            if to.scheme or to.netloc:
                continue
            target = (path.parent / unquote(to.path)).resolve() if to.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{where} links to {link}, which is not there"
            elif to.fragment and target in pages and unquote(to.fragment) not in pages[target].names:
                yield f"{where} links to {link}: the page is there, the place in it is not"
    for style in sorted(site.rglob("*.css")):
        for address in re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)", style.read_text()):
            yield f"{style.relative_to(site)} loads {address}"


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    if page.file.abs_src_path is None:  # generated
        return markdown
    return to_repository(markdown, Path(page.file.abs_src_path), Path(config.docs_dir))


def on_post_build(*, config: Any) -> None:
    for line in broken(Path(config.site_dir)):
        _log.warning(line)
