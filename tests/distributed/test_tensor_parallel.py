"""Models divided by neurons among processes: the bits of one machine, and errors that name who failed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_experts
import tiny_models
import torch
from sharding import ANSWERS, FEW, answers_of_one, check_answers, made_in_parts, result_of_one, saved, together

import torch_pi2
from torch_pi2.errors import ConfigError

#: Each of several processes has one, too.
pytestmark = pytest.mark.usefixtures("one_thread")

#: Neurons of a layer: three chunks of 64, and one of 8.
WIDE = 200
#: Of short calls; longer ones are sums by process.
BITS = ("few", "steps")
TEXT = [torch.randint(1, 60, (64,), generator=torch.Generator().manual_seed(i)) for i in range(6)]


def _synthetic(folder: Path) -> None:
    torch_pi2.synthetic(folder / "plain", "tiny", active=0.2, weights="int4")
    torch_pi2.pack(folder / "plain", folder / "store")


def _llama(**config: Any) -> Any:
    torch.manual_seed(0)
    return tiny_models.randomise(tiny_models._hf("Llama", intermediate_size=WIDE, **config).eval())


MADE: dict[str, Callable[[Path], None]] = {
    "lowrank, int4": _synthetic,
    "biases": lambda f: saved(f, _llama(hidden_act="relu", mlp_bias=True), method="exact"),
    "thresholds of neurons": lambda f: saved(f, _llama(), text=TEXT, method="threshold", sparsity=0.5, score="output"),
    "signs": lambda f: saved(f, _llama(hidden_act="relu"), text=TEXT, method="signbit"),
    "experts": lambda f: saved(f, tiny_experts.build("Mixtral", intermediate_size=136), method="exact"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models, each with a store and its shards."""
    return made_in_parts(tmp_path_factory, "models-in-shards", MADE)


_SLOW = ("thresholds of neurons", "signs", "biases")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in MADE])
def test_two_processes_have_the_bits_of_one(made: Path, name: str, tmp_path: Path) -> None:
    together(tmp_path, ANSWERS, 2, made / name / "2", "chunks", "", "")
    check_answers(tmp_path, 2, answers_of_one(made / name / "store"), same=() if name == "experts" else BITS)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["chunks", "ranks"])
def test_the_bias_of_a_method_is_added_once(reduction: str, tmp_path: Path) -> None:
    methods = Path(__file__).parents[2] / "examples" / "methods"
    saved(tmp_path, _llama(mlp_bias=True), text=TEXT, method=f"{methods}/spon.py:Spon", sparsity=0.5)
    torch_pi2.pack(tmp_path / "store", tmp_path / "2", ranks=2)
    known = f"sys.path.append({str(methods)!r})\nimport spon\n"
    together(tmp_path / "out", known + ANSWERS, 2, tmp_path / "2", reduction, "", "")
    wanted = result_of_one(tmp_path / "store", "sharding.answers(model, False)", known)
    check_answers(tmp_path / "out", 2, wanted, same=BITS if reduction == "chunks" else ())


@pytest.mark.slow
def test_sums_by_rank_are_the_same_in_each_process(made: Path, tmp_path: Path) -> None:
    together(tmp_path, ANSWERS, 3, made / "biases" / "3", "ranks", "", "")
    check_answers(tmp_path, 3, answers_of_one(made / "biases" / "store"), same=())


@pytest.mark.slow
@pytest.mark.long
def test_three_processes_compiled_and_over_flash(made: Path, tmp_path: Path) -> None:
    name = "lowrank, int4"
    smallest = torch_pi2.stats(torch_pi2.load(made / name / "store", budget="1GiB"))["budget"].smallest
    together(tmp_path, ANSWERS, 3, made / name / "3", "chunks", "compiled", f"{smallest + 100_000}B")
    check_answers(tmp_path, 3, answers_of_one(made / name / "store", compiled=True), same=BITS)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "by"), [("float32", "neurons"), ("bfloat16", "layers")])
