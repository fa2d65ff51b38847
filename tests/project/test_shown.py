"""What README and docs show is so: blocks run as pasted, commands exist, links lead somewhere, plots are of results."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import xml.etree.ElementTree as ET
from pathlib import Path

import pasted
import pytest

from benchmarks import __main__ as bench
from benchmarks import drawings, methods, tables
from torch_pi2 import cli
from torch_pi2.errors import ArtifactError
from torch_pi2.machine.find import cached_path, find_hardware

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
#: Beside README the pages of which every block runs.
RUN = [ROOT / "docs" / "USING.md"]
#: What a fresh machine runs first: `.ci/run` does (test_ci.py), no test can.
BY_CI = {"make demo", "make test"}


def commands(page: Path) -> list[str]:
    """Lines behind ``$`` in blocks of the shell, without their comments."""
    found = []
    for block in pasted.blocks(page):
        if block.language == "console":
            found += [shlex.join(shlex.split(line.rstrip("\\"), comments=True)) for line in block.code.splitlines()]
    return found


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that has of a checkout what blocks name: ``examples`` and ``.venv``."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


# --- README


def test_readme_is_short() -> None:
    assert README.stat().st_size <= 6144


def test_readme_shows_one_picture_and_one_plot() -> None:
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README.read_text())
    assert shown == ["docs/images/flow.svg", "docs/images/memory.svg"]


def test_six_lines_of_python() -> None:
    (block,) = (block for block in pasted.blocks(README) if block.language == "python")
    assert len([line for line in block.code.splitlines() if line.strip()]) == 6
    assert block.shown


def test_figures_of_readme_are_measured() -> None:
    text = " ".join(README.read_text().split())
    whole = json.loads((drawings.RESULTS / "decode-mistral-7b-int4-int8.json").read_text())["peers"]["llama.cpp"]
    half = json.loads((drawings.RESULTS / "offload-mistral-7b-int4-int8.json").read_text())
    ours, peer = half["modes"]["pipeline"]["tokens_per_s"], half["peers"]["llama.cpp"]
    assert (
        f"**{whole['ratio']:.1f} times** llama.cpp with all of it in memory "
        f"({whole['our_tokens_per_s']:.1f} and {whole['tokens_per_s']:.1f} tokens/s)"
    ) in text
    assert half["ffn_in_memory"] == 0.5
    said = f"**{peer['ratio']:.0f} times** with half of the neurons ({ours:.1f} and {peer['tokens_per_s']:.2f},"
    assert said in text


@pytest.mark.slow
def test_readme_runs_as_pasted(checkout: Path) -> None:
    """Block by block, in one folder, as who reads it would."""
    env = {**os.environ, "XDG_CACHE_HOME": str(checkout / ".cache"), "PATH": os.defpath}
    entered = ""
    for block in pasted.blocks(README):
        if block.language == "python":
            page = checkout / "block.md"
            page.write_text(f"```python\n{block.code}```\n")
            ((_, printed),) = pasted.run(page, checkout)
            assert printed == block.shown
            continue
        assert block.shown is None
        for line in block.code.splitlines():
            command = shlex.join(shlex.split(line, comments=True))
            if command in BY_CI:
                continue
            if command.startswith("source "):
                entered = f"{line}\n"
            typed = f"{entered}exec {line}" if line.startswith("torch-pi2") else line
            _run(typed, command, checkout, env)


def _run(typed: str, command: str, folder: Path, env: dict[str, str]) -> None:
    """One command of README: a talk is ended, a server is asked and interrupted."""
    if " serve " in command:
        _serve(typed, folder, env)
        return
    done = subprocess.run(
        ["bash", "-euc", typed], cwd=folder, env=env, input="/quit\n", capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    if " inspect " in command:
        assert re.search(r"^speed: .*^quality: +lossless", done.stdout, re.MULTILINE | re.DOTALL)


def _serve(typed: str, folder: Path, env: dict[str, str]) -> None:
    address = re.search(r"http://([\d.]+):(\d+)/v1", typed)
    assert address
    with socket.socket() as probe:
        taken = probe.connect_ex((address[1], int(address[2]))) == 0
    assert not taken, f"something else answers at {address[0]}, which README's server needs"
    with (folder / "serve.log").open("w+") as log:
        server = subprocess.Popen(["bash", "-euc", typed], cwd=folder, env=env, stdout=log, stderr=log)
        try:
            assert _asked(f"{address[0]}/models", server)["data"][0]["id"] == "sparse"
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0, log.seek(0) or log.read()
        finally:
            server.kill()
            server.wait()


def _asked(address: str, server: subprocess.Popen[bytes], seconds: float = 300) -> dict:
    until = time.monotonic() + seconds
    while server.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(address) as answer:
            return json.load(answer)
        time.sleep(0.5)
    raise AssertionError("the server did not answer")


# --- the other pages


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_page_runs_as_pasted(page: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout / ".cache"))
    # Measuring a machine takes minutes, and wants a quiet one: a phone's published figures instead.
    profile = dataclasses.replace(find_hardware("sm8650-ufs4.0"), source="measured")
    cached_path().parent.mkdir(parents=True)
    profile.save(cached_path())
    for block, printed in pasted.run(page, checkout, seconds=1200):
        assert block.shown is None or block.shown == printed


def commands_shown() -> list[tuple[str, list[str]]]:
    """Each of ours that a page shows, as ``(page, words)``."""
    found = []
    for page in (README, *DOCS):
        for line in commands(page):
            words = shlex.split(line)
            for part in " ".join(shlex.quote(word) if word != "&&" else "\n" for word in words).splitlines():
                found.append((page.name, shlex.split(part)))
    return found


def test_commands_that_pages_show_exist() -> None:
    ours = {"torch-pi2": cli.build_parser, "benchmarks": bench.build_parser}
    seen = []
    for page, words in commands_shown():
        name, rest = (words[2], words[3:]) if words[:2] == ["python", "-m"] else (words[0], words[1:])
        if name in ours:
            said = io.StringIO()
            try:
                with contextlib.redirect_stderr(said):
                    ours[name]().parse_args(rest)
            except SystemExit:
                pytest.fail(f"{page}: {shlex.join(words)}: {said.getvalue()}")
            seen.append(name)
    assert {*seen} == {*ours}


def test_make_has_what_pages_show() -> None:
    made = {words[1] for _, words in commands_shown() if words[0] == "make"}
    there = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert made
    assert made <= there


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub names them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


PAGES_MADE = README.parent / "docs" / "hooks" / "pages.py"


@pytest.mark.parametrize("page", [README, *DOCS], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", page.read_text())):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if target.parent.name == "reference" and target.name in PAGES_MADE.read_text():
            continue  # of the site alone
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


# --- plots


def data(path: Path) -> dict:
    """What a plot says that it shows."""
    description = ET.parse(path).find(".//{http://purl.org/dc/elements/1.1/}description")
    assert description is not None
    assert description.text
    return json.loads(description.text)


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_plots_are_of_the_committed_results(name: str) -> None:
    drawn = drawings.DRAWINGS[name](tables.read(drawings.RESULTS)).data()
    assert data(ROOT / "docs" / "images" / f"{name}.svg") == json.loads(json.dumps(drawn)), "run `make figures`"


def test_tables_of_methods_are_of_the_committed_results() -> None:
    shown = (ROOT / "docs" / "METHODS.md").read_text()
    found = [json.loads(path.read_text()) for path in sorted(drawings.RESULTS.glob("methods-*.json"))]
    assert found
    for result in found:
        assert methods.markdown(result) in shown
        assert result["command"] in shown


def test_a_missing_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"the results that memory.svg is drawn of.*docs/RESULTS.md") as error:
        drawings.draw(tmp_path, tmp_path)
    assert "decode-mistral-7b-int4-int8" in str(error.value)
