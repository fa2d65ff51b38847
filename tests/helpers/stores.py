"""Stores of toys, taken apart and damaged."""

from __future__ import annotations

import functools
import json
import struct
from pathlib import Path
from typing import Any

import torch

import torch_pi2
from torch_pi2.base.crc32c import crc32c
from torch_pi2.base.tensorfile import Spec, TensorWriter, metadata_check
from torch_pi2.store.weights import metadata, neuron_specs
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import FFNSite, LinearRef

#: The toys have no predictors: without it, their neurons would be in clusters.
pack = functools.partial(torch_pi2.pack, cluster=1)


HASH = "0123456789abcdef" * 4


SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 80,
}


def toy(folder: Path, neurons: tuple[int, ...] = (50, 9), hidden: int = 40, *, model_hash: str = HASH) -> Path:
    """A quantised folder of random bytes; every other layer has no gate."""
    g = torch.Generator().manual_seed(0)
    layers = []
    for i, size in enumerate(neurons):
        gate = None if i % 2 else LinearRef(f"layers.{i}.gate.weight")
        up, down = LinearRef(f"layers.{i}.up.weight", f"layers.{i}.up.bias"), LinearRef(f"layers.{i}.down.weight")
        site = FFNSite(f"layers.{i}", 3 + i, "relu", False, gate, up, down, hidden, size, f"layers.{i}")
        order = torch.randperm(size, generator=g).to(torch.int32)
        layers.append(LayerPlan(site, "dense" if i % 2 else "exact", 5, order))
    plan = Plan(layers, model_hash, {"planner": "test"})
    specs = {"lm_head.weight": Spec((70, 36), torch.uint8), "embed": Spec((70, hidden), torch.bfloat16)}
    specs |= {"norm": Spec((3,), torch.float32), "number": Spec((), torch.float32), "none": Spec((0, 4), torch.float16)}
    for layer in layers:
        specs |= neuron_specs(layer.site, "int4")
    about = metadata("int4", model_hash, {"lm_head": hidden}, {layer.site.key: "owner" for layer in layers})
    with TensorWriter(folder / "pi2" / "weights.safetensors", specs, about) as out:
        for name, spec in specs.items():
            data = torch.randint(0, 256, (spec.nbytes,), generator=g, dtype=torch.uint8)
            out.write_bytes(name, data, 0)
    plan.save(folder / "pi2")
    (folder / "config.json").write_text("{}")
    return folder


def store_of(folder: Path) -> Path:
    return folder / "pi2" / "model.pi2"


def small(folder: Path, **settings: Any) -> torch.nn.Module:
    """The model with the smallest budget there is: without a cache, so that it reads every time."""
    config = OffloadConfig(preload=False, io_threads=4, **settings)
    budget = torch_pi2.stats(torch_pi2.load(folder, budget="1GiB", offload=config))["budget"].smallest
    return torch_pi2.load(folder, budget=budget, offload=config)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 19)[None].view(2, 8)).logits.float()


class Damaged:
    """A store taken apart: header, and data as it lies behind it."""

    def __init__(self, path: Path) -> None:
        whole = path.read_bytes()
        length = int.from_bytes(whole[:8], "little")
        self.header = json.loads(whole[8 : 8 + length])
        self.data = bytearray(whole[8 + length :])
        self.start = 8 + length

    @property
    def meta(self) -> dict[str, str]:
        return self.header["__metadata__"]

    def at(self, name: str) -> int:
        """Where in the data tensor ``name`` begins."""
        return self.header[name]["data_offsets"][0]

    def number(self, at: int, value: int, form: str = "<I") -> None:
        """Change a number in the superblock, and its checksum with it."""
        struct.pack_into(form, self.data, at, value)
        self.seal()

    def seal(self) -> None:
        self.data[12:16] = bytes(4)
        rows = torch.frombuffer(bytearray(self.data[:4096]), dtype=torch.uint8)[None]
        self.data[12:16] = int(crc32c(rows)[0]).to_bytes(4, "little")

    def rename(self, old: str, new: str) -> None:
        self.header[new] = self.header.pop(old)

    def write(self, path: Path, pad: int = 4096, *, sealed: bool = True) -> None:
        """``sealed``: with the checksum that its metadata have now."""
        if sealed:
            self.meta["metadata_check"] = metadata_check(self.meta)
        text = json.dumps(self.header, separators=(",", ":")).encode()  # no longer than it was
        text += b" " * (-(8 + len(text)) % pad)
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(self.data))


def rename_checked(d: Damaged, old: str, new: str) -> None:
    """A tensor of the last kind under another name, with the checksum of the old one."""
    d.rename(old, new)
    checks = json.loads(d.meta["checks"])
    checks[new] = checks.pop(old)
    d.meta["checks"] = json.dumps(checks)
