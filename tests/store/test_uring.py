"""io_uring where the kernel has it, and a kernel that refuses it (its C++ tests: csrc/tests/test_uring.cc)."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest
import torch
from sandbox import run_without_uring
from torch import nn

import torch_pi2
from torch_pi2.base.library import library_path
from torch_pi2.errors import ConfigError
from torch_pi2.layers.offloaded import OffloadedFFN, Store
from torch_pi2.types.offload import OffloadConfig

IDS = torch.arange(1, 13).reshape(1, 12)

SCRIPT = """
import torch, torch_pi2
from torch_pi2.errors import ConfigError
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.layers.offloaded import Store
path = sys.argv[1]
print(Store(path, 1 << 20, OffloadConfig(engine="auto", direct=False)).describe())
try:
    Store(path, 1 << 20, OffloadConfig(engine="io_uring"))
except ConfigError as error:
    print(error)
print(torch.ops.pi2.read_rates(path, "io_uring", False, 4096, 4, 4096, False, 0.01).tolist())
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("uring")
    torch_pi2.synthetic(base / "plain", "tiny", active=0.2, weights="int4", layers=1, rank=16)
    torch_pi2.pack(base / "plain", base / "store")
    return base / "store"


def over(folder: Path, engine: str) -> nn.Module:
    with pytest.raises(ConfigError, match="expected at least") as caught:
        torch_pi2.load(folder, budget=0)
    least = math.ceil(float(caught.value.expected.split()[2]) * 2**20)
    return torch_pi2.load(folder, budget=least, offload=OffloadConfig(engine=engine, preload=False))


def test_the_same_bits_as_pread_where_this_kernel_has_it(store: Path) -> None:
    try:
        model = over(store, "io_uring")
    except ConfigError as error:
        pytest.skip(f"refused here: {error.found}")
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, over(store, "pread")(IDS).logits)
    assert torch_pi2.stats(model)["reads"] > 0
    (opened,) = {m.store for m in model.modules() if isinstance(m, OffloadedFFN)}
    assert opened.describe().startswith("io_uring, ")
    assert Store(opened.path, 1 << 20, OffloadConfig()).describe().startswith("io_uring, ")  # what auto takes


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
def test_refused_by_the_kernel(store: Path, error: int) -> None:
    """``auto`` reads the plain way; who asks for it by name is told the reason; measuring leaves it out."""
    auto, explicit, rates = run_without_uring(SCRIPT, store / "pi2" / "model.pi2", error=error).splitlines()
    assert auto == "pread, page cache"
    assert explicit == (
        "OffloadConfig.engine: expected one that this system allows, "
        f"found io_uring: the kernel refuses io_uring_setup: {os.strerror(error)}. Use auto. "
        "io_uring takes Linux 5.6 and the right to it (containers may forbid it; kernel.io_uring_disabled)."
    )
    assert rates == "[0.0, 0.0, 0.0]"


def test_it_is_in_this_build_and_needs_no_library() -> None:
    """What the build machine had installed does not decide: liburing is nowhere, and on Linux it is always there."""
    core = library_path().parent / "libpi2.so"
    assert b"io_uring_setup" in core.read_bytes()
    assert b"liburing" not in core.read_bytes()
