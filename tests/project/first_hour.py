"""The first hour of somebody new: what README and docs show, typed by a clean user in a clean clone, and recorded.

``make first-hour`` clones the last commit of this checkout and makes everything from nothing, as the pages say; it
needs chromium. ``--here`` takes this checkout with its environment instead, and leaves ``docs/USING.md`` out. The
record, commands with their seconds, last lines and pictures, is ``index.html`` in the folder, which is written when a
command fails, too.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import markdown
import pexpect
from playwright.sync_api import Browser, Error, Page, expect
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
from browsing import Tab, browser  # noqa: E402
from pasted import blocks  # noqa: E402

#: Of the environment: where packages come from and the language. All else a clean user does not have.
KEPT = re.compile(r"(PIP|SSL_CERT|REQUESTS)_\w+|\w+_proxy|LANG|LC_\w+", re.IGNORECASE)
#: Of the demo in this checkout, where its figures are not looked at.
SMALL = "--tokens 4000 --heldout-tokens 4096 --rounds 2"
SECONDS, LINES = 1800, 24
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c28 }
pre { background: #f4f4f8; padding: .8rem; overflow-x: auto; font-size: 13px }
img { max-width: 100%; border: 1px solid #ddd } .failed { color: #b00020 }
table { border-collapse: collapse } td, th { border: 1px solid #ddd; padding: .2rem .6rem }
code { background: #f4f4f8 } pre code { background: none } h2 small { font-weight: normal; color: #666 }"""


@dataclass
class Step:
    """``page``: where it is shown; ``output``: of what is printed the last lines; ``failed``: why, if it did."""

    page: str
    command: str
    seconds: float = 0.0
    output: str = ""
    failed: str = ""
    pictures: list[Path] = field(default_factory=list)


class Failed(Exception):
    """A command did not do what its page says."""


