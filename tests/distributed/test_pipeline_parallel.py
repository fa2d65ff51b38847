"""Models divided by layers among processes, as a pipeline: the bits of one machine."""

from __future__ import annotations

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
from torch_pi2.distributed.pipeline_parallel import _count_tokens, connect_stages, remove_other_blocks
from torch_pi2.errors import UnsupportedModelError
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


@pytest.mark.slow
def test_a_stage_has_only_its_own_layers(made: Path, tmp_path: Path) -> None:
    """Their hidden states, too: those of others are NaN."""
    script = """
import torch_pi2
model = torch_pi2.load(sys.argv[4])
stats = torch_pi2.stats(model)
layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
print([count > 0 for count in layers], stats["budget"].kv, sum(n for n, *_ in stats["store"].layers()))
few = torch.arange(1, 6)[None]
drawn = torch_pi2.generate(model, few, max_new_tokens=12, do_sample=True, seed=3)
by_transformers = model.generate(few, max_new_tokens=12, do_sample=False)
print(drawn.sequences, by_transformers.tolist())
torch.save(model(few, output_hidden_states=True).hidden_states, out / f"{rank}.pt")
"""
    store = made / "thresholds" / "store"
    found = together(tmp_path, script, 2, store.parent / "2")
    model: Any = torch_pi2.load(store, budget="1GiB")
    stats = torch_pi2.stats(model)
    neurons = sum(n for n, *_ in stats["store"].layers())
    drawn = torch_pi2.generate(model, FEW, max_new_tokens=12, do_sample=True, seed=3)
    greedy = model.generate(FEW, max_new_tokens=12, do_sample=False)
    wanted = result_of_one(store, "model(sharding.FEW, output_hidden_states=True).hidden_states")
    for rank, said in enumerate(found):
        here = [layer // 2 == rank for layer in range(4)]
        assert said.splitlines() == [
            f"{here} {stats['budget'].kv // 2} {neurons // 2}",
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


class _Chain:
    """Takes the place of a group: its processes run one after another in this one; ``sent`` is what they hand on."""

    def __init__(self, rank: int, size: int, sent: list[torch.Tensor]) -> None:
        self.rank, self.size, self._sent, self.logits_checked = rank, size, sent, False

    def run(self, work: Callable[..., torch.Tensor], *arguments: Any, **named: Any) -> torch.Tensor:
        return work(*arguments, **named)

    def send_next(self, own: torch.Tensor, rank: int) -> torch.Tensor:
        if rank < self.rank:
            return self._sent[rank]
        self._sent.append(own)
        return own

    def broadcast(self, own: torch.Tensor, _rank: int) -> torch.Tensor:
        return own


def _in_stages(make: Callable[[], Any], blocks: str, ranks: int, ids: torch.Tensor) -> torch.Tensor:
    """The logits of a model of ``ranks`` blocks, in as many stages."""
    sent: list[torch.Tensor] = []
    for rank in range(ranks):
        layers = {f"{blocks}.{n}.mlp": ShardLayer(64, (0,) if n == rank else ()) for n in range(ranks)}
        model, shard = make(), Shard(rank, ranks, layers)
        remove_other_blocks(model, shard)
        connect_stages(model, shard, cast(Any, _Chain(rank, ranks, sent)))
        with torch.no_grad():
            found = model(ids)
    logits: torch.Tensor = found if isinstance(found, torch.Tensor) else found.logits
    return logits


#: Family -> what its blocks' names begin with, and what of the model is refused when it is called.
_REFUSED = {
    "big_bird": ("bert.encoder.layer", "BigBirdLayer in stages: .* code that asks for 'attention' of block 1"),
    "bloom": ("transformer.h", "BloomBlock in stages: .* found one that returns a tuple"),
    "gemma3n_text": ("model.layers", "DynamicCache of a model in stages: .* found 2 layers and .4, 1, 8, 32."),
    "longcat_flash": ("model.layers", "DynamicCache of a model in stages: .* found 4 layers"),
    "openai-gpt": ("transformer.h", "Block in stages: .* found one that returns a list"),
    "recurrent_gemma": ("model.layers", "RecurrentGemmaDecoderLayer .* asks for 'temporal_block' of block 1"),
    "reformer": ("reformer.encoder.layers", "ReformerLayer .* found one that returns a ReformerOutput"),
}


@pytest.mark.parametrize("family", _REFUSED)
def test_models_that_need_more_of_their_blocks_are_refused(family: str) -> None:
    blocks, message = _REFUSED[family]
    with pytest.raises(UnsupportedModelError, match=message):
        _in_stages(lambda: families.tiny_family(family), blocks, 2, torch.arange(5, 13)[None])


@pytest.mark.parametrize(
    ("family", "blocks"),
    [
        ("llama", "model.layers"),
        ("git", "git.encoder.layer"),
        ("xlm", "transformer.ffns"),
        ("nemotron_h", "model.layers"),  # whose experts' blocks have no cache
    ],
)
def test_stages_have_the_logits_of_the_whole_model(family: str, blocks: str) -> None:
    """XLM has code and modules between what is divided, which every process computes."""
    ids, whole = torch.arange(5, 13)[None], families.tiny_family(family)
    with torch.no_grad():
        assert torch.equal(_in_stages(lambda: families.tiny_family(family), blocks, 2, ids), whole(ids).logits)


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


class _Block(torch.nn.Module):
    """With a weight beside its modules, as Doge's has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.mlp = torch.nn.Linear(4, 4)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.mlp(hidden_states)  # type: ignore[no-any-return]


class _Model(torch.nn.Module):
    """A row of blocks; ``skips``: the head takes the result of the first block, too."""

    def __init__(self, blocks: int, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([_Block() for _ in range(blocks)])
        self.head = torch.nn.Linear(4, 8)
        self.skips = skips

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = ids[..., None].float().expand(*ids.shape, 4)
        first = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(first if layer is self.layers[1] else x)
        return self.head(x + first if self.skips else x)  # type: ignore[no-any-return]


def test_hidden_states_of_blocks_elsewhere_are_not_used() -> None:
    ids = torch.arange(3)[None]
    with torch.no_grad():
        assert torch.equal(_in_stages(lambda: _Model(3), "layers", 3, ids), _Model(3)(ids))
    with pytest.raises(
        UnsupportedModelError, match="code outside of blocks that uses those of several: logits are NaN"
    ):
        _in_stages(lambda: _Model(3, skips=True), "layers", 3, ids)


def test_a_model_without_a_head_is_refused() -> None:
    model: Any = _Model(2)
    model.get_output_embeddings = lambda: None
    with pytest.raises(UnsupportedModelError, match=r"_Model in stages: expected a causal language model with a head"):
        connect_stages(model, Shard(0, 2, TWO), cast(Any, None))
    remove_other_blocks(model, Shard(0, 2, TWO))
    assert {name for name, _ in model.layers.named_parameters()} == {"0.scale", "0.mlp.weight", "0.mlp.bias"}
