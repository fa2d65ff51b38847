"""The model card of a folder: ``README.md``, with the verdict and the metadata that the Hub reads."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from torch_pi2.base.files import atomic_write
from torch_pi2.store.folder import CARD_FILE
from torch_pi2.types.verdict import Verdict

#: The part between these lines is rewritten each time; everything else is the user's.
BEGIN = "<!-- torch_pi2: begin (written by torch-pi2, and written anew; what is outside of these lines stays) -->"
END = "<!-- torch_pi2: end -->"
#: ``owner/model``.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_COPIED = ("license", "license_name", "license_link", "language", "base_model")


def write_card(folder: Path, verdict: Verdict, source: str | Path, run: str) -> Path:
    """Write or update our part of the card in ``folder``: ``verdict``, and ``run``, the command that uses it."""
    remark = "One run on one machine. Sparse is this folder; dense is the model that it was made of."
    return write_part(folder, section("Verdict", verdict.lines(), remark, run), source)


def write_part(folder: Path, part: str, source: str | Path, library: str = "torch_pi2", title: str = "") -> Path:
    """Write or update our ``part`` (:func:`section`) of the card in ``folder``; the rest is kept. A new card also gets
    ``title`` and metadata for the Hub: ``library`` opens the folder; ``source`` is the model's origin, a folder, whose
    card gives licence and base model, or a name on the Hub. Raises ArtifactError: it cannot be written.
    """
    path, ours = folder / CARD_FILE, f"{BEGIN}\n{part}\n{END}".encode()
    before = path.read_bytes() if path.is_file() else b""
    if _ours(before) is not None:
        text = _with(before, ours)
    elif before:
        text = before.rstrip(b"\n") + b"\n\n" + ours + b"\n"
    else:  # JSON is a subset of YAML
        about = "".join(f"{name}: {json.dumps(value)}\n" for name, value in metadata(source, library).items())
        text = f"---\n{about}---\n\n# {title or folder.resolve().name}\n\n".encode() + ours + b"\n"
    atomic_write(path, text)
    return path


def keep_card(folder: Path, staging: Path) -> None:
    """Copy the card of ``folder``, if it has one, to ``staging``, which will replace it, with our part emptied."""
    if (folder / CARD_FILE).is_file():
        before = (folder / CARD_FILE).read_bytes()
        (staging / CARD_FILE).write_bytes(_with(before, f"{BEGIN}\n{END}".encode()))


def _ours(text: bytes) -> tuple[int, int] | None:
    """Start and end of our part."""
    begin, end = text.find(BEGIN.encode()), text.find(END.encode())
    return (begin, end + len(END)) if 0 <= begin < end else None


def _with(text: bytes, ours: bytes) -> bytes:
    """``text`` with our part, if it has one, replaced by ``ours``."""
    found = _ours(text)
    return text if found is None else text[: found[0]] + ours + text[found[1] :]


def metadata(source: str | Path, library: str = "torch_pi2") -> dict[str, Any]:
    """Metadata for the Hub: library, tags, and the licence and base model of ``source`` if they are known."""
    found: dict[str, Any] = {"library_name": library}
    card, about = Path(source) / CARD_FILE, None
    if card.is_file():
        # huggingface_hub may be missing, and a damaged card, whatever its parser raises, must not stop the model
        with suppress(Exception):
            from huggingface_hub import metadata_load

            about = metadata_load(card)
    for name in _COPIED:
        value = about.get(name) if isinstance(about, dict) else None
        if value and all(isinstance(item, str) for item in (value if isinstance(value, list) else [value])):
            found[name] = value
    if not Path(source).is_dir() and _HUB_NAME.fullmatch(str(source)):
        found["base_model"] = str(source)
    return found | {"tags": ["torch_pi2", "sparse", "text-generation"]}


def section(title: str, lines: Mapping[str, str], remark: str, run: str) -> str:
    """A table of ``lines``, a ``remark``, and the command to ``run``."""
    cells = {name: escape(value, quote=False).replace("|", "\\|").replace("\n", " ") for name, value in lines.items()}
    rows = "".join(f"| {name} | {value} |\n" for name, value in cells.items())
    return f"## {title}\n\n| | |\n|---|---|\n{rows}\n{remark}\n\n```\n{run}\n```"