class Hour:
    """What is typed in ``checkout``, by whom ``home`` belongs to."""

    def __init__(self, folder: Path, home: Path, chromium: Browser) -> None:
        self.folder, self.home, self.checkout, self.chromium = folder, home, home / "torch_pi2", chromium
        self.steps: list[Step] = []
        python = Path(getattr(sys, "_base_executable", sys.executable)).parent
        (home / "tmp").mkdir()
        settings = Path("~/.config/pip/pip.conf").expanduser()
        self.env = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
        self.env |= {"PIP_CONFIG_FILE": str(settings)} if settings.exists() else {}
        self.env |= {"HOME": str(home), "TMPDIR": str(home / "tmp"), "USER": "newcomer", "TERM": "xterm-256color"}
        self.env["PATH"] = f"{python}{os.pathsep}{os.defpath}"

    @contextmanager
    def step(self, page: str, command: str) -> Iterator[Step]:
        """One that is recorded with what became of it."""
        self.steps.append(done := Step(page, command))
        print(f"{page}: {command.splitlines()[0]} ...", flush=True)
        begun = time.perf_counter()
        try:
            yield done
        except (Failed, AssertionError, pexpect.ExceptionPexpect, subprocess.TimeoutExpired, OSError, Error) as error:
            done.failed = str(error)
            raise Failed(f"{page}: {command}: {error}\n{done.output}") from error
        finally:
            done.seconds = done.seconds or time.perf_counter() - begun
            print(f"  {done.seconds:.1f} s", flush=True)

    def typed(self, command: str) -> list[str]:
        entered = "source .venv/bin/activate; " if (self.checkout / ".venv" / "bin" / "torch-pi2").exists() else ""
        return ["bash", "-euc", entered + command]

    def run(self, page: str, command: str, given: list[str] | None = None) -> Step:
        """A command; ``given``: what is called, where that is not the command itself."""
        with self.step(page, command) as done:
            where = self.checkout if self.checkout.exists() else self.home
            said = subprocess.run(
                given or self.typed(command),
                cwd=where,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SECONDS,
            )
            done.output = self.tail(said.stdout)
            if said.returncode != 0:
                raise Failed(f"exit code {said.returncode}")
        return done

    def tail(self, text: str) -> str:
        """The last lines, without the folders of this machine."""
        text = text.replace(str(self.checkout), "torch_pi2").replace(str(self.home), "~").replace(str(ROOT), "~/from")
        return "\n".join(text.rstrip().splitlines()[-LINES:])

    def picture(self, done: Step, name: str, url: str, act: Callable[[Page], Any] | None = None, **how: Any) -> None:
        path = self.folder / f"{name}.png"
        with Tab(self.chromium, **{"viewport": {"width": 1100, "height": 800}} | how) as tab:
            tab.page.goto(url)
            if act is not None:
                act(tab.page)
            tab.page.screenshot(path=path, full_page=True)
            errors = [said for said in tab.complaints if not said.startswith("log:")]
            if errors:
                raise Failed(f"the page says: {errors}")
        done.pictures.append(path)

    def chat(self, page: str, command: str) -> None:
        """In a terminal: a beginning that the model continues, what that took, and an end."""
        screen = io.StringIO()
        with self.step(page, command) as done:
            program, *arguments = self.typed(f"exec {command}")
            about: dict[str, Any] = {"cwd": str(self.checkout), "env": self.env, "encoding": "utf-8"}
            talk = pexpect.spawn(program, arguments, timeout=300, dimensions=(50, 100), **about)
            talk.logfile_read = screen
            for said in ("def main(", "/stats", "/exit"):
                talk.expect(r"(^|\n)(\x1b\[\?2004h)?> ")
                talk.sendline(said)
            talk.expect(pexpect.EOF)
            talk.close()
            seen = Text.from_ansi(screen.getvalue().replace("\r\n", "\n"))
            done.output = self.tail(seen.plain)
            if talk.exitstatus != 0:
                raise Failed(f"exit code {talk.exitstatus}")
            shown = Console(record=True, width=100, file=io.StringIO())
            shown.print(f"$ {command}", seen, sep="\n", markup=False, highlight=False)
            drawing = self.home / "chat.html"  # of a drawing alone browsers make no picture
            svg = shown.export_svg(title="torch-pi2 chat")
            drawing.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))  # they are elsewhere
            self.picture(done, "chat", drawing.as_uri())

    def serve(self, page: str, command: str, address: str, client: str) -> None:
        """A server, its page while it answers and afterwards, and a request of OpenAI's client."""
        log = (self.home / "serve.log").open("w+")
        with self.step(page, command) as done:
            begun = time.perf_counter()
            server = subprocess.Popen(
                self.typed(f"exec {command}"), cwd=self.checkout, env=self.env, stdout=log, stderr=log
            )
            try:
                _wait(f"{address}/health", server)
                done.seconds = time.perf_counter() - begun
                self.picture(done, "page", address, lambda tab: _ask(tab, done=False))
                self.picture(done, "page-dark", address, lambda tab: _ask(tab, done=True), color_scheme="dark")
                self.run("docs/tutorials/server.md", client, [*self.typed('exec python -c "$0"'), client])
                server.send_signal(signal.SIGINT)
                if server.wait(60) != 0:
                    raise Failed(f"exit code {server.returncode}")
            finally:
                server.kill()
                server.wait()
                log.seek(0)
                done.output = self.tail(log.read())


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 300
    while server.poll() is None and time.monotonic() < until:
        try:
            return urllib.request.urlopen(url).close()
        except OSError:
            time.sleep(0.2)
    raise Failed("the server does not answer")


def _ask(tab: Page, done: bool) -> None:
    """Until some of the answer is there; ``done``: all of it."""
    tab.locator("#ask").fill("def main(")
    tab.locator("#ask").press("Enter")
    # Before the text: where much else is going on, all of that may have come at once.
    expect(tab.locator("#status")).to_contain_text("Decoding one sequence", timeout=120_000)
    expect(tab.locator(".assistant")).to_have_text(re.compile(".{200}", re.DOTALL), timeout=60_000)
    if done:
        expect(tab.locator("#status")).to_contain_text("Idle.", timeout=120_000)


def shown(page: str, beginning: str, language: str = "console") -> str:
    """The command that ``page`` shows which begins so, without its comment; of Python the block that has it."""
    found = [block.code for block in blocks(ROOT / page) if block.language == language]
    if language != "console":
        return next(code for code in found if beginning in code)
    lines = (shlex.join(shlex.split(line, comments=True)) for code in found for line in code.splitlines())
    return next(line for line in lines if line.startswith(beginning))


