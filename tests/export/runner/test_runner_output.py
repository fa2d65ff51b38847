"""What the C++ runner writes: whole files or none, links and devices that stay, errors of printing that are said."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import runner_calls
from runner_calls import call, refused, run

IDS = ("--ids", "5,6", "--max-new-tokens", 6)
OPTIONS = ("--logits", "--trace", "--etdump")


def sound(option: str, data: bytes) -> bool:
    if option == "--trace":
        return "traceEvents" in json.loads(data)
    return data[:6] == b"\x93NUMPY" if option == "--logits" else data[8:12] == b"ED00"


@pytest.mark.parametrize("option", OPTIONS)
def test_files_are_replaced_and_links_stay(predicted: Path, tmp_path: Path, option: str) -> None:
    file, link, other = tmp_path / "file", tmp_path / "link", tmp_path / "other"
    link.symlink_to("other")
    other.symlink_to("file")
    for before in (None, b"what was there"):
        if before is not None:
            file.write_bytes(before)
            file.chmod(0o640)
        run(predicted, *IDS, option, link)
        assert link.is_symlink()
        assert other.is_symlink()
        assert sound(option, file.read_bytes())
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert {p.name for p in tmp_path.iterdir()} == {"file", "link", "other"}


@pytest.mark.parametrize("option", OPTIONS)
def test_fifos_and_devices_are_written_to(predicted: Path, tmp_path: Path, option: str) -> None:
    fifo, null = tmp_path / "fifo", tmp_path / "null"
    os.mkfifo(fifo)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(fifo.read_bytes()))
    reader.start()
    run(predicted, *IDS, option, fifo)
    reader.join()
    assert sound(option, found[0])
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    null.symlink_to("/dev/null")
    run(predicted, *IDS, option, null)
    if os.geteuid() == 0:  # only then a device could be replaced
        device = tmp_path / "device"
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 7))  # /dev/full's twin
        for path in ("/dev/full", device):
            assert "expected a file that can be written, found No space left on device. " in refused(
                predicted, *IDS, option, path
            )
        assert stat.S_ISCHR(device.stat().st_mode)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_standard_output_as_a_file(predicted: Path, tmp_path: Path) -> None:
    ids = run(predicted, *IDS, "--logits", tmp_path / "logits")["sequences"][0]["ids"]
    for name in ("-", "/dev/stdout"):
        result = call(predicted, *IDS, "--logits", name)
        assert result.returncode == 0
        end = len((tmp_path / "logits").read_bytes())
        assert result.stdout[:end] == (tmp_path / "logits").read_bytes()
        assert np.load(tmp_path / "logits").shape[0] == 6
    assert call(predicted, *IDS, "--logits", "-").stdout[end:] == b""
    assert f"ids: {' '.join(map(str, ids))}\n" in call(predicted, *IDS, "--logits", "-").stderr.decode()
    for option in ("--trace", "--etdump"):
        assert sound(option, call(predicted, *IDS, option, "-").stdout)
    assert "expected one file on standard output, found several. " in refused(
        predicted, *IDS, "--logits", "-", "--trace", "-"
    )
    # A file that the shell sends it to is not replaced by another one under the same name.
    sent = tmp_path / "sent"
    with sent.open("wb") as out:
        command = [runner_calls.FOLDER / "pi2_runner", predicted, *map(str, IDS), "--logits", "-"]
        subprocess.run(command, stdout=out, stderr=subprocess.DEVNULL, env={}, check=True)
        assert os.fstat(out.fileno()).st_ino == sent.stat().st_ino
    assert sent.read_bytes() == (tmp_path / "logits").read_bytes()


@pytest.mark.parametrize("extra", [(), ("--json",)])
@pytest.mark.parametrize("how", ["full", "nobody reads", "closed"])
def test_errors_of_printing_are_said(predicted: Path, tmp_path: Path, extra: tuple[object, ...], how: str) -> None:
    command = [runner_calls.FOLDER / "pi2_runner", predicted, *map(str, (*IDS, *extra))]
    if how == "closed":
        shell = ["sh", "-c", '"$@" >&-', "sh", *command]
        result = subprocess.run(shell, stderr=subprocess.PIPE, timeout=60, env={})
    elif how == "full":
        with Path("/dev/full").open("wb") as out:
            result = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=60, env={})
    else:
        read, write = os.pipe()
        os.close(read)
        result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60, env={})
        os.close(write)
    assert result.returncode == 2
    why = {"full": "No space left on device", "nobody reads": "Broken pipe", "closed": "Bad file descriptor"}[how]
    message = result.stderr.decode().splitlines()[-1]
    assert message.startswith(f"pi2_runner: standard output: expected a file that can be written, found {why}. ")


@pytest.mark.parametrize("one", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it_and_leaves_no_half_files(predicted: Path, tmp_path: Path, one: signal.Signals) -> None:
    """At any time: while it loads, computes or writes. The shell sees the signal."""
    files = [part for option in OPTIONS for part in (option, str(tmp_path / option[2:]))]
    command = [runner_calls.FOLDER / "pi2_runner", str(predicted), "--ids", "5,6", *files]
    ended = []
    for wait in (0.0, 0.02, 0.04, 0.06, 0.1):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}) as process:
            time.sleep(wait)
            process.send_signal(one)
            _, errors = process.communicate(timeout=60)
        ended.append(process.returncode)
        assert process.returncode in (0, -one), errors
        assert not list(tmp_path.glob(".*"))
    assert -one in ended


def test_a_file_has_one_writer(predicted: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    for other in (tmp_path / "file", tmp_path / "link", tmp_path / "." / "file"):
        message = refused(predicted, *IDS, "--logits", tmp_path / "file", "--trace", other)
        assert message.startswith(
            f"--logits: expected a file of its own, found {tmp_path}/file, which --trace writes. "
        )
    assert [p.name for p in tmp_path.iterdir()] == ["link"]
    assert "expected one file on standard output, found several. " in refused(
        predicted, *IDS, "--logits", "-", "--trace", "/dev/stdout"
    )
    run(predicted, *IDS, "--logits", "/dev/null", "--trace", "/dev/null")


def test_errors_are_one_line(predicted: Path, tmp_path: Path) -> None:
    for options, env, message in (
        (
            ("--trace", tmp_path / "no" / "x"),
            {},
            f"trace {tmp_path}/no/x: expected a file that can be written, found No",
        ),
        ((), {"PI2_CACHE_KIB": "abc"}, "PI2_CACHE_KIB: option cache_bytes_kib of Pi2Backend: expected 0 to "),
    ):
        command = [runner_calls.FOLDER / "pi2_runner", predicted, *map(str, (*IDS, *options))]
        result = subprocess.run(command, capture_output=True, env=env, text=True)
        assert result.returncode == 2
        assert result.stderr.startswith("pi2_runner: ")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
