"""Models divided by layers among processes, as a pipeline: the bits of one machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import families
import pytest
import tiny_experts
import tiny_models
import torch
from sharding import ANSWERS, FEW, answers_of_one, check_answers, made_in_parts, result_of_one, saved, together
from transformers import Gemma4TextConfig

import torch_pi2
from torch_pi2.decode.decoder import Decoder
from torch_pi2.distributed.pipeline_parallel import _count_tokens, _returns_one, connect_stages, remove_other_blocks
from torch_pi2.errors import ArtifactError, UnsupportedModelError
from torch_pi2.store.storefile import StoreReader
from torch_pi2.store.synthetic import SHAPES
from torch_pi2.types.shard import Shard, ShardLayer

#: Each of several processes has one, too.
pytestmark = pytest.mark.usefixtures("one_thread")

ALL = ("few", "many", "steps")
TEXT = [torch.randint(1, 60, (64,), generator=torch.Generator().manual_seed(i)) for i in range(6)]


def _synthetic(folder: Path) -> None:
    torch_pi2.synthetic(folder / "plain", "tiny", active=0.2, weights="int4", layers=5)
    torch_pi2.pack(folder / "plain", folder / "store")


def _llama(**config: Any) -> Any:
    torch.manual_seed(0)
    return tiny_models.randomise(tiny_models._hf("Llama", num_hidden_layers=4, intermediate_size=200, **config).eval())


def _experts() -> Any:
    return tiny_experts.build("Mixtral", num_hidden_layers=3, intermediate_size=136)


MADE: dict[str, Callable[[Path], None]] = {
    "lowrank, int4": _synthetic,
    "tied": lambda f: saved(f, _llama(hidden_act="relu", tie_word_embeddings=True), weights="int8", method="exact"),
    "experts": lambda f: saved(f, _experts(), method="exact"),
    "thresholds": lambda f: saved(f, _llama(), text=TEXT, method="threshold", sparsity=0.5, score="output"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models, each with a store and its stages."""
    return made_in_parts(tmp_path_factory, "models-in-stages", MADE, by="layers")


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_two_processes_have_the_bits_of_one(made: Path, name: str, tmp_path: Path) -> None:
    together(tmp_path, ANSWERS, 2, made / name / "2", "chunks", "", "")
    check_answers(tmp_path, 2, answers_of_one(made / name / "store"), same=ALL)


@pytest.mark.slow
def test_three_processes_compiled_and_over_flash(made: Path, tmp_path: Path) -> None:
    """Weights are float32: Inductor rounds bfloat16 less where it fuses more."""
    name = "experts"
    smallest = torch_pi2.stats(torch_pi2.load(made / name / "store", budget="1GiB"))["budget"].smallest
    together(tmp_path, ANSWERS, 3, made / name / "3", "chunks", "compiled", f"{smallest + 100_000}B")
    check_answers(tmp_path, 3, answers_of_one(made / name / "store", compiled=True), same=ALL)


@pytest.mark.parametrize("name", MADE)
def test_stages_become_one_store_again(made: Path, name: str, tmp_path: Path) -> None:
    torch_pi2.pack(made / name / "3", tmp_path / "whole")
    store = made / name / "store"
    for folder in (tmp_path / "whole", store):
        torch_pi2.pack(folder, tmp_path / f"{folder.name}-again")
    whole, again = (StoreReader(tmp_path / f"{name}-again" / "pi2" / "model.pi2") for name in ("whole", "store"))
    with whole, again:
        assert whole.specs == again.specs
        assert whole.checks == again.checks
        assert all(
            json.loads(whole.metadata[n]) == json.loads(again.metadata[n]) for n in ("linears", "sites", "layers")
        )
        assert whole.verify() > 0
    torch_pi2.pack(made / name / "3", tmp_path / "neurons", ranks=2)
    torch_pi2.pack(made / name / "3", tmp_path / "layers", ranks=2, by="layers")
    for rank in range(2):
        path = Path(f"rank-{rank}-of-2") / "pi2" / "model.pi2"
        with StoreReader(tmp_path / "layers" / path) as made_again, StoreReader(made / name / "2" / path) as first:
            assert (made_again.specs, made_again.checks) == (first.specs, first.checks)


