"""Models of which several processes have a shard each: the bits of one machine, and errors that name who failed."""

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
from sharding import ANSWERS, FEW, answers_of_one, check_answers, made_in_parts, saved, together

import torch_pi2
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ArtifactError, ConfigError

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
    "no gates": lambda f: saved(
        f,
        tiny_models.randomise(tiny_models._hf("OPT", ffn_dim=WIDE, word_embed_proj_dim=32).eval()),
        method="exact",
    ),
    "thresholds of neurons": lambda f: saved(f, _llama(), text=TEXT, method="threshold", sparsity=0.5, score="output"),
    "signs": lambda f: saved(f, _llama(hidden_act="relu"), text=TEXT, method="signbit"),
    "experts": lambda f: saved(f, tiny_experts.build("Mixtral", intermediate_size=136), method="exact"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models, each with a store and its shards."""
    return made_in_parts(tmp_path_factory, "models-in-shards", MADE)


_SLOW = ("no gates", "thresholds of neurons", "signs")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in MADE])
def test_two_processes_have_the_bits_of_one(made: Path, name: str, tmp_path: Path) -> None:
    together(tmp_path, ANSWERS, 2, made / name / "2", "chunks", "", "")
    check_answers(tmp_path, 2, answers_of_one(made / name / "store"), same=() if name == "experts" else BITS)


def test_sums_by_rank_are_the_same_in_each_process(made: Path, tmp_path: Path) -> None:
    together(tmp_path, ANSWERS, 3, made / "biases" / "3", "ranks", "", "")
    check_answers(tmp_path, 3, answers_of_one(made / "biases" / "store"), same=())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lowrank, int4", "biases"])
def test_three_processes_compiled_and_over_flash(made: Path, name: str, tmp_path: Path) -> None:
    smallest = torch_pi2.stats(torch_pi2.load(made / name / "store", budget="1GiB"))["budget"].smallest
    together(tmp_path, ANSWERS, 3, made / name / "3", "chunks", "compiled", f"{smallest + 100_000}B")
    check_answers(tmp_path, 3, answers_of_one(made / name / "store", compiled=True), same=BITS)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["neurons", "layers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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


def test_the_same_text_is_generated(made: Path, tmp_path: Path) -> None:
    script = """
import torch_pi2
model = torch_pi2.load(sys.argv[4])
made = torch_pi2.generate(model, torch.arange(1, 6)[None], max_new_tokens=12, do_sample=True, seed=3)
by_transformers = model.generate(torch.arange(1, 6)[None], max_new_tokens=12, do_sample=False)
print(made.sequences, by_transformers.tolist())
"""
    store = made / "lowrank, int4" / "store"
    found = together(tmp_path, script, 2, store.parent / "2")
    model: Any = torch_pi2.load(store, budget="1GiB")
    drawn = torch_pi2.generate(model, FEW, max_new_tokens=12, do_sample=True, seed=3)
    greedy = model.generate(FEW, max_new_tokens=12, do_sample=False)
    assert found == [f"{drawn.sequences} {greedy.tolist()}\n"] * 2


def test_what_differs_from_process_to_process_is_the_first_ones(made: Path, tmp_path: Path) -> None:
    """How many tokens are guessed, which is by time, and random numbers that nobody has seeded."""
    script = """
import torch_pi2
from torch_pi2.decode.speculate import Pace
torch.manual_seed(rank)
Pace.count = lambda self, most: min(most, 1 + rank)
model = torch_pi2.load(sys.argv[4], group=torch_pi2.GroupConfig(timeout_s=10))
ids = torch.tensor([[5, 6, 7, 8] * 4])
guessed = torch_pi2.generate(model, ids, max_new_tokens=24, prompt_lookup=3)
plain = torch_pi2.generate(model, ids, max_new_tokens=24)
drawn = model.generate(ids, max_new_tokens=12, do_sample=True)
print(guessed.sequences == plain.sequences, guessed.drafts.passes > 0, drawn.tolist())
"""
    first, second = together(tmp_path, script, 2, made / "lowrank, int4" / "2")
    assert first == second
    assert first.startswith("True True ")


def test_what_is_lost_is_named(made: Path, tmp_path: Path) -> None:
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
        print("nothing was wrong")
    except torch_pi2.Pi2Error as error:
        print(time.perf_counter() - began < 30, type(error).__name__, error)
sys.stdout.flush()
(out / f"noticed-{rank}").write_text("")
os._exit(0)
"""
    folder = made / "lowrank, int4" / "3"
    lost = "GroupError: 3 processes that compute one model (this is {}): expected an answer of each within 3 s, found "
    for how, code, who in (("killed", -9, "none of process 1."), ("hangs", 0, "none of process 1."), ("fails", 0, "")):
        said = together(tmp_path / how, script, 3, folder, how, codes=[0, code, 0])
        for rank in (0, 2):
            first, second, *_ = said[rank].splitlines()
            assert first.startswith("True GroupError"), first
            assert lost.format(rank).replace(": ", " ", 1) in first, first
            if how == "fails":
                assert "none of process 1, which says: ArtifactError: " in first, first
                assert "a store that has been closed" in first
            else:
                assert who in first
            assert f"process {rank} of 3 that compute one model: expected a group of which no process has" in second
            assert second.endswith("was raised before. See what it said, and start all of them again.")
        if how == "fails":
            first, second, *_ = said[1].splitlines()
            assert first.startswith("True ArtifactError ")
            assert second.startswith("True GroupError process 1 of 3 that compute one model: expected a group of which")


def test_what_cannot_be_put_together_is_refused_in_all_processes(made: Path, tmp_path: Path) -> None:
    script = """
import torch_pi2
int8 = {"activations": ["float", "int8"][rank]}
small = {"budget": [None, "1KiB"][rank]}
for folder, how in ((sys.argv[4], {}), (sys.argv[5 + rank], {}), (sys.argv[7], int8), (sys.argv[7], small)):
    try:
        torch_pi2.load(folder, **how)
        print("loaded")
    except torch_pi2.Pi2Error as error:
        print(type(error).__name__, error)
"""
    one, other = made / "lowrank, int4", made / "biases"
    both = one / "2" / "rank-0-of-2", other / "2" / "rank-1-of-2"
    for said in together(tmp_path, script, 2, one / "3", *both, one / "2"):
        size, model, activations, budget = said.splitlines()
        assert budget.startswith(f"ConfigError budget for {one / '2' / 'rank-1-of-2'}: expected at least")
        assert size == (
            f"ConfigError {one / '3'}: expected a group of 3 processes, one for each shard, found 2 processes. Start "
            "it with torchrun --nproc-per-node 3 (or --nnodes), and call "
            'torch.distributed.init_process_group("gloo"); or make other shards with torch-pi2 pack --ranks.'
        )
        assert model.startswith("ConfigError model of process 1 of 2: expected "), model
        assert activations == (
            "ConfigError activations of process 1 of 2: expected float, as process 0 has, found int8. Give all "
            "processes the same: they compute one model together."
        )


def test_other_weights_and_configurations_are_refused(made: Path, tmp_path: Path) -> None:
    script = """
import torch_pi2
for folder in sys.argv[4:]:
    try:
        torch_pi2.load(Path(folder) / f"rank-{rank}-of-2")
        print("loaded")
    except torch_pi2.Pi2Error as error:
        print(type(error).__name__, error)
"""
    torch.manual_seed(0)
    model: Any = _llama(hidden_act="relu")
    saved(tmp_path / "one", model, method="exact")
    with torch.no_grad():
        other: Any = _llama(hidden_act="relu")
        other.model.layers[0].self_attn.q_proj.weight.mul_(2)
    saved(tmp_path / "other", other, method="exact")
    for name in ("one", "other"):
        torch_pi2.pack(tmp_path / name / "store", tmp_path / name / "2", ranks=2)
    weights, config = tmp_path / "weights", tmp_path / "config"
    for folder, second in ((weights, "other"), (config, "one")):
        for rank, name in enumerate(("one", second)):
            shutil.copytree(tmp_path / name / "2" / f"rank-{rank}-of-2", folder / f"rank-{rank}-of-2")
    path = config / "rank-1-of-2" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.1}))
    for said in together(tmp_path / "group", script, 2, tmp_path / "one" / "2", weights, config):
        same, in_weights, in_config = said.splitlines()
        assert same == "loaded"
        assert in_weights.startswith("ConfigError weights beside the neurons of process 1 of 2: expected ")
        assert in_config.startswith("ConfigError configuration of process 1 of 2: expected ")
    with pytest.raises(ArtifactError, match="shard 1 of 2 of the model of"):
        torch_pi2.pack(weights, tmp_path / "whole")


