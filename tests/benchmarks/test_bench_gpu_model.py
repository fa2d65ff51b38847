"""``bench gpu-model``: its calls on the CPU, with a thread in a GPU's place."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from shared import small_store
from thread_link import ThreadLink

from benchmarks import gpu_model
from torch_pi2.errors import DeviceError
from torch_pi2.rewrite import gpu

SHORT = {"prompt": 3, "tokens": 4, "rounds": 2, "device": "cpu"}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_store(tmp_path_factory) / "plain"


def test_a_whole_model_beside_the_dense_one(folder: Path) -> None:
    result = gpu_model.run(folder, **SHORT)
    assert list(result["ways"]) == ["sparse", "steps", "dense"]
    assert result["ways"]["sparse"]["ours_over"] == 1
    assert result["ways"]["sparse"]["same"] == 4
    assert json.loads(json.dumps(result)) == result
    assert "on cpu, prompt 3, answer 4" in gpu_model.render(result)


def test_a_divided_model_beside_offloading_and_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu, "CudaLink", lambda _: ThreadLink())
    monkeypatch.setattr(gpu_model, "_offloaded", lambda model, _: model)
    result = gpu_model.run(folder, share=0.5, **SHORT)
    has, llama = (importlib.util.find_spec(name) is not None for name in ("accelerate", "llama_cpp"))
    assert list(result["ways"]) == ["divided", *["offloaded"] * has, "cpu", *["llama.cpp"] * llama]
    assert list(result["left_out"]) == [*["offloaded"] * (not has), *["llama.cpp"] * (not llama)]
    if llama:
        assert result["ways"]["llama.cpp"]["same"] is None
        assert result["peers"]["llama.cpp"]["gpu_layers"] == 0
    assert has or "not run: offloaded, package accelerate is not installed" in gpu_model.render(result)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_needed_for_its_figures() -> None:
    with pytest.raises(DeviceError, match="expected a GPU, and a torch that was built for it"):
        gpu_model.run()
