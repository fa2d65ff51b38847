"""``--skipped-to FILE``: the ids of tests that were skipped, a line each, as arguments for pytest (``@FILE``).

Where there is no ``openssl`` command, torch's own compiler, beside which some tests put ours, is told to do without it;
ours does so itself (tests/project/test_ci.py). Where there is no GPU, Triton's kernels run in its interpreter, which it
decides as it is imported.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

NO_HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
if shutil.which("openssl") is None:
    os.environ.setdefault(NO_HEADERS, "0")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_skipped: list[str] = []


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch's own products differ by their threads in last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skipped-to", metavar="FILE", type=Path, help="write the ids of skipped tests, a line each")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # or Triton's bindings name all that is left at the end
    to = session.config.getoption("--skipped-to")
    if to is not None and not hasattr(session.config, "workerinput"):  # of xdist: one process tells of all
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text("".join(f"{name}\n" for name in sorted(_skipped)))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was imported stays: looking through it for garbage, again and again, would be a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_remembered_for_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Code that tests trust is not trusted after them."""
    from torch_pi2.store import trust

    path = tmp_path_factory.mktemp("cache") / "trusted-code.txt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trust, "record_path", lambda: path)
        yield


@pytest.fixture(scope="session", autouse=True)
def graphs_are_captured_once() -> Iterator[None]:
    from captures import remembering

    from torch_pi2.graph import find

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "capture", remembering(find.capture))
        yield