def test_a_shard_that_is_compiled_has_the_same_tokens(tmp_path: Path, dtype: str, by: str) -> None:
    """Logits as near as Inductor's roundings are on one machine."""
    saved(tmp_path, _llama(hidden_act="relu").to(getattr(torch, dtype)), method="exact")
    torch_pi2.pack(tmp_path / "store", tmp_path / "2", ranks=2, by=by)
    script = """
import torch_pi2
model = torch.compile(torch_pi2.load(sys.argv[4], group=torch_pi2.GroupConfig(timeout_s=280)), backend="torch_pi2")
with torch.no_grad():
    torch.save(model(torch.arange(1, 6)[None], use_cache=False).logits, out / f"{rank}.pt")
"""
    together(tmp_path / "out", script, 2, tmp_path / "2")
    one: Any = torch_pi2.load(tmp_path / "store", budget="1GiB")
    first, second = (torch.load(tmp_path / "out" / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first, second)
    with torch.no_grad():
        wanted = one(FEW, use_cache=False).logits
    near = 1e-4 if dtype == "float32" else 0.05
    torch.testing.assert_close(first, wanted, rtol=near, atol=near * float(wanted.abs().max()))
    assert torch.equal(first[:, -1].argmax(-1), wanted[:, -1].argmax(-1))


@pytest.mark.slow
def test_the_same_text_is_generated(made: Path, tmp_path: Path) -> None:
    """Also where processes would differ: in how much they draft, which is by time, and in unseeded random numbers."""
    script = """
import torch_pi2
from torch_pi2.decode.speculate import Pace
torch.manual_seed(rank)
model = torch_pi2.load(sys.argv[4], group=torch_pi2.GroupConfig(timeout_s=10))
few, ids = torch.arange(1, 6)[None], torch.tensor([[5, 6, 7, 8] * 4])
drawn = torch_pi2.generate(model, few, max_new_tokens=12, do_sample=True, seed=3)
by_transformers = model.generate(few, max_new_tokens=12, do_sample=False)
print(drawn.sequences, by_transformers.tolist())
Pace.count = lambda self, most: min(most, 1 + rank)
drafted = torch_pi2.generate(model, ids, max_new_tokens=24, prompt_lookup=3)
plain = torch_pi2.generate(model, ids, max_new_tokens=24)
unseeded = model.generate(ids, max_new_tokens=12, do_sample=True)
print(drafted.sequences == plain.sequences, drafted.drafts.passes > 0, unseeded.tolist())
"""
    store = made / "lowrank, int4" / "store"
    first, second = together(tmp_path, script, 2, store.parent / "2")
    assert first == second
    model: Any = torch_pi2.load(store, budget="1GiB")
    drawn = torch_pi2.generate(model, FEW, max_new_tokens=12, do_sample=True, seed=3)
    greedy = model.generate(FEW, max_new_tokens=12, do_sample=False)
    seeded, unseeded = first.splitlines()
    assert seeded == f"{drawn.sequences} {greedy.tolist()}"
    assert unseeded.startswith("True True ")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("killed", -9), ("hangs", 0), ("fails", 0)])
def test_a_lost_process_is_named(made: Path, tmp_path: Path, how: str, code: int) -> None:
    script = """
import os, time, torch_pi2
from torch_pi2.decode.decoder import Decoder
how = sys.argv[5]
model = torch_pi2.load(sys.argv[4], group=torch_pi2.GroupConfig(timeout_s=3))
decoder = Decoder(model, max_tokens=64)
token = decoder.prompt(torch.arange(1, 6)[None])
if rank == 1 and how == "killed":
    os.kill(os.getpid(), 9)
if rank == 1 and how == "hangs":
    while not all((out / f"noticed-{other}").exists() for other in (0, 2)):
        time.sleep(0.1)
    sys.exit()
if rank == 1 and how == "fails":
    torch_pi2.stats(model)["store"].close()
for again in range(2):
    began = time.perf_counter()
    try:
        for _ in range(30):
            token = decoder.step(token)
        print("no error")
    except torch_pi2.Pi2Error as error:
        print(time.perf_counter() - began < 30, type(error).__name__, error)
sys.stdout.flush()
(out / f"noticed-{rank}").write_text("")
os._exit(0)
"""
    said = together(tmp_path, script, 3, made / "lowrank, int4" / "3", how, codes=[0, code, 0])
    for rank in (0, 2):
        first, second, *_ = said[rank].splitlines()
        assert first.startswith(f"True GroupError 3 processes that compute one model (this is {rank})"), first
        reason = "none of process 1" + (", which says: ArtifactError: " if how == "fails" else ".")
        assert f"expected an answer of each within 3 s, found {reason}" in first
        assert f"process {rank} of 3 that compute one model: expected a group of which no process has" in second
    if how == "fails":
        first, second, *_ = said[1].splitlines()
        assert first.startswith("True ArtifactError ")
        assert second.startswith("True GroupError process 1 of 3 that compute one model: expected a group of which")


