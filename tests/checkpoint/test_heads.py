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
from torch_pi2.spec.shard import Shard, ShardLayer, apportioned

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
