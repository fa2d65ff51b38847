"""Files are replaced, devices, pipes and links written to, and what cannot be written is an error."""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import torch_pi2
from torch_pi2.base.files import atomic_write, is_standard_output, replacing_folder
from torch_pi2.cli import main
from torch_pi2.cli.output import OutputError, emit
from torch_pi2.errors import ArtifactError
from torch_pi2.observe.trace import check_path

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def terminal() -> Iterator[Path]:
    """A device that takes what is written to it, and that nothing can be beside."""
    ours, theirs = os.openpty()
    yield Path(os.ttyname(theirs))
    os.close(ours)
    os.close(theirs)


def test_a_device_is_written_to(terminal: Path) -> None:
    check_path(terminal)
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


@pytest.mark.parametrize("errors", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize("verb", ["", "inspect /nowhere"])
def test_errors_that_nobody_gets_go_nowhere_else(verb: str, errors: str) -> None:
    line = f"exec {sys.executable} -m torch_pi2 {verb} {errors}"
    done = subprocess.run(line, shell=True, stdout=subprocess.PIPE, text=True, cwd=REPO)
    assert (done.returncode, done.stdout) == (2, "")


#: Runs command lines in children with a standard output that takes nothing; exit code and errors of each.
_COMMANDS = """
import json, os, sys
from torch_pi2.cli import main
told = []
for argv in json.loads(sys.argv[1]):
    for output in ("full", "pipe", "closed"):
        errors, say = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(say, 2)
            if output == "full":
                os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
            elif output == "pipe":
                read, write = os.pipe()
                os.close(read)
                os.dup2(write, 1)
            else:
                os.close(1)
            try:
                code = main(argv)
                sys.stdout.flush()
            except SystemExit as end:
                code = 0 if end.code is None else end.code
            except BaseException as error:
                os.write(2, f"Traceback {error!r}".encode())
                code = 99
            os._exit(code)
        os.close(say)
        _, status = os.waitpid(child, 0)
        told.append((argv[0], output, os.waitstatus_to_exitcode(status), os.read(errors, 10000).decode()))
        os.close(errors)
print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_result_that_nobody_gets_is_no_success(tmp_path: Path) -> None:
    import json

    commands = [
        ["--help"],
        ["pack", "--help"],
        ["inspect", str(tmp_path)],
        ["inspect", str(tmp_path), "--json"],
        ["doctor"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", _COMMANDS, json.dumps(commands)], capture_output=True, text=True, check=True, cwd=REPO
    )
    for verb, output, code, errors in json.loads(done.stdout):
        assert code != 0, (verb, output)
        assert "Traceback" not in errors, (verb, output)
        if output == "full" and verb in ("doctor", "--help", "pack"):
            assert code == 2
            assert "standard output: expected a file or terminal that takes the result, found No space left" in errors
        if output == "pipe" and verb in ("doctor", "--help", "pack"):
            assert (code, errors) == (141, "")


@pytest.mark.parametrize("moment", ["torch_pi2.cli.common", "torch", "torch._C", "torch_pi2.api"])
def test_interrupted_while_it_starts(moment: str) -> None:
    """Ctrl-C at the import of a module, of the command as it is installed, once its first 20 ms are over."""
    module, _, function = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"][
        "torch-pi2"
    ].partition(":")
    code = f"""
import os, signal, sys
def hook(event, arguments, sent=[]):
    if event == "import" and arguments[0] == {moment!r} and not sent:
        sent.append(True)
        os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup ignores it
sys.addaudithook(hook)
from {module} import {function}
sys.argv = ["torch-pi2", "doctor"]
sys.exit({function}())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.startswith("torch-pi2: interrupted")
    assert "Traceback" not in done.stderr


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


def test_ended_by_a_signal_while_it_writes(tmp_path: Path) -> None:
    out, store = tmp_path / "out", tmp_path / "store"
    how = ("synthetic", out, "--shape", "tiny", "--layers", "1")
    assert _signalled(".partial/", signal.SIGTERM, *how) == (143, "torch-pi2: ended by SIGTERM\n")
    assert _signalled(".partial/", signal.SIGINT, *how) == (
        130,
        "torch-pi2: interrupted; nothing was left half-written\n",
    )
    assert os.listdir(tmp_path) == []
    torch_pi2.synthetic(out, "tiny", layers=1)
    left = f"the same command goes on with what is in {tmp_path / '.store.partial'}"  # pack goes on where it was
    assert _signalled(".store.partial/", signal.SIGINT, "pack", out, store) == (
        130,
        f"torch-pi2: interrupted; {left}\n",
    )
    assert sorted(os.listdir(tmp_path)) == [".store.partial", "out"]


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (SystemExit, 143)])
def test_an_interrupt_that_python_drops_comes_again(
    error: type[BaseException], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dropping:
        def __del__(self) -> None:
            raise error

    class Verb:
        @staticmethod
        def run(_args: argparse.Namespace) -> dict[str, object]:
            Dropping()
            time.sleep(60)
            return {}

    def parser() -> argparse.ArgumentParser:
        made = argparse.ArgumentParser()
        made.set_defaults(module=Verb, verbose=False, quiet=True, json=True, verb="completion")
        return made

    with pytest.raises(SystemExit) as ended:
        sys.exit(main([], parser))
    assert ended.value.code == code
    assert "Traceback" not in capsys.readouterr().err


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    """Where transformers cannot keep its copy of a model's code: it is not the model's folder that is wrong."""
    model = REPO / "examples" / "models" / "drelu-stdlib-5m"
    command = [sys.executable, "-m", "torch_pi2", "generate", str(model), "--prompt", "a", "--trust-remote-code"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"HF_HOME": "/proc/nope"}
    )
    assert done.returncode == 2
    assert "found [Errno 2] No such file or directory: '/proc/nope" in done.stderr
    assert "transformers keeps copies there: let HF_HOME name a folder that can be written." in done.stderr