def test_shards_that_do_not_fit_are_refused_in_all_processes(made: Path, tmp_path: Path) -> None:
    script = """
import torch_pi2
int8 = {"activations": ["float", "int8"][rank]}
small = {"budget": [None, "1KiB"][rank]}
one, other, three, config = sys.argv[4:]
own = lambda folder: Path(folder) / f"rank-{rank}-of-2"
wrong = (three, {}), (own([one, other][rank]), {}), (one, int8), (one, small), (own(config), {})
for folder, how in (*wrong, (one, {})):
    try:
        torch_pi2.load(folder, **how)
        print("loaded")
    except torch_pi2.Pi2Error as error:
        print(type(error).__name__, error)
"""
    one, other, config = made / "lowrank, int4", made / "biases", tmp_path / "config"
    shutil.copytree(one / "2", config)
    path = config / "rank-1-of-2" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.1}))
    for said in together(tmp_path / "group", script, 2, one / "2", other / "2", one / "3", config):
        expected = (
            f"ConfigError {one / '3'}: expected a group of 3 processes, one for each shard, found 2 processes. Start ",
            "ConfigError model of process 1 of 2: expected ",
            "ConfigError activations of process 1 of 2: expected float, as process 0 has, found int8. Give all ",
            f"ConfigError budget for {one / '2' / 'rank-1-of-2'}: expected at least",
            "ConfigError configuration of process 1 of 2: expected ",
            "loaded",
        )
        for line, beginning in zip(said.splitlines(), expected, strict=True):
            assert line.startswith(beginning), line


def test_a_shard_of_other_weights_is_refused(made: Path, tmp_path: Path) -> None:
    """Weights beside the neurons, of which every shard has all."""
    for name in ("one", "other"):
        model: Any = _llama(hidden_act="relu")
        if name == "other":
            with torch.no_grad():
                model.model.layers[0].self_attn.q_proj.weight.mul_(2)
        saved(tmp_path / name, model, method="exact")
        torch_pi2.pack(tmp_path / name / "store", tmp_path / name / "2", ranks=2)
    shutil.rmtree(tmp_path / "one" / "2" / "rank-1-of-2")
    (tmp_path / "other" / "2" / "rank-1-of-2").rename(tmp_path / "one" / "2" / "rank-1-of-2")
    script = """
import torch_pi2
for folder in sys.argv[4:]:
    try:
        torch_pi2.load(folder)
    except torch_pi2.Pi2Error as error:
        print(error)
"""
    here = tmp_path / "here"
    shutil.copytree(made / "biases" / "2" / "rank-0-of-2", here / "rank-0-of-2")
    first, second = together(tmp_path / "group", script, 2, tmp_path / "one" / "2", here)
    for said in (first, second):
        assert said.startswith("weights beside the neurons of process 1 of 2: expected ")
    assert second.splitlines()[1].startswith(
        f"{here}: expected rank-1-of-2, as this is process 1, found rank-0-of-2. Copy that folder to this machine"
    )
    assert "2 processes that load one model: expected an answer of each, found none of one of them" in first


@pytest.mark.slow
def test_an_error_in_one_process_is_one_in_all(tmp_path: Path) -> None:
    """While they load a model; and none waits for one that has ended."""
    script = """
import os
from torch_pi2.distributed.group import of_each
from torch_pi2.errors import ConfigError
errors = [ConfigError("a thing", expected="one", found="none", fix="Add it."), MemoryError("too much")]

def of(i):
    if i < 0:
        raise errors[i]
    return i * i

for numbers in ((2, 4), (1, -2), (1, -1), None):
    if rank and numbers is None:
        os._exit(9)
    try:
        print(of_each(lambda: of(numbers[rank] if numbers else 0)))
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0])
    sys.stdout.flush()
"""
    first, second = (said.splitlines() for said in together(tmp_path, script, 2, codes=[0, 9]))
    assert first[:2] == second[:2] == ["[4, 16]", "ConfigError: a thing: expected one, found none. Add it."]
    assert first[2].startswith(
        "Pi2Error: process 1 of 2 that load one model: expected its shard, found MemoryError: too"
    )
    assert second[2] == "MemoryError: too much"
    assert first[3].startswith("Pi2Error: 2 processes that load one model: expected an answer of each, found none of")


def test_a_shard_alone_is_refused(made: Path) -> None:
    for folder in (made / "biases" / "2", made / "biases" / "2" / "rank-1-of-2"):
        with pytest.raises(
            ConfigError, match=r"expected a group of 2 processes, .* found a process that is in no group"
        ):
            torch_pi2.load(folder)


def _shell(*command: object, code: int = 0, typed: str = "") -> tuple[str, str]:
    """What ``python -m COMMAND`` writes to standard output and standard error."""
    ran = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=300,
        input=typed,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == code, ran.stderr
    return ran.stdout, ran.stderr