@pytest.mark.slow
def test_a_model_of_many_layers_in_as_many_stages(tmp_path: Path) -> None:
    """More than layers have chunks, 16; and all of them are one store again."""
    shape = SHAPES["tiny"] | {"num_hidden_layers": 20, "hidden_size": 64, "intermediate_size": 128}
    torch_pi2.synthetic(tmp_path / "plain", shape, active=0.2, rank=16, weights="int4")
    torch_pi2.pack(tmp_path / "plain", tmp_path / "store")
    torch_pi2.pack(tmp_path / "store", tmp_path / "20", ranks=20, by="layers")
    for rank in (0, 19):
        with StoreReader(tmp_path / "20" / f"rank-{rank}-of-20" / "pi2" / "model.pi2") as one:
            assert one.shard is not None
            assert [*one.shard.blocks(20)] == [rank]
    torch_pi2.pack(tmp_path / "20", tmp_path / "whole")
    torch_pi2.pack(tmp_path / "store", tmp_path / "again")
    stores = (StoreReader(tmp_path / name / "pi2" / "model.pi2") for name in ("whole", "again"))
    whole, again = stores
    with whole, again:
        assert (whole.specs, whole.checks) == (again.specs, again.checks)


@pytest.mark.slow
def test_a_stage_has_only_its_own_layers(made: Path, tmp_path: Path) -> None:
    """Their hidden states, too: those of others are NaN."""
    script = """
import torch_pi2
model = torch_pi2.load(sys.argv[4])
budget = torch_pi2.stats(model)["budget"]
layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
print([count > 0 for count in layers], budget.kv, budget.neurons)
few = torch.arange(1, 6)[None]
drawn = torch_pi2.generate(model, few, max_new_tokens=12, do_sample=True, seed=3)
by_transformers = model.generate(few, max_new_tokens=12, do_sample=False)
print(drawn.sequences, by_transformers.tolist())
torch.save(model(few, output_hidden_states=True).hidden_states, out / f"{rank}.pt")
"""
    store = made / "thresholds" / "store"
    found = together(tmp_path, script, 2, store.parent / "2")
    model: Any = torch_pi2.load(store, budget="1GiB")
    budget = torch_pi2.stats(model)["budget"]
    drawn = torch_pi2.generate(model, FEW, max_new_tokens=12, do_sample=True, seed=3)
    greedy = model.generate(FEW, max_new_tokens=12, do_sample=False)
    wanted = result_of_one(store, "model(sharding.FEW, output_hidden_states=True).hidden_states")
    for rank, said in enumerate(found):
        here = [layer // 2 == rank for layer in range(4)]
        assert said.splitlines() == [
            f"{here} {budget.kv // 2} {budget.neurons // 2}",
            f"{drawn.sequences} {greedy.tolist()}",
        ]
        states = torch.load(tmp_path / f"{rank}.pt")
        known = [not bool(state.isnan().any()) for state in states]
        assert known == ([True, True, True, False, False] if rank == 0 else [True, False, True, True, True])
        assert all(torch.equal(a, b) for a, b, own in zip(states, wanted, known, strict=True) if own)


@pytest.mark.slow
def test_chunks_of_prompts_overlap(made: Path, tmp_path: Path) -> None:
    """While the last stage computes one, the first goes on: no logits of others than the last are waited for."""
    script = """
import torch_pi2
from torch_pi2.decode.decoder import Decoder
model = torch_pi2.load(sys.argv[4])
sent = []
real = model.torch_pi2.group.broadcast
model.torch_pi2.group.broadcast = lambda own, rank: (sent.append(tuple(own.shape)), real(own, rank))[1]
decoder = Decoder(model, max_tokens=128, chunk_tokens=16, compiled=False, logits=True)
found = decoder.prompt(torch.arange(1, 51)[None])
print(sent)
torch.save({"prompt": found}, out / f"{rank}.pt")
"""
    folder = made / "thresholds"
    said = together(tmp_path, script, 2, folder / "2")
    model = torch_pi2.load(folder / "store", budget="1GiB")
    decoder = Decoder(model, max_tokens=128, chunk_tokens=16, compiled=False, logits=True)
    check_answers(tmp_path, 2, {"prompt": decoder.prompt(torch.arange(1, 51)[None])}, same=("prompt",))
    assert said == [f"[{(1, 1, model.config.vocab_size)}]\n"] * 2


@pytest.mark.slow
def test_a_cache_that_is_passed_by_place_is_told_of_tokens(tmp_path: Path) -> None:
    """GPT-2's blocks take it so; masks of padded prompts are of as many tokens as its first layer says."""
    model = tiny_models.randomise(tiny_models._gpt2("relu"))
    saved(tmp_path, model, method="exact")
    torch_pi2.pack(tmp_path / "store", tmp_path / "2", ranks=2, by="layers")
    script = """
import torch_pi2
model = torch_pi2.load(sys.argv[4])
mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
made = model.generate(torch.arange(5, 15).view(2, 5), attention_mask=mask, max_new_tokens=12, do_sample=False)
print(made.tolist())
"""
    found = together(tmp_path / "out", script, 2, tmp_path / "2")
    model = torch_pi2.load(tmp_path / "store", budget="1GiB")
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    made = model.generate(torch.arange(5, 15).view(2, 5), attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert found == [f"{made.tolist()}\n"] * 2


def test_caches_count_tokens_of_other_stages() -> None:
    """Also linear attention, and a cache within another one (MusicGen)."""
    from transformers import DynamicCache, EncoderDecoderCache, Qwen3NextConfig

    kinds = ["linear_attention", "full_attention", "linear_attention"]
    linear = DynamicCache(config=Qwen3NextConfig(num_hidden_layers=3, layer_types=kinds))
    for cache in (linear, EncoderDecoderCache(DynamicCache(), DynamicCache())):
        for tokens in (5, 1):
            for layer in range(3):
                _count_tokens(cache, layer, 3, torch.zeros(2, tokens, 8))
        assert cache.get_seq_length() == 6
    assert linear.has_previous_state()


#: Family -> what its blocks' names begin with, and what of the model is refused.
_REFUSED = {
    "big_bird": ("bert.encoder.layer", "BigBirdLayer in stages: .* code that asks for 'attention' of block 0"),
    "gemma3n_text": ("model.layers", "expected hidden states .batch, tokens, .* of 2 tokens"),
    "git": ("git.encoder.layer", "GitLayer in stages: .* code that asks for 'attention' of block 0"),
    "longcat_flash": ("model.layers", "DynamicCache of a model in stages: .* found 4 layers"),
    "openai-gpt": ("transformer.h", "Block in stages: .* found one that returns a tuple"),
    "recurrent_gemma": ("model.layers", "RecurrentGemmaDecoderLayer .* asks for 'temporal_block' of block 0"),
    "reformer": ("reformer.encoder.layers", "ReformerDynamicCache .* found a cache without layers"),
    "xlm": ("transformer.ffns", "TransformerFFN in stages: .* block 1 called with something else after block 0"),
}


@pytest.mark.parametrize("family", _REFUSED)
def test_models_that_need_more_of_their_blocks_are_refused_in_all_processes(family: str) -> None:
    blocks, message = _REFUSED[family]
    for rank in range(2):
        layers = {f"{blocks}.{n}.mlp": ShardLayer(64, (0,) if n == rank else ()) for n in range(2)}
        with pytest.raises(UnsupportedModelError, match=message):
            remove_other_blocks(families.tiny_family(family), Shard(rank, 2, layers))


TWO = {"layers.0.mlp": ShardLayer(64, (0,)), "layers.1.mlp": ShardLayer(64, ())}


def test_blocks_that_take_keys_and_values_of_others_are_refused() -> None:
    class Model(torch.nn.Module):
        config = Gemma4TextConfig(num_kv_shared_layers=2)

    with pytest.raises(UnsupportedModelError, match="keys and values of their own, found 2 that take those of others"):
        remove_other_blocks(Model(), Shard(0, 2, TWO))


@pytest.mark.slow
def test_a_stage_that_fails_tells_the_others_at_once(made: Path, tmp_path: Path) -> None:
    """Whichever call it is: who tries again must not have it taken for what the others wait for."""
    script = """
import time, torch_pi2
model = torch_pi2.load(sys.argv[4], group=torch_pi2.GroupConfig(timeout_s=60))
if rank == 1:
    model.torch_pi2.store.close()
began = time.perf_counter()
for first in (1, 2):
    try:
        model(torch.arange(first, 6)[None])
    except torch_pi2.Pi2Error as error:
        print(time.perf_counter() - began < 30, type(error).__name__, error)
"""
    first, second = together(tmp_path, script, 2, made / "thresholds" / "2")
    said = first.splitlines()
    assert said[0].startswith("True GroupError 2 processes that compute one model (this is 0)")
    assert "none of process 1, which says: ArtifactError" in said[0]
    assert second.startswith("True ArtifactError")
    for line in (said[1], second.splitlines()[1]):
        assert "expected a group of which no process has failed" in line


def test_what_a_block_returns_is_found_in_its_source() -> None:
    class Alone(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
            return hidden_states  # type: ignore[return-value]

    class ByName(torch.nn.Module):
        def forward(self, hidden_states: Any) -> Any:
            outputs = (hidden_states,)
            return outputs if hidden_states is None else (*outputs, None)

    class Added(torch.nn.Module):
        def forward(self, hidden_states: Any) -> Any:
            return (hidden_states,) + ()  # noqa: RUF005

    class Listed(torch.nn.Module):
        def forward(self, hidden_states: Any) -> Any:
            return [hidden_states]

    class Unnamed(torch.nn.Module):
        def forward(self, hidden_states, use=False):  # type: ignore[no-untyped-def]
            return hidden_states, use

    assert [_returns_one(kind) for kind in (Alone, ByName, Added, Listed, Unnamed)] == [True] + [False] * 4
    unknown = type("Unknown", (torch.nn.Module,), {"forward": eval("lambda self, x: x")})
    assert not _returns_one(unknown)


class _Block(torch.nn.Module):
    """With a weight beside its modules, as Doge's has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.mlp = torch.nn.Linear(4, 4)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class _Tuple(_Block):
    def forward(self, hidden_states, use=None):  # type: ignore[no-untyped-def]
        return hidden_states, use


class _Model(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([kind(), kind()])

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, ids: torch.Tensor, **_: Any) -> torch.Tensor:
        x = ids[..., None].float()
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_what_cannot_be_divided_is_refused(made: Path) -> None:
    shard = Shard(0, 2, TWO)
    with pytest.raises(UnsupportedModelError, match=r"_Tuple in stages: expected decoder blocks that return hidden "):
        remove_other_blocks(_Model(_Tuple), shard)
    with pytest.raises(UnsupportedModelError, match="block 1 called with something else after block 0"):
        remove_other_blocks(_Model(_Block), shard)
    with pytest.raises(UnsupportedModelError, match=r"_Model in stages: expected a causal language model with a head"):
        connect_stages(_Model(_Tuple), shard, cast(Any, None))
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([_Block(), _Block()])
    remove_other_blocks(model, shard)
    assert {name.split(".")[1] for name in model.state_dict()} == {"0"}
    stages, neurons = made / "tied" / "2", made / "tied" / "again"
    torch_pi2.pack(made / "tied" / "store", neurons, ranks=2)
    shutil.rmtree(neurons / "rank-1-of-2")
    shutil.copytree(stages / "rank-1-of-2", neurons / "rank-1-of-2")
    with pytest.raises(ArtifactError, match="shard 1 of 2 of the model of"):
        torch_pi2.pack(neurons, made / "tied" / "whole")
