"""What a budget promises: memory of a process, in a group of the memory controller, at the smallest budget offered."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding import together

import torch_pi2
from benchmarks import cap
from torch_pi2.decode.budget import room_for_compiling
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ConfigError
from torch_pi2.layers.prompt import chunks_of_prompt
from torch_pi2.types.offload import PIECE_TOKENS, Budget, OffloadConfig

#: What the system rounds up to where it charges a group, and tables of pages.
_MARGIN = 4 << 20
_SHAPE = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 3, "vocab_size": 2048}
_SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4}

_RUN = """
import ctypes, gc, json, math, sys
import torch, torch_pi2, transformers
from benchmarks import cap
from torch_pi2.decode.decoder import Decoder

tiny, folder, activations, way, group = sys.argv[1:]
torch.set_num_threads(2)

def use(model, tokens):
    ids = torch.arange(tokens)[None] * 7 % 1000
    if way == "decode":
        decoder = Decoder(model, max_tokens=200, compiled=False)
        token = decoder.prompt(ids[:, :8])
        for _ in range(32):
            token = decoder.step(token)
    elif way == "prompt":
        decoder = Decoder(model, max_tokens=tokens + 24, compiled=False)
        token = decoder.prompt(ids)
        for _ in range(4):
            token = decoder.step(token)
    elif way == "sequences":
        torch_pi2.generate(model, ids[:, :200], num_return_sequences=4, max_new_tokens=8)
    else:
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)

def least(folder):
    try:
        torch_pi2.load(folder, budget=0, activations=activations)
    except torch_pi2.errors.ConfigError as error:
        return math.ceil(float(error.expected.split()[2]) * 2**20)

use(torch_pi2.load(tiny, budget="1GiB", activations=activations), 40)  # libraries are there after this
budget = least(folder)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
cap.reset_peak()
base = cap.peak_rss_bytes()
if group:
    (cap.Path(group) / "memory.limit_in_bytes").write_text(str(budget + int(4 << 20)))
    cap.join(group)
model = torch_pi2.load(folder, budget=budget, activations=activations)
for _ in range(8 if way == "generate" else 1):  # what one call frees must not add to the next one
    use(model, 1000)
print(json.dumps({"budget": budget, "peak": cap.peak_rss_bytes() - base}))
"""


_EXPERTS = _SHAPE | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 128}
_EXPERTS |= {"moe_intermediate_size": 1024}
_SHAPES: dict[str, tuple[Any, str, str | None]] = {
    "tiny": ("tiny", "int4", "lowrank"),
    "int4": (_SHAPE, "int4", "lowrank"),
    "float": (_SHAPE | {"intermediate_size": 4096}, "float32", None),
    "experts": (_EXPERTS, "int4", None),
}


class _Stores(dict[str, Path]):
    """Made when they are asked for."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self._base = base

    def __missing__(self, name: str) -> Path:
        shape, weights, predictor = _SHAPES[name]
        plain, self[name] = self._base / f"{name}-plain", self._base / name
        torch_pi2.synthetic(plain, shape, active=0.1, weights=weights, predictor=predictor)
        torch_pi2.pack(plain, self[name])
        return self[name]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return _Stores(tmp_path_factory.mktemp("budget"))


def _run(stores: dict[str, Path], name: str, activations: str, way: str, group: str) -> dict[str, int]:
    command = [sys.executable, "-c", _RUN, str(stores["tiny"]), str(stores[name]), activations, way, group]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode} (-9: the group's memory was spent)\n{done.stderr[-2000:]}"
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "activations", "way"),
    [
        ("int4", "float", "decode"),
        pytest.param("int4", "int8", "prompt", marks=pytest.mark.slow),
        pytest.param("int4", "float", "prompt", marks=pytest.mark.slow),
        pytest.param("int4", "int8", "generate", marks=pytest.mark.slow),
        pytest.param("int4", "float", "sequences", marks=pytest.mark.slow),
        pytest.param("float", "float", "prompt", marks=pytest.mark.slow),
        pytest.param("experts", "int8", "prompt", marks=pytest.mark.slow),
    ],
)
def test_the_smallest_budget_holds(stores: dict[str, Path], name: str, activations: str, way: str) -> None:
    """Decoding and prompts of 1,000 tokens; where groups can be made the process ends if it takes more."""
    if cap.available():
        with cap.MemoryCap(1 << 40) as group:
            found = _run(stores, name, activations, way, str(group.folder))
    else:
        found = _run(stores, name, activations, way, "")
    assert found["peak"] <= found["budget"] + _MARGIN, found