@pytest.mark.slow
@pytest.mark.long
def test_on_the_command_line(tmp_path: Path) -> None:
    model = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
    torch_pi2.pack(model, tmp_path / "store", weights="int4", trust_remote_code=True)
    said, _ = _shell("torch_pi2", "pack", tmp_path / "store", tmp_path / "2", "--ranks", 2, "--shares", "3,1")
    assert "5120 neurons of 5 layers" in said
    said, _ = _shell("torch_pi2", "inspect", tmp_path / "2", "--verify")
    assert [line for line in said.splitlines() if line.startswith("rank-")] == [
        line
        for rank, neurons in ((0, 3840), (1, 1280))
        for line in said.splitlines()
        if line.startswith(f"rank-{rank}-of-2: shard {rank} of 2, store version 2: {neurons} of 5120 neurons in int4")
    ]
    assert said.count("are as they were packed") == 2
    ask = ("generate", "--prompt", "def main(", "--max-new-tokens", 16, "--json")
    one, _ = _shell("torch_pi2", *ask, tmp_path / "store", "--budget", "1GiB")
    group = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "torch_pi2")
    two, _ = _shell(*group, *ask, tmp_path / "2")
    assert json.loads(two)["text"] == json.loads(one)["text"]  # once: the first process tells it
    _, said = _shell(*group, *ask, tmp_path / "store", code=1)
    assert "expected a folder of shards, of which each process has one, found no shards" in said
    _, said = _shell("torch_pi2", "serve", tmp_path / "2", code=2)
    assert "expected a group of 2 processes, one for each shard, found a process that is in no group" in said
    _, said = _shell(*group, "serve", tmp_path / "store", tmp_path / "2", code=1)
    assert "models in several processes: expected one in shards, before any other, found" in said


@pytest.mark.slow
@pytest.mark.long
def test_chat_and_eval_are_those_of_one_machine(tmp_path: Path) -> None:
    model = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
    torch_pi2.pack(model, tmp_path / "store", weights="int4", trust_remote_code=True)
    torch_pi2.pack(tmp_path / "store", tmp_path / "2", ranks=2)
    group = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "torch_pi2")
    typed = "def main(\nimport os\n/stats\n"
    ask = ("chat", "--max-new-tokens", 12, "--json")
    one, _ = _shell("torch_pi2", *ask, tmp_path / "store", "--budget", "1GiB", typed=typed)
    two, said = _shell(*group, *ask, tmp_path / "2", typed=typed)
    assert json.loads(two) == json.loads(one)
    assert "neurons were in the cache" in said
    ask = ("eval", "--max-tokens", 200, "--json", "--trust-remote-code")
    one, _ = _shell("torch_pi2", *ask, tmp_path / "store", "--budget", "1GiB")
    two, _ = _shell(*group, *ask, tmp_path / "2")
    assert json.loads(two)["sparse"]["nats_per_token"] == json.loads(one)["sparse"]["nats_per_token"]


@pytest.mark.slow
def test_calls_that_differ_are_refused_and_equal_ones_go_on(made: Path, tmp_path: Path) -> None:
    script = """
import torch_pi2
from torch_pi2.decode.decoder import Decoder
model = torch_pi2.load(sys.argv[4], group=torch_pi2.GroupConfig(timeout_s=30))
few = torch.arange(1, 6)[None]
decoder = Decoder(model, max_tokens=64, compiled=False)
for call in (
    lambda: Decoder(model, max_tokens=64, compiled=bool(rank)).prompt(few),
    lambda: Decoder(model, max_tokens=64, chunk_tokens=4 * rank, compiled=False).prompt(few),
    lambda: torch_pi2.generate(model, few, max_new_tokens=20 - rank),
    lambda: decoder.prompt(torch.tensor([[1, 2, 3 + rank]])),
    lambda: decoder.prompt(torch.tensor([[1, 2, 3][: 2 + rank]])),
    lambda: torch_pi2.export(model, out / f"bundle-{rank}"),
    lambda: torch_pi2.generate(model, few, max_new_tokens=8).sequences,
):
    try:
        print(call())
    except torch_pi2.Pi2Error as error:
        print(error)
"""
    store = made / "lowrank, int4" / "store"
    wanted = torch_pi2.generate(torch_pi2.load(store, budget="1GiB"), FEW, max_new_tokens=8).sequences
    for said in together(tmp_path, script, 2, store.parent / "2"):
        *refused, exported, equal = said.splitlines()
        assert len(refused) == 5
        for line in refused:
            assert line.startswith("prompt of process 1 of 2: expected the tokens and settings that process 0 has")
        assert "expected a model with all of its neurons, found a shard of one, of several processes" in exported
        assert equal == str(wanted)
