"""Families of models with exact zeros, tiny and random: what works with each, and is it equal.

``python tests/helpers/exact.py`` writes docs/EXACT.md; tests/api/test_exact.py compares.
"""

from __future__ import annotations

import copy
import json
import tempfile
import traceback
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from captures import remembering
from families import Cells, _shortened, first_tensor, inputs_of, tiny_family, write
from families import committed as committed_in
from recurrent import NEW, answered, off, prompt, usual
from rewriting import count_op_calls
from rwkv7s import model as rwkv7
from tiny_experts import build
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import torch_pi2
import torch_pi2.compile as compile_module
from torch_pi2.base import progress
from torch_pi2.checkpoint.gguf import importing
from torch_pi2.errors import Pi2Error
from torch_pi2.graph import find
from torch_pi2.serve.batch import Batch, EndEvent, TokenEvent
from torch_pi2.serve.batch import Sequence as Served

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "EXACT.md"
GGUF = Path(importing.__file__).with_name("families.json")
#: Some that the default test run looks at.
QUICK = ("nemotron_h `MEM*E`", "bitnet")


#: Weights -> most of the dense model's logits that rounding may change (Frobenius norms); others are not of that model.
_LOST = {"int4": 0.6, "int8": 0.06}


@dataclass(frozen=True)
class Family:
    """``make``: the dense model. ``layers``: its feed-forward layers, each expert counted. ``gguf``: architecture in
    files. ``more``: arguments of ``generate``. ``untried``: a column that takes long."""

    make: Callable[[], Any]
    layers: int
    gguf: str = ""
    more: Callable[[], dict[str, Any]] = dict
    untried: str = ""


def _mixed(**more: Any) -> Any:
    kinds = [{"M": "mamba", "E": "moe", "*": "attention"}[kind] for kind in "MEM*E"]
    return tiny_family("nemotron_h", layers_block_type=kinds, num_hidden_layers=len(kinds), **more)


#: 4 experts each, and the shared expert of Nemotron-H.
FAMILIES: dict[str, Family] = {
    "nemotron_h `MEM*E`": Family(_mixed, 10, "nemotron_h_moe"),
    "nemotron_h `MEM*E`, latent": Family(lambda: _mixed(moe_latent_size=32), 10),
    "arcee": Family(lambda: tiny_family("arcee"), 2, "arcee"),
    "jais2": Family(lambda: tiny_family("jais2"), 2, "jais2"),
    "nemotron": Family(lambda: tiny_family("nemotron"), 2, "nemotron"),
    "persimmon": Family(lambda: tiny_family("persimmon"), 2, "persimmon"),
    "fuyu": Family(lambda: tiny_family("fuyu"), 2, "fuyu"),
    "bitnet": Family(lambda: tiny_family("bitnet"), 2, "bitnet"),
    "gemma3n_text": Family(lambda: tiny_family("gemma3n_text"), 2, "gemma3n", untried="bundle"),
    "t5": Family(lambda: tiny_family("t5", decoder_start_token_id=0), 4, "t5"),
    "m2m_100": Family(lambda: tiny_family("m2m_100"), 4),
    "opt": Family(lambda: tiny_family("opt"), 2, "opt"),
    "mixtral, relu": Family(lambda: build("Mixtral"), 8, untried="bundle"),
    "rwkv7": Family(rwkv7, 3, "rwkv7", untried="bundle"),
    "rwkv": Family(lambda: tiny_family("rwkv"), 2, "rwkv4"),
}


@dataclass(frozen=True)
class Row(Cells):
    family: str
    found: str
    equal: str = "-"
    generate: str = "-"
    decoder: str = "-"
    compiled: str = "-"
    int4: str = "-"
    int8: str = "-"
    gptq: str = "-"
    saved: str = "-"
    quantized: str = "-"
    stored: str = "-"
    served: str = "-"
    bundle: str = "-"
    gguf: str = "-"
    refused: str = ""


