"""Profiles by several processes of one group: the result of one process, and what they cannot share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from torch_pi2.profiling.data import MIN_TOKENS
from torch_pi2.types.stats import ActivationStats, Reservoir

HELPERS = Path(__file__).resolve().parents[1] / "helpers"

#: Every process writes what it has; with other text in the second one it writes the message.
_EACH = """
import sys, torch, torch_pi2
import torch.distributed as dist
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tiny_experts import build
from tiny_models import tiny
from torch_pi2.errors import CalibrationError, ConfigError

out, rank = Path(sys.argv[1]), 0
if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
draw = torch.Generator().manual_seed(1)
text = [torch.randint(0, 60, (length,), generator=draw) for length in (30, 7, 24, 19, 30, 30, 11, 25, 30, 3, 28)]
few = build("Mixtral", hidden_act="silu")
few.model.layers[0].mlp.gate.register_forward_hook(lambda _, a, y: (y[0], y[1], torch.where(y[2] == 1, 3, y[2])))
settings = {"batch_size": 2, "seq_len": 32}
for name, model, more in (
    ("relu", tiny("drelu"), {}),
    ("loss", tiny("llama"), {"max_loss": 0.5, "score": "auto"}),
    ("experts", few, {}),
):
    torch_pi2.profile(model, text, shared=True, **settings, **more).save(out / f"{name}-{rank}")
if rank == 0:
    torch_pi2.profile(tiny("drelu"), text, **settings)  # this process alone: it waits for no other
for name, data in (("text", text[rank:]), ("settings", text)):
    if dist.is_initialized():
        try:
            torch_pi2.profile(tiny("drelu"), data, shared=True, batch_size=2 + (name == "settings") * rank, seq_len=32)
        except ConfigError as error:
            (out / f"{name}-{rank}.txt").write_text(str(error))
if dist.is_initialized():
    own = text[rank:]
    stats = torch_pi2.profile(tiny("drelu"), own, **settings)
    try:
        torch_pi2.fit(tiny("drelu"), own, stats=stats, method="lowrank", work=out / "work", **settings)
    except ConfigError as error:
        (out / f"fit-{rank}.txt").write_text(str(error))
    wrong = [text[0], torch.full((30,), 99), *text[1:]]
    try:
        torch_pi2.profile(tiny("drelu"), wrong, shared=True, batch_size=1, seq_len=32)
    except CalibrationError as error:
        (out / f"ids-{rank}.txt").write_text(str(error))
    dist.destroy_process_group()
"""


def run(out: Path, *how: str) -> None:
    out.mkdir()
    script = out / "each.py"
    script.write_text(_EACH)
    ran = subprocess.run(
        [sys.executable, *how, script, out, HELPERS],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_two_processes_profile_what_one_does(tmp_path: Path) -> None:
    run(tmp_path / "one")
    run(tmp_path / "two", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    for name in ("relu", "loss", "experts"):
        one = ActivationStats.load(tmp_path / "one" / f"{name}-0")
        wanted = load_file(tmp_path / "one" / f"{name}-0" / "stats.safetensors")
        for rank in range(2):
            folder = tmp_path / "two" / f"{name}-{rank}"
            found = load_file(folder / "stats.safetensors")
            assert found.keys() == wanted.keys()
            for key, tensor in wanted.items():
                if key.endswith(".abs_sum"):  # sums of parts, to the last bits of float64
                    torch.testing.assert_close(found[key], tensor, rtol=1e-14, atol=0)
                else:
                    assert torch.equal(found[key], tensor), key
            two = ActivationStats.load(folder)
            assert two.made_by == one.made_by
            assert [(y.tokens, y.borrowed) for y in two] == [(y.tokens, y.borrowed) for y in one]
    starved = one["model.layers.0.mlp.experts.1"]
    assert starved.tokens == starved.borrowed >= MIN_TOKENS, "the sample of a block is shared, too"
    for name, what in (
        ("text", "calibration data"),
        ("settings", "settings"),
        ("fit", "model, text or settings"),
    ):
        for rank in range(2):
            said = (tmp_path / "two" / f"{name}-{rank}.txt").read_text()
            assert f"{what} of 2 processes that share work: expected the same in each" in said
            assert "found others in process 1 than in process 0" in said
            assert "none of it divided (DistributedSampler) or shuffled" in said
    for rank in range(2):  # in a batch that one of them reads
        assert "(the model's vocabulary), found 99 to 99" in (tmp_path / "two" / f"ids-{rank}.txt").read_text()


def test_a_sample_does_not_depend_on_who_takes_which_part() -> None:
    sizes = [5, 0, 17, 9, 30]
    firsts = np.cumsum([0, *sizes])

    def sample(parts: list[int]) -> list[tuple[float, int]]:
        """Keys and rows of the stream that are kept of some parts."""
        reservoir, kept = Reservoir(8, 3), torch.full((8,), -1)
        for part in parts:
            rows, slots = reservoir.place(sizes[part], part)
            kept[slots] = rows + int(firsts[part])
        assert len(reservoir.keys_S) == min(8, reservoir.seen)
        return [(float(reservoir.keys_S[slot]), int(kept[slot])) for slot in reservoir.order()]

    whole = sample([0, 1, 2, 3, 4])
    assert len({row for _, row in whole}) == 8
    assert sorted(sample([0, 2, 4]) + sample([1, 3]))[:8] == whole
    assert sample([4, 3, 2, 1, 0]) == whole
