"""Memory for weights: aligned, private, given back with the tensor."""

from __future__ import annotations

import copy
import gc
import pickle
import resource
from pathlib import Path

import pytest
import torch

from torch_pi2.base.memory import HUGE_PAGE_BYTES, new_tensor


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0,), (3, 5), (1025, 1024, 3)], ids=str)
def test_tensors_are_what_torch_would_have_made(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = new_tensor(shape, dtype)
    assert (found.shape, found.dtype, found.storage_offset()) == (shape, dtype, 0)
    assert found.is_contiguous()
    if found.nbytes >= HUGE_PAGE_BYTES:
        assert found.data_ptr() % HUGE_PAGE_BYTES == 0
    found.fill_(7)
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found)), found.clone()):
        found.fill_(7)
        assert torch.equal(other, found)
        found.zero_()
        assert bool((other == 7).all())
    assert found.untyped_storage().nbytes() == found.nbytes


def test_memory_goes_back_with_the_tensor() -> None:
    size = 256 << 20
    before = rss_bytes()
    tensor = new_tensor((size,), torch.uint8).fill_(1)
    view = tensor[-5:]
    assert rss_bytes() - before > 0.9 * size
    del tensor
    assert view.tolist() == [1] * 5  # what is left of it keeps it
    del view
    gc.collect()
    assert rss_bytes() - before < 0.1 * size


def test_too_much_is_said_with_its_shape() -> None:
    with pytest.raises(MemoryError, match=r"140737488355328 bytes for a tensor of \[70368744177664\]: Cannot allocate"):
        new_tensor((1 << 46,), torch.bfloat16)


def test_no_memory_for_a_small_tensor_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(MemoryError, match=r"24 bytes for a tensor of \[2, 3\]: Cannot allocate memory"):
        new_tensor((2, 3), torch.float32)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="no huge pages here")
def test_the_system_gives_huge_pages_where_it_has_them() -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("the system gives none")
    tensor = new_tensor((64 << 20,), torch.uint8).fill_(1)
    smaps = Path("/proc/self/smaps").read_text()
    start = next(line for line in smaps.splitlines() if line.startswith(f"{tensor.data_ptr():x}-"))
    part = smaps[smaps.index(start) :]
    huge_kib = next(int(line.split()[1]) for line in part.splitlines() if line.startswith("AnonHugePages"))
    assert huge_kib << 10 >= tensor.nbytes // 2  # memory may be in pieces