class Tried:
    """One family: its dense model, the optimised one, and a folder for files. Each method gives a cell."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.family, self.folder = family, folder
        self.dense: Any = family.make()
        self.inputs = inputs_of(self.dense)
        self.sparse: Any = torch_pi2.optimize(copy.deepcopy(self.dense))

    def logits(self, model: nn.Module) -> torch.Tensor:
        return first_tensor(model(**{name: value.clone() for name, value in self.inputs.items()}))

    def near(self, model: nn.Module, wanted: torch.Tensor) -> str:
        found = float((self.logits(model) - wanted).abs().max() / wanted.abs().max())
        return "yes" if found < 1e-5 else f"NO ({found:.1e})"

    def same(self, model: nn.Module, wanted: torch.Tensor) -> str:
        return "yes" if torch.equal(self.logits(model), wanted) else f"NO (bits; near: {self.near(model, wanted)})"

    @cached_property
    def wanted(self) -> torch.Tensor:
        return usual(self.dense, prompt(), **self.family.more())

    @cached_property
    def float_folder(self) -> Path:
        """The dense checkpoint."""
        copy.deepcopy(self.dense).save_pretrained(self.folder / "float")
        return self.folder / "float"

    def equal(self) -> str:
        return self.near(self.sparse, self.logits(self.dense))

    def generate(self) -> str:
        how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None} | self.family.more()
        made = self.sparse.generate(prompt(), **how)
        return "yes" if made[0, -NEW:].tolist() == self.wanted.argmax(-1).tolist() else "NO"

    def decoder(self) -> str:
        found = off(answered(self.sparse, prompt())[0], self.wanted)
        made = torch_pi2.generate(self.sparse, prompt(), max_new_tokens=NEW, eos_token_id=[]).sequences[0]
        return "yes" if found < 1e-4 and made == self.wanted.argmax(-1).tolist() else f"NO ({found:.1e})"

    def compiled(self) -> str:
        """Inductor's code is of no interest here: graphs run as they are."""

        def calls(model: nn.Module) -> int:
            names = "pi2::sparse_ffn", "pi2::experts_ffn"
            return sum(count_op_calls(lambda: self.logits(model), name) for name in names)

        torch._dynamo.reset()
        progress._said.clear()
        with patch.object(compile_module, "_inductor", lambda gm, inputs, mode: aot_eager(gm, inputs)):
            fast: Any = torch.compile(copy.deepcopy(self.dense), backend=compile_module.backend)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                near = self.near(fast, self.logits(self.dense))
            found, every = calls(fast), calls(self.sparse)
        torch._dynamo.reset()
        reasons = [str(one.message) for one in said if "dense" in str(one.message)]
        if near != "yes" or found == every:
            return near
        return f"{found} of {every}" if reasons else f"NO ({found} of {every}, in silence)"

    def quantised(self, weights: str, **how: Any) -> str:
        """As with every neuron computed (the same bits, if neurons are in the same order); the same bits from a folder;
        and near the same numbers as floats."""
        sparse = torch_pi2.optimize(copy.deepcopy(self.dense), method="exact", weights=weights, **how)
        wanted, name = self.logits(sparse), f"{weights}{how.get('quantization', '')}"
        every = torch_pi2.quantize_(copy.deepcopy(self.dense), weights, **how)
        torch_pi2.save(sparse, self.folder / name)
        alike = self.same if not how else self.near  # calibration puts neurons that fire often first
        lost = float((wanted - (dense := self.logits(self.dense))).norm() / dense.norm())
        cells = [alike(every, wanted), self.same(torch_pi2.load(self.folder / name), wanted)]
        cells += [self.near(torch_pi2.load_dense(self.folder / name), wanted)]
        cells += ["yes" if lost < _LOST[weights] else f"NO (loses {lost:.2f})"]
        return next((cell for cell in cells if cell != "yes"), "yes")

    def gptq(self) -> str:
        ids = torch.randint(3, 88, (24, 16), generator=torch.Generator().manual_seed(4))
        return self.quantised("int4", calibration=ids, quantization="gptq")

    def saved(self) -> str:
        torch_pi2.save(self.sparse, self.folder / "saved")
        return self.same(torch_pi2.load(self.folder / "saved"), self.logits(self.sparse))

    def quantized(self) -> str:
        """From folder to folder: what ``optimize`` and ``save`` give."""
        sparse = torch_pi2.optimize(copy.deepcopy(self.dense), weights="int4")
        torch_pi2.quantize(self.float_folder, self.folder / "quantized")
        return self.same(torch_pi2.load(self.folder / "quantized"), self.logits(sparse))

    def stored(self) -> str:
        """Of the dense folder, and of one in 4 bits."""
        cells = []
        for name, source in (("float", self.float_folder), ("int4", self.folder / "quantized")):
            torch_pi2.pack(source, self.folder / f"store-{name}")
            whole = self.sparse if name == "float" else torch_pi2.load(source)
            over = torch_pi2.load(self.folder / f"store-{name}", budget="1GiB", context=64)
            # a layer that stays dense in memory has neurons in a store, which sum in another order
            alike = self.near if whole is self.sparse and whole.torch_pi2.left else self.same
            cells.append(alike(over, self.logits(whole)))
        return next((cell for cell in cells if cell != "yes"), "yes")

    def served(self) -> str:
        """One request, then two together."""
        prompts = prompt()[0].tolist(), prompt(5, 2)[0].tolist()
        wanted = [self.wanted, usual(self.dense, torch.tensor([prompts[1]]), **self.family.more())]
        for some in ([0], [0, 1]):
            made: dict[int, list[Any]] = {i: [] for i in some}
            batch = Batch(self.sparse, max_tokens=64, max_batch_size=2)
            for i in some:
                batch.submit(Served(prompts[i], NEW, made[i].append))
            batch.start()
            batch.close()
            for i, events in made.items():
                if isinstance(events[-1], EndEvent) and events[-1].error is not None:
                    raise events[-1].error
                tokens = [event.token for event in events if isinstance(event, TokenEvent)]
                if tokens != wanted[i].argmax(-1).tolist():
                    return f"NO ({len(some)} requests)"
        return "yes"

    def bundle(self) -> str:
        folder = torch_pi2.export(self.sparse, self.folder / "bundle", max_tokens=32, max_prompt=16, batches=(1,))
        with torch_pi2.Bundle(folder) as bundle:
            made = bundle.generate(prompt()[0].tolist(), NEW).sequences[0].ids
        return "yes" if made == self.wanted.argmax(-1).tolist() else "NO"

    def gguf(self) -> str:
        return "yes" if self.family.gguf in {one["arch"] for one in json.loads(GGUF.read_text())} else "no"

    @property
    def cells(self) -> dict[str, Callable[[], str]]:
        own = {"int4": partial(self.quantised, "int4"), "int8": partial(self.quantised, "int8")}
        return {one.name: own.get(one.name) or getattr(self, one.name) for one in fields(Row)[2:-1]}


