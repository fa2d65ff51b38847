"""Files are replaced, devices, pipes and links written to, and what cannot be written is an error."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_pi2.base.files import atomic_write, check_writable, is_standard_output, replacing_folder
from torch_pi2.cli import main
from torch_pi2.cli.terminal import OutputError, emit
from torch_pi2.errors import ArtifactError

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def terminal() -> Iterator[Path]:
    """A device that takes what is written to it, and that nothing can be beside."""
    ours, theirs = os.openpty()
    yield Path(os.ttyname(theirs))
    os.close(ours)
    os.close(theirs)


def test_a_device_is_written_to(terminal: Path) -> None:
    check_writable(terminal)
    atomic_write(terminal, "text\n")
    assert terminal.is_char_device()


def test_a_full_device_is_an_error() -> None:
    before = os.stat("/dev/full")
    with pytest.raises(ArtifactError, match=r"writing /dev/full: expected a device or pipe .* No space left on device"):
        atomic_write("/dev/full", "text")
    assert os.path.samestat(before, os.stat("/dev/full"))


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()), daemon=True)
    reader.start()
    atomic_write(path, [b"a", b"b"])
    reader.join(30)
    assert (read, path.is_fifo(), os.listdir(tmp_path)) == (["ab"], True, ["pipe"])


@pytest.mark.parametrize("there", [True, False])
def test_what_a_link_leads_to_is_written(tmp_path: Path, there: bool) -> None:
    (tmp_path / "in").mkdir()
    target, link = tmp_path / "in" / "target", tmp_path / "link"
    if there:
        target.write_text("old")
    link.symlink_to(Path("in") / "target")
    atomic_write(link, "new")
    assert (link.is_symlink(), target.read_text(), os.listdir(tmp_path / "in")) == (True, "new", ["target"])


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, lambda path: path.symlink_to("/dev/null")])
def test_a_folder_takes_the_place_of_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "out"
    make(path)
    before = os.stat(path)
    with (
        pytest.raises(ArtifactError, match=r"writing .*: expected a folder .*, found Not a directory"),
        replacing_folder(path),
    ):
        pass
    assert os.path.samestat(before, os.stat(path))
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1"])
def test_standard_output_by_name(tmp_path: Path, name: str) -> None:
    def written(to: int) -> None:
        sys.stdout.flush()
        ours = os.dup(1)
        os.dup2(to, 1)
        try:
            atomic_write(name, "text")
        finally:
            os.dup2(ours, 1)
            os.close(ours)

    read, write = os.pipe()
    written(write)
    assert os.read(read, 100) == b"text"
    for file in (read, write):
        os.close(file)
    with (tmp_path / "file").open("w") as made:
        inode = os.fstat(made.fileno()).st_ino
        for _ in range(2):
            written(made.fileno())
    assert ((tmp_path / "file").read_text(), (tmp_path / "file").stat().st_ino) == ("texttext", inode)
    assert is_standard_output(name)
    assert not is_standard_output(tmp_path / "file")


def test_text_that_standard_output_cannot_encode() -> None:
    with pytest.raises(OutputError, match=r"standard output: .* found ascii without '\\xe9'. Set PYTHONIOENCODING"):
        emit(io.TextIOWrapper(io.BytesIO(), "ascii"), "caf\xe9")


@pytest.mark.parametrize(("output", "code"), [("full", 2), ("pipe", 141), ("closed", 2)])
def test_a_result_that_cannot_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str, code: int
) -> None:
    if output == "pipe":
        read, write = os.pipe()
        os.close(read)
        file = os.fdopen(write, "w")
    else:
        file = open("/dev/full", "w")  # noqa: SIM115 (it cannot be flushed, and so not closed in order)
    monkeypatch.setattr(sys, "stdout", None if output == "closed" else file)
    monkeypatch.setattr("torch_pi2.cli.doctor.run", lambda _: {"ok": True})
    assert main(["doctor", "--json"]) == code
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        file.close()
    err = capsys.readouterr().err
    assert ("standard output: expected a file or terminal that takes the result" in err) == (code == 2)


#: A command that gets a signal when it makes a file at a path with the word.
_SIGNALLED = """
import os, signal, sys
word, number, *sys.argv[1:] = sys.argv[1:]
def hook(event, arguments, sent=[]):
    if event == "open" and word in str(arguments[0]) and not sent:
        sent.append(True)
        os.kill(os.getpid(), int(number))
signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup ignores it
sys.addaudithook(hook)
from torch_pi2.cli import main
sys.exit(main())
"""


def _signalled(word: str, number: int, *argv: object) -> tuple[int, str]:
    command = [sys.executable, "-c", _SIGNALLED, word, str(int(number)), *map(str, argv), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.slow
def test_ended_by_a_signal_while_it_writes(tmp_path: Path) -> None:
    how = ("synthetic", tmp_path / "out", "--shape", "tiny", "--layers", "1")
    assert _signalled(".partial/", signal.SIGTERM, *how) == (143, "")
    assert _signalled(".partial/", signal.SIGINT, *how) == (
        130,
        "torch-pi2: interrupted; nothing was left half-written\n",
    )
    assert os.listdir(tmp_path) == []