def rendered(page: Path, out: Path) -> Path:
    body = markdown.markdown(page.read_text(), extensions=["tables", "fenced_code"])
    out.write_text(f'<meta charset="utf-8"><base href="{page.parent.as_uri()}/"><style>{STYLE}</style>{body}')
    return out


def prepare(hour: Hour, here: bool) -> str:
    """The checkout, and how ``make`` is called in it."""
    if not here:
        hour.run("", f"git clone --quiet {shlex.quote(str(ROOT))} torch_pi2")
        return "make"
    hour.checkout.mkdir()
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "build", "work", "demo-out"):
            (hour.checkout / path.name).symlink_to(path)
    (hour.checkout / ".venv").symlink_to(sys.prefix)
    return f"make -o .venv/.installed DEMO='{SMALL}'"


def live(hour: Hour, here: bool, port: int) -> None:
    """The hour, in the order of the pages."""
    make = prepare(hour, here)
    readme = "README.md"
    page = rendered(hour.checkout / readme, hour.home / "readme.html").as_uri()
    with hour.step(readme, "what it looks like") as done:
        hour.picture(done, "readme", page)
    if not here:
        hour.run("docs/INSTALL.md", "make install")
    hour.run(readme, f"{make} {shown(readme, 'make demo').removeprefix('make ')}")
    code = shown(readme, "import", "python")
    hour.run(readme, code, [*hour.typed('exec python -c "$0"'), code])
    for verb in ("optimize", "inspect"):
        hour.run(readme, shown(readme, f"torch-pi2 {verb}"))
    hour.chat(readme, shown(readme, "torch-pi2 chat"))
    hour.run("docs/CLI.md", shown("docs/CLI.md", "torch-pi2 generate"))
    tutorial = "docs/tutorials/real_model.md"
    done = hour.run(tutorial, shown(tutorial, "torch-pi2 report"))
    hour.picture(done, "report", (hour.checkout / "report.html").as_uri())
    client = shown("docs/tutorials/server.md", "OpenAI(", "python").replace("8719", str(port))
    asked = "" if port == 8000 else f" --port {port}"
    hour.serve(readme, shown(readme, "torch-pi2 serve") + asked, f"http://127.0.0.1:{port}", client)
    if not here:
        hour.run("docs/USING.md", "torch-pi2 doctor --measure")
        code = "every block, from top to bottom"
        hour.run("docs/USING.md", code, hour.typed("python tests/helpers/pasted.py docs/USING.md"))


def written(hour: Hour) -> str:
    """The record as a page that needs nothing beside it."""
    total = sum(step.seconds for step in hour.steps)
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>The first hour</title><style>{STYLE}</style>'
    ]
    parts += [f"<h1>The first hour</h1><p>{len(hour.steps)} steps, {total / 60:.1f} minutes of waiting.</p>"]
    for step in hour.steps:
        parts += [f"<h2>{html.escape(step.page) or 'before'} <small>{step.seconds:.1f} s</small></h2>"]
        parts += [f"<pre>$ {html.escape(step.command.rstrip())}</pre>"]
        parts += [f'<p class="failed">{html.escape(step.failed)}</p>'] * bool(step.failed)
        parts += [f"<pre>{html.escape(step.output)}</pre>"] * bool(step.output)
        for path in step.pictures:
            data = base64.b64encode(path.read_bytes()).decode()
            parts += [f'<p><img alt="{path.stem}" src="data:image/png;base64,{data}">']
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "first-hour", help="folder of the record")
    parser.add_argument("--here", action="store_true", help="this checkout and environment, and no docs/USING.md")
    parser.add_argument("--port", type=int, default=8000, help="of the server (default: the one that README names)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home, browser() as chromium:
        hour = Hour(args.out.resolve(), Path(home), chromium)
        try:
            live(hour, args.here, args.port)
        except Failed as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
        finally:
            (args.out / "index.html").write_text(written(hour))
            kept = [{**vars(step), "pictures": [path.name for path in step.pictures]} for step in hour.steps]
            (args.out / "steps.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{args.out / 'index.html'}: {len(hour.steps)} steps, {sum(step.seconds for step in hour.steps):.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