def judge(name: str, without: Collection[str] = ()) -> Row:
    """Every cell but those ``without``; nothing is raised."""
    reasons: dict[str, list[str]] = {}

    def cell(column: str, what: Callable[[], str]) -> str:
        try:
            with torch.no_grad():
                return what()
        except Pi2Error as error:
            reasons.setdefault(_shortened(f"{error.expected}; found {error.found}", 240), []).append(column)
            return "refused"
        except Exception as error:
            traceback.print_exc()
            return f"NO ({type(error).__name__})"

    family = FAMILIES[name]
    with tempfile.TemporaryDirectory() as folder:
        tried = Tried(family, Path(folder))
        state = tried.sparse.torch_pi2
        found = len(state.plan.layers)
        if found + len(state.left) != family.layers:
            return Row(name, f"NO ({found} and {len(state.left)} left, of {family.layers})")
        if state.left:
            reasons["; ".join(dict.fromkeys(state.left.values()))] = [f"{len(state.left)} layers"]
        without = {*without, family.untried}
        cells = {column: cell(column, what) for column, what in tried.cells.items() if column not in without}
    some = str(found) if found == family.layers else f"{found} of {family.layers}"
    return Row(name, some, **cells, refused="; ".join(f"{', '.join(each)}: {why}" for why, each in reasons.items()))


HEAD = """# Models with exact zeros

Written by `python tests/helpers/exact.py`, and compared with what it would write by the long tests
(tests/api/test_exact.py). Families whose feed-forward layers have exact zeros, so that skipping loses nothing, with
random weights in a tiny configuration, float32: transformers' own classes, and `rwkv7`, which is here. Each cell was
compared with the dense model in numbers. "Refused": an error that says why, in the last column; "-": not
tried, as it takes minutes.

* **found**: layers that `torch_pi2.optimize(model)` makes sparse, each expert counted.
* **equal**: logits with the exact gate differ from the dense model's by at most 1e-5 of the largest.
* **generate**: `model.generate` gives the dense model's tokens.
* **decoder**: so do `torch_pi2.generate` and `Decoder`, whose logits are near.
* **compiled**: `torch.compile(backend="torch_pi2")` of the dense model is equal; every layer, or what it names.
* **int4**, **int8**: `optimize(weights=...)` gives the bits of `quantize_`, which computes every neuron; after `save`
  and `load`, too; and what the dense model gives with the same numbers as floats.
* **gptq**: the same with `quantization="gptq"`, but for the order of sums.
* **saved**: `save` and `load` give the same bits.
* **quantized**: `torch_pi2.quantize` of the folder gives the bits of `optimize(weights="int4")`.
* **stored**: `pack` of the folder, in floats and in 4 bits, and `load(budget=...)` give the bits of memory.
* **served**: one request, and two together, have the dense model's tokens.
* **bundle**: `torch_pi2.export`; ExecuTorch gives the dense model's tokens.
* **gguf**: GGUF files of the family are read ([GGUF](GGUF.md)).

`mixtral, relu` has the formula of SmallThinker's experts.
"""


def page(rows: list[Row]) -> str:
    titles = [one.name for one in fields(Row)]
    return "\n".join([HEAD, f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}", *(row.line() for row in rows), ""])


#: Family -> its line in the committed page.
committed = partial(committed_in, PAGE)


def main() -> None:
    with patch.object(find, "capture", remembering(find.capture)):
        write(FAMILIES, judge, PAGE, page)


if __name__ == "__main__":
    main()
