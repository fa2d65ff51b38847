"""Every fuzz target has seeds, and every folder of seeds a target (CTest replays them)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
import run as fuzz

TARGETS = [*fuzz.ROOT.glob("csrc/fuzz/fuzz_*.cc"), *fuzz.ROOT.glob("export/runner/fuzz/fuzz_*.cc")]


def test_every_target_has_seeds_and_every_folder_of_seeds_a_target() -> None:
    names = {fuzz.name_of(target.with_suffix("")) for target in TARGETS}
    assert {p.name for p in fuzz.SEEDS.iterdir() if p.is_dir()} == names
    assert names >= {"store", "blob", "manifest", "tokenizer"}
    assert all(any((fuzz.SEEDS / name).iterdir()) for name in names)
