"""GPTQ by several processes of one group: the rows of one process, each solved by one of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from sharding import together

_SCRIPT = """
import tiny_models, tiny_experts, torch_pi2
from torch_pi2.fitting.gptq import Solver

solved, real = [], Solver._solve
Solver._solve = lambda self, w_NK: (solved.append(len(w_NK)), real(self, w_NK))[1]
text = [torch.randint(1, 60, (64,), generator=torch.Generator().manual_seed(i)) for i in range(4)]
for name in ("llama", "experts"):
    torch.manual_seed(0)
    if name == "llama":
        model = tiny_models.randomise(tiny_models._hf("Llama", intermediate_size=2100, hidden_act="relu").eval())
    else:
        model = tiny_experts.build("Mixtral", intermediate_size=1088)
    settings = {"method": "exact", "weights": "int4", "quantization": "gptq"}
    model = torch_pi2.optimize(model, text, shared=SHARED, batch_size=2, seq_len=64, **settings)
    if rank == 0:
        torch_pi2.save(model, out / name)
print(len(solved), sum(solved))
"""


@pytest.mark.slow
def test_several_processes_find_the_rows_of_one(tmp_path: Path) -> None:
    both = together(tmp_path / "both", _SCRIPT.replace("SHARED", "True"), 2)
    [alone, idle] = together(tmp_path / "alone", _SCRIPT.replace("SHARED", "False"), 2)
    assert alone == idle
    for name in ("llama", "experts"):
        one, other = (
            hashlib.sha256((tmp_path / how / name / "pi2" / "weights.safetensors").read_bytes()).digest()
            for how in ("both", "alone")
        )
        assert one == other, name
    calls, rows = map(int, alone.split())
    shared = [[*map(int, said.split())] for said in both]
    assert (sum(n for n, _ in shared), sum(n for _, n in shared)) == (calls, rows)
    assert min(n for n, _ in shared) > 0


@pytest.mark.slow
def test_an_error_of_one_process_is_that_of_all(tmp_path: Path) -> None:
    script = """
import torch_pi2
from torch_pi2.distributed.ranks import Ranks
from torch_pi2.errors import NonFiniteError
from torch_pi2.fitting.gptq import Moments, Solver

moments = Moments(64)
moments.add(torch.randn(128, 64, generator=torch.Generator().manual_seed(0)))
solver, real = Solver("inputs", moments, "int4", ranks=Ranks(together=True)), Solver._solve
def solve(self, w_NK):
    if rank == 1:
        raise NonFiniteError("scales", expected="numbers", found="NaN", fix="Correct it.")
    return real(self, w_NK)
Solver._solve = solve
try:
    solver.solve(torch.ones(2048, 64))
    print("solved")
except torch_pi2.Pi2Error as error:
    print(error)
"""
    first, second = together(tmp_path, script, 2)
    assert first == second == "scales: expected numbers, found NaN. Correct it.\n"
