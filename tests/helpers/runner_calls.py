"""Calls of the C++ runner (``make runner``), and a bundle whose sequences want different neurons."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pte
import torch
from tiny_bundle import PROMPT, ROOM, VOCAB, write_manifest

from torch_pi2.export.manifest import CONTEXT_METHOD, sealed

ROOT = Path(__file__).parents[2]


FOLDER = ROOT / "build" / "runner" / "pi2"


BUILT = ROOT / "build" / "runner" / "cmake"


PROMPTS = ["def f1(x", "    return x * 3 + y\n\ndef f2(x, y=2):\n", "é 日本 🙂"]


def call(*args: object, folder: Path = FOLDER) -> subprocess.CompletedProcess[bytes]:
    """Without any of this process's environment: the folder has all that it needs."""
    return subprocess.run([folder / "pi2_runner", *map(str, args)], capture_output=True, timeout=60, env={})


def run(*args: object) -> dict[str, Any]:
    result = call(*args, "--json")
    assert result.returncode == 0, result.stderr.decode()
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*args: object) -> str:
    """The one line that it says."""
    result = call(*args)
    assert result.returncode == 2, result.stdout
    lines = [line for line in result.stderr.decode().splitlines() if line.startswith("pi2_runner: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("pi2_runner: ")


def change(folder: Path, **fields: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(sealed({**json.loads(path.read_text()), **fields}))


class Embedded(torch.nn.Module):
    """A layer of our delegate between an embedding and a head; of each sequence's last token alone."""

    def __init__(self, blob: bytes, batch: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = torch.nn.Embedding(VOCAB, 32), torch.nn.Linear(32, VOCAB)
        self.ffn = pte.call(blob, torch.zeros(batch, 32))

    def forward(self, ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids[:, -1])
        logits: torch.Tensor = self.head(x + 30 * self.ffn(x))[:, None]
        return logits


class Kept(torch.nn.Module):
    def forward(self, lanes: torch.Tensor) -> torch.Tensor:
        return lanes + 0


def make_predicted(folder: Path) -> None:
    folder.mkdir()
    layer = pte.layer(neurons=400, n_hot=16, kind="lowrank", cut=0.2)
    blob = pte.Store(folder / "model.pi2", [layer]).blob().pack()
    one = torch.zeros(1, dtype=torch.int64)

    def ids(batch: int, tokens: int = 1) -> tuple[torch.Tensor, ...]:
        return torch.zeros(batch, tokens, dtype=torch.int64), torch.zeros(batch, tokens, dtype=torch.int64)

    length = torch.export.Dim("length", min=1, max=PROMPT)
    methods: dict[str, Any] = {f"decode_b{batch}": (Embedded(blob, batch), ids(batch), None) for batch in (1, 2, 4)}
    methods["forward"] = (Embedded(blob, 1), (ids(1, 4)[0], one), ({1: length}, None))
    methods["fork"] = (Kept(), (torch.zeros(4, dtype=torch.int64),), None)
    pte.write_pte(folder / "model.pte", methods, {CONTEXT_METHOD: ROOM})
    write_manifest(folder)
