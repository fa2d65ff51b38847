"""The first hour is lived in this checkout, and its record shows what a newcomer is to see."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from browsing import NEEDS_BROWSER

pytestmark = [pytest.mark.slow, pytest.mark.long, *NEEDS_BROWSER]

SCRIPT = Path(__file__).with_name("first_hour.py")


def test_the_first_hour_here(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asked = [sys.executable, str(SCRIPT), "--here", "--port", str(port), "--out", str(tmp_path)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    steps = {step["command"]: step for step in json.loads((tmp_path / "steps.json").read_text())}
    assert not [step for step in steps.values() if step["failed"]]

    def said(part: str) -> str:
        (step,) = (step for command, step in steps.items() if part in command)
        return str(step["output"])

    demo = said(" demo")
    assert re.search(r"^speed: +[\d.]+ tokens/s, dense [\d.]+: ", demo, re.MULTILINE)
    assert re.search(r"^quality: +lossy .*loss [+-]\d", demo, re.MULTILINE)
    assert demo.splitlines()[-1] == ("In a browser: torch-pi2 serve demo-out/model    and open http://127.0.0.1:8000/")
    assert re.search(r"^quality: +lossless", said("inspect sparse"), re.MULTILINE)
    assert "FFN rows used" in said("chat sparse")
    assert f"http://127.0.0.1:{port}/" in said("serve sparse")
    assert "['sparse']" in said("OpenAI(")
    pictures = [name for step in steps.values() for name in step["pictures"]]
    assert pictures == ["readme.png", "chat.png", "report.png", "page.png", "page-dark.png"]
    page = (tmp_path / "index.html").read_text()
    assert page.count("data:image/png;base64,") == len(pictures)
    assert str(SCRIPT.parents[2]) not in page