_TOGETHER = """
import ctypes, gc, torch_pi2
from benchmarks import cap
from torch_pi2.decode.decoder import Decoder

def use(model, tokens):
    decoder = Decoder(model, max_tokens=tokens + 40, compiled=False)
    token = decoder.prompt(torch.arange(tokens)[None] * 7 % 1000)
    for _ in range(32):
        token = decoder.step(token)

tiny, folder = sys.argv[4:]
group = torch_pi2.GroupConfig()
use(torch_pi2.load(tiny, budget="1GiB", group=group), 40)  # libraries are there after this
budget = torch_pi2.stats(torch_pi2.load(folder, group=group))["budget"].smallest
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
cap.reset_peak()
base = cap.peak_rss_bytes()
model = torch_pi2.load(folder, budget=budget, group=group)
use(model, 1000)
print(budget, cap.peak_rss_bytes() - base)
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", ["neurons", "layers"])
def test_each_of_several_processes_keeps_to_its_budget(stores: dict[str, Path], tmp_path: Path, by: str) -> None:
    for name in ("tiny", "int4"):
        torch_pi2.pack(stores[name], tmp_path / name, ranks=2, by=by)
    for said in together(tmp_path / "out", _TOGETHER, 2, tmp_path / "tiny", tmp_path / "int4"):
        budget, peak = map(int, said.split())
        assert budget / 4 < peak <= budget + _MARGIN


def test_every_part_is_in_the_smallest_budget(stores: dict[str, Path]) -> None:
    parts = torch_pi2.stats(torch_pi2.load(stores["tiny"], budget="1GiB"))["budget"]
    beside = {"total", "cache", "neurons", "token", "slot", "context", "piece_tokens"}
    assert parts.smallest == sum(getattr(parts, f.name) for f in fields(Budget) if f.name not in beside)
    with pytest.raises(ConfigError, match=r"expected at least [\d.]+ MiB \(.*activations \d+ MiB.*found 0.0 MiB"):
        torch_pi2.load(stores["tiny"], budget=0)
    short, long = (
        torch_pi2.stats(torch_pi2.load(stores["tiny"], budget="1GiB", context=n))["budget"] for n in (100, 1 << 14)
    )
    assert short.piece_tokens == 100
    assert short.activations < parts.activations
    # of longer contexts only the mask grows
    assert long.piece_tokens == PIECE_TOKENS
    assert long.activations - parts.activations == PIECE_TOKENS * 5 * ((1 << 14) - 1024)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "activations"), [(1000, "int8"), (1500, "float")])
def test_pieces_do_not_depend_on_the_budget(stores: dict[str, Path], activations: str, tokens: int) -> None:
    """Up to 1,024 tokens a prompt over a store is read whole, as before; more as any model would with chunk_tokens."""
    ids = torch.arange(tokens)[None] * 7 % 1000
    least = torch_pi2.stats(torch_pi2.load(stores["tiny"], budget="1GiB"))["budget"].smallest
    found = []
    for budget, chunk in ((least, 0), (1 << 30, 0), (1 << 30, 0 if tokens == 1000 else 1024)):
        model = torch_pi2.load(stores["tiny"], budget=budget, activations=activations)
        decoder = Decoder(model, max_tokens=tokens + 8, compiled=False, logits=True, chunk_tokens=chunk)
        decoder.prompt(ids)
        found.append(decoder.step(torch.tensor([[5]])))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_pieces_go_the_way_of_the_whole_prompt(stores: dict[str, Path]) -> None:
    """A piece shorter than ``dense_from`` of a longer prompt: the bits of the layer on all of it, predictor or not."""
    model = torch_pi2.load(stores["tiny"], budget="1GiB", activations="int8")
    layer = next(m for m in model.modules() if hasattr(m, "store_layer"))
    layer.dense_from = 600
    x = torch.randn(700, layer.site.hidden)
    with torch.no_grad():
        whole = layer(x)
        alone = torch.cat([layer(part) for part in x.split(350)])
        with chunks_of_prompt(700):
            pieces = torch.cat([layer(part) for part in x.split(350)])
    assert torch.equal(pieces, whole)
    assert not torch.equal(alone, whole)  # predicted: lossy


def test_more_tokens_than_a_budget_has_room_for_are_a_warning(
    stores: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = torch_pi2.load(stores["tiny"], budget="1GiB", context=64)
    with torch.no_grad():
        model(torch.arange(64)[None])
        assert "takes more memory" not in caplog.text
        for _ in range(2):
            model(torch.arange(100)[None])
    assert caplog.text.count("a call for 100 tokens takes more memory than its budget") == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lfu", "static"])
def test_the_cache_makes_room_for_compiling(
    stores: dict[str, Path], policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.arange(9)[None]
    parts = torch_pi2.stats(torch_pi2.load(stores["int4"], budget="1GiB"))["budget"]
    model = torch_pi2.load(stores["int4"], budget=parts.whole + (24 << 20), offload=OffloadConfig(policy=policy))
    before = torch_pi2.stats(model)
    with torch.no_grad():
        wanted = model(ids).logits
        with room_for_compiling(model):
            within = torch_pi2.stats(model)
            assert torch.equal(model(ids).logits, wanted)
        after = torch_pi2.stats(model)
        assert torch.equal(model(ids).logits, wanted)
    needed = (32 << 20) + 3 * (8 << 20)
    given = before["cache_bytes"] - within["cache_bytes"]
    assert abs(given - (needed - (24 << 20))) < 100_000  # but for whole slots, and what a policy remembers
    assert after["cache_bytes"] == before["cache_bytes"]
    assert after["resident"] == before["resident"]
    assert "compiling a step" not in caplog.text
    with room_for_compiling(torch_pi2.load(stores["int4"], budget=parts.smallest)):
        assert re.search(r"compiling a step may take 5[56] MiB more than the budget", caplog.text)


@pytest.mark.slow
def test_memory_that_is_freed_goes_back() -> None:
    """Blocks of some MB, which glibc would keep after the first of them was freed."""
    code = """
import torch
from torch_pi2.base.memory import give_back_freed_memory
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
give_back_freed_memory()
torch.ones(4 << 20)
before = rss()
kept = []
for _ in range(8):
    block = torch.ones(2 << 20)
    kept.append(torch.ones(16))
    del block
blocks = [torch.ones(2 << 20) for _ in range(8)]
blocks[:-1] = []
print(rss() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 12 << 20
