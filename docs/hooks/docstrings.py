"""Docstrings as Markdown: Sphinx' roles become code, and a list of errors that says nothing more stays a list."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:mod|func|class|meth|attr|data|exc):`~?([^`]+)`")
#: ``Raises:`` with names alone below it, which is no section.
_NAMES = re.compile(r"^Raises:\n\s+((?:\w+, )*\w+)\.?$", re.MULTILINE)


def as_markdown(text: str) -> str:
    text = _ROLE.sub(r"`\1`", text)
    return _NAMES.sub(lambda found: "Raises " + ", ".join(f"`{name}`" for name in found[1].split(", ")) + ".", text)


class AsMarkdown(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