def test_a_shard_that_is_elsewhere_is_named(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "biases" / "2" / "rank-0-of-2", tmp_path / "here" / "rank-0-of-2")
    script = """
import torch_pi2
try:
    torch_pi2.load(sys.argv[4])
except torch_pi2.Pi2Error as error:
    print(error)
"""
    first, second = together(tmp_path / "out", script, 2, tmp_path / "here")
    assert second == (
        f"{tmp_path / 'here'}: expected rank-1-of-2, as this is process 1, found rank-0-of-2. Copy that folder to this "
        "machine, or start the process on the machine that has it.\n"
    )
    assert "2 processes that share work: expected an answer of each, found none of one of them" in first


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
    said, _ = _shell("torch_pi2", "inspect", tmp_path / "2" / "rank-1-of-2", "--json")
    found = json.loads(said)
    assert found["store"]["shard"] == {"rank": 1, "ranks": 2, "of": 5120}
    assert {layer["neurons"] for layer in found["layers"]} == {256}
    assert found["budget"]["whole"] > found["budget"]["smallest"]
    ask = ("generate", "--prompt", "def main(", "--max-new-tokens", 16, "--json")
    one, _ = _shell("torch_pi2", *ask, tmp_path / "store", "--budget", "1GiB")
    group = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "torch_pi2")
    two, _ = _shell(*group, *ask, tmp_path / "2")
    assert json.loads(two)["text"] == json.loads(one)["text"]  # once: the first process tells it
    _, said = _shell(*group, *ask, tmp_path / "store", code=1)
    assert "expected a folder of shards, of which each process has one, found no shards" in said
    _, said = _shell("torch_pi2", "report", tmp_path / "2", code=2)
    assert "found shards of a model, written by pack --ranks. Use: torchrun" in said
    _, said = _shell("torch_pi2", "serve", tmp_path / "2", code=2)
    assert "expected a group of 2 processes, one for each shard, found a process that is in no group" in said
    _, said = _shell(*group, "serve", tmp_path / "store", tmp_path / "2", code=1)
    assert "models in several processes: expected one in shards, before any other, found" in said


