"""Shards of neurons whose processes divide attention by heads: the bits of one machine, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_experts
import tiny_models
import torch
from sharding import ANSWERS, answers_of_one, check_answers, made_in_parts, saved, together

import torch_pi2
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.layers.heads import Heads
from torch_pi2.types.shard import Shard, ShardLayer, apportioned

pytestmark = pytest.mark.usefixtures("one_thread")

#: Three key-value heads, each of two queries, of another width together than hidden states: two processes have two and
#: one, three one each.
HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}
WIDE = {"intermediate_size": 200, **HEADS}
BITS = ("few", "steps")


def _tiny(family: str, **config: Any) -> Any:
    torch.manual_seed(0)
    return tiny_models.randomise(tiny_models._hf(family, **WIDE | config).eval())


def _int4(folder: Path) -> None:
    _tiny("Llama", hidden_act="relu", attention_bias=True).save_pretrained(folder / "plain")
    torch_pi2.quantize(folder / "plain", folder / "int4", weights="int4")
    torch_pi2.pack(folder / "int4", folder / "store")


MADE: dict[str, Callable[[Path], None]] = {
    "Llama, floats": lambda f: saved(f, _tiny("Llama", hidden_act="relu"), method="exact"),
    "Llama, int4, biases": _int4,
    "Qwen3, norms of heads": lambda f: saved(f, _tiny("Qwen3", hidden_act="relu"), method="exact"),
    "Mixtral": lambda f: saved(f, tiny_experts.build("Mixtral", intermediate_size=136, **HEADS), method="exact"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models, each with a store and its shards."""
    return made_in_parts(tmp_path_factory, "models-with-heads", MADE)


@pytest.mark.parametrize("name", MADE)
def test_two_processes_have_the_bits_of_one(made: Path, name: str, tmp_path: Path) -> None:
    together(tmp_path, ANSWERS, 2, made / name / "2", "chunks", "", "", "heads")
    check_answers(tmp_path, 2, answers_of_one(made / name / "store"), same=() if name == "Mixtral" else BITS)


@pytest.mark.parametrize("reduction", ["chunks", "ranks"])
def test_three_processes_compiled(made: Path, reduction: str, tmp_path: Path) -> None:
    store = made / "Llama, int4, biases" / "store"
    together(tmp_path, ANSWERS, 3, store.parent / "3", reduction, "compiled", "", "heads")
    check_answers(tmp_path, 3, answers_of_one(store, compiled=True), same=BITS if reduction == "chunks" else ())


def test_memory_is_of_the_heads_that_are_here(made: Path, tmp_path: Path) -> None:
    """Weights, and keys and values: of three heads, two and one."""
    script = """
import torch_pi2
for attention in ("whole", "heads"):
    model = torch_pi2.load(sys.argv[4], context=4096, group=torch_pi2.GroupConfig(attention=attention))
    budget, layer = torch_pi2.stats(model)["budget"], model.model.layers[0].self_attn
    rows = [getattr(layer, name).out_features for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    print(budget.kv, budget.fixed, rows, sum(b.nbytes for _, b in layer.named_buffers()))
"""
    said = together(tmp_path, script, 2, made / "Llama, int4, biases" / "2")
    for one, heads in zip(said, (2, 1), strict=True):
        (kv, fixed, rows, nbytes), (own_kv, own_fixed, own_rows, own_bytes) = map(_figures, one.splitlines())
        assert rows == [192, 96, 96, 96]
        assert own_rows == [64 * heads, 32 * heads, 32 * heads, 96]
        assert own_kv == kv * heads // 3
        layers = tiny_models.LAYERS
        assert fixed - own_fixed == layers * (nbytes - own_bytes) > 0


def _figures(line: str) -> Any:
    kv, fixed, rows = line.split(" ", 2)
    rows, nbytes = rows.rsplit(" ", 1)
    return int(kv), int(fixed), [*map(int, rows[1:-1].split(","))], int(nbytes)


def test_heads_are_dealt_out_as_neurons_are() -> None:
    """At least one each; of grouped ones all queries of a key."""
    config = _tiny("Llama", num_attention_heads=12, num_key_value_heads=6).config
    shards = _shards([0, 1, 2, 3, 4], [5, 6], [7])
    assert [Heads(config, shards, 0).counts, Heads(config, shards, 2).share] == [[4, 1, 1], 1 / 6]


@pytest.mark.parametrize(
    ("shares", "count", "expected"),
    [
        ((8, 8), 8, [4, 4]),
        ((12, 4), 8, [6, 2]),
        ((15, 1), 4, [3, 1]),
        ((6, 5, 5), 8, [3, 3, 2]),
        ((1, 1, 14), 3, [1, 1, 1]),
    ],
)
def test_as_many_heads_as_its_share(shares: tuple[int, ...], count: int, expected: list[int]) -> None:
    assert apportioned(count, [share / sum(shares) for share in shares]) == expected


def _shards(*chunks: list[int]) -> list[Shard]:
    """Of a layer of 8 chunks of 64 neurons."""
    keys = [f"model.layers.{i}.mlp" for i in range(2)]
    return [
        Shard(rank, len(chunks), {key: ShardLayer(512, tuple(mine)) for key in keys})
        for rank, mine in enumerate(chunks)
    ]


def _without_keys() -> Any:
    """As layers are that take the keys and values of others."""
    model = _tiny("Llama")
    del model.model.layers[1].self_attn.k_proj
    return model


REFUSED: list[tuple[Callable[[], Any], int, str]] = [
    (
        lambda: tiny_models._hf("OPT", ffn_dim=200, word_embed_proj_dim=32),
        2,
        "attention of opt by heads: expected a plan",
    ),
    (
        lambda: tiny_models._hf("Phi3"),
        2,
        "attention of phi3 by heads: expected a plan of tensor parallelism with q_proj",
    ),
    (
        lambda: _tiny("Llama"),
        4,
        "expected a key-value head for each of 4 processes, found 3. Leave attention whole: Gro",
    ),
    (
        lambda: _tiny("Cohere", use_qk_norm=True),
        2,
        r"expected model.layers.0.self_attn with 3 key-value heads, linear projections, and nothing else of each head, "
        "found a CohereAttention",
    ),
    (
        lambda: torch.nn.Sequential(_tiny("Llama")),  # under another name
        2,
        "expected attention in the blocks of feed-forward layers, found none",
    ),
    (_without_keys, 2, "expected model.layers.1.self_attn with 3 key-value heads, .* found a LlamaAttention"),
]


@pytest.mark.parametrize(("model", "ranks", "message"), REFUSED)
def test_what_cannot_be_divided_is_refused_by_name(model: Callable[[], Any], ranks: int, message: str) -> None:
    made, shards = model(), _shards(*([i] for i in range(ranks)))
    config = made[0].config if isinstance(made, torch.nn.Sequential) else made.config
    with pytest.raises(UnsupportedModelError, match=message):
        Heads(config, shards, 0).rows(made)


def test_stages_have_whole_heads() -> None:
    shard = Shard(0, 2, {"model.layers.0.mlp": ShardLayer(64, (0,)), "model.layers.1.mlp": ShardLayer(64, ())})
    with pytest.raises(
        UnsupportedModelError, match="expected shards of neurons, found stages, which have whole layers"
    ):
        Heads(_tiny("Llama").config, [shard, shard], 0)
    with pytest.raises(ConfigError, match=r"GroupConfig.attention: expected .*whole.*heads"):
        torch_pi2.GroupConfig(attention="half")