@pytest.mark.slow
def test_a_talk_and_losses_are_those_of_one_machine(tmp_path: Path) -> None:
    model = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
    torch_pi2.pack(model, tmp_path / "store", weights="int4", trust_remote_code=True)
    torch_pi2.pack(tmp_path / "store", tmp_path / "2", ranks=2)
    group = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "torch_pi2")
    typed = "def main(\nimport os\n/budget 1GB\n/stats\n"
    ask = ("chat", "--max-new-tokens", 12, "--json")
    one, _ = _shell("torch_pi2", *ask, tmp_path / "store", "--budget", "1GiB", typed=typed)
    two, said = _shell(*group, *ask, tmp_path / "2", typed=typed)
    assert json.loads(two) == json.loads(one)
    assert "the budget is 1GB from now on" in said
    assert "neurons were in the cache" in said
    ask = ("eval", "--max-tokens", 300, "--json")
    one, _ = _shell("torch_pi2", *ask, tmp_path / "store", "--budget", "1GiB")
    two, _ = _shell(*group, *ask, tmp_path / "2")
    alone, together = json.loads(one), json.loads(two)
    assert together["model"] == str(tmp_path / "2")
    assert together["sparse"]["bits_per_byte"] == pytest.approx(alone["sparse"]["bits_per_byte"], rel=1e-3)
    assert together["sparse"]["neurons"] < alone["sparse"]["neurons"]  # those of the first process
    ask = ("eval", "--suite", "--limit", 5, "--json", "--against", model, "--trust-remote-code")
    one, _ = _shell("torch_pi2", *ask, tmp_path / "store", "--budget", "1GiB")
    two, _ = _shell(*group, *ask, tmp_path / "2")
    assert json.loads(two)["suite"]["tasks"] == json.loads(one)["suite"]["tasks"]


def test_decoders_of_other_settings_are_refused(made: Path, tmp_path: Path) -> None:
    script = """
import torch_pi2
from torch_pi2.decode.decoder import Decoder
model = torch_pi2.load(sys.argv[4], group=torch_pi2.GroupConfig(timeout_s=30))
few = torch.arange(1, 6)[None]
for wrong in (
    lambda: Decoder(model, max_tokens=64, compiled=bool(rank)).prompt(few),
    lambda: Decoder(model, max_tokens=64, chunk_tokens=4 * rank, compiled=False).prompt(few),
    lambda: torch_pi2.generate(model, few, max_new_tokens=20 - rank),
):
    try:
        print("nothing was wrong", wrong())
    except torch_pi2.Pi2Error as error:
        print(error)
print(torch_pi2.generate(model, few, max_new_tokens=8).sequences)
"""
    store = made / "lowrank, int4" / "store"
    wanted = torch_pi2.generate(torch_pi2.load(store, budget="1GiB"), FEW, max_new_tokens=8).sequences
    for said in together(tmp_path, script, 2, store.parent / "2"):
        compiled, pieces, room, good = said.splitlines()
        assert compiled == (
            "Decoder.compiled of process 1 of 2: expected 0, as process 0 has, found 1. All processes make the same "
            "calls: they compute one model together."
        )
        assert pieces.startswith("Decoder.chunk_tokens of process 1 of 2: expected 0, as process 0 has, found 4.")
        assert room.startswith("Decoder.max_tokens of process 1 of 2: expected ")
        assert good == str(wanted)


def test_other_prompts_are_refused_and_equal_ones_go_on(made: Path, tmp_path: Path) -> None:
    script = """
import torch_pi2
from torch_pi2.decode.decoder import Decoder
model = torch_pi2.load(sys.argv[4])
decoder = Decoder(model, max_tokens=64, compiled=False)
for ids in ([[1, 2, 3 + rank]], [[1, 2, 3][: 2 + rank]], [[1, 2, 3]]):
    try:
        print(decoder.prompt(torch.tensor(ids)).tolist())
    except torch_pi2.Pi2Error as error:
        print(type(error).__name__, error)
try:
    torch_pi2.export(model, out / f"bundle-{rank}")
except torch_pi2.Pi2Error as error:
    print(error)
"""
    store = made / "lowrank, int4" / "store"
    token = Decoder(torch_pi2.load(store, budget="1GiB"), max_tokens=64, compiled=False).prompt(
        torch.tensor([[1, 2, 3]])
    )
    for said in together(tmp_path, script, 2, store.parent / "2"):
        others, longer, same, exported = said.splitlines()
        assert others.startswith(
            "ConfigError prompt of process 1 of 2: expected the 3 tokens that process 0 has, found 3 tokens, others."
        )
        assert longer.startswith(
            "ConfigError prompt of process 1 of 2: expected the 2 tokens that process 0 has, found 3"
        )
        assert same == str(token.tolist())
        assert "expected a model with all of its neurons, found a shard of one, of several processes" in exported
