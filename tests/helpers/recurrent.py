"""Every family with recurrent states, tiny and random: what a ``Decoder`` of it does, and is it equal.

``python tests/helpers/recurrent.py`` writes docs/STATES.md; tests/decode/test_states.py compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import rwkv7s
import torch
from families import VOCAB, Cells, families, tiny_family, write
from families import committed as committed_in
from torch import nn

from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import UnsupportedModelError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "STATES.md"
#: Beside those whose code uses a cache of states: they keep their states elsewhere.
ELSEWHERE = ("minimax", "recurrent_gemma", "rwkv", "xlstm")
#: Some that the default test run looks at.
QUICK = ("nemotron_h", "mamba", "lfm2", "rwkv7")
PROMPT, NEW = 11, 14


@dataclass(frozen=True)
class Row(Cells):
    family: str
    layers: str
    steps: str
    recorded: str = "-"
    pieces: str = "-"
    continued: str = "-"
    joins: str = "-"
    forks: str = "-"
    drafts: str = "-"


def with_states() -> list[str]:
    """Families whose tiny model has recurrent states, and RWKV-7, whose code is here."""
    return sorted([*(name for name in families() if name in ELSEWHERE or _has_states(name)), "rwkv7"])


def tiny(family: str) -> nn.Module:
    return rwkv7s.model() if family == "rwkv7" else tiny_family(family)


@cache
def _has_states(family: str) -> bool:
    import importlib
    import inspect

    import transformers

    if families()[family][0] != "decoder":
        return False
    kind: Any = getattr(transformers, families()[family][1])
    return "update_conv_state" in inspect.getsource(importlib.import_module(kind.__module__))


def prompt(tokens: int = PROMPT, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB - 8, (1, tokens), generator=torch.Generator().manual_seed(seed))


def usual(model: Any, ids_1T: torch.Tensor, new: int = NEW, **more: Any) -> torch.Tensor:
    """The logits of transformers' own greedy answer, ``[new, V]``; ``more``: arguments of ``generate``."""
    model.generation_config.eos_token_id = None
    settings = {"max_new_tokens": new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    made = model.generate(ids_1T, **settings | more)
    return torch.cat(made.logits)


def stepped(decoder: Decoder, first_V: torch.Tensor, new: int = NEW, row: int = 0) -> torch.Tensor:
    """Logits of a greedy answer that begins with ``first_V``; all other rows repeat its tokens."""
    logits = [first_V]
    for _ in range(new - 1):
        token = int(logits[-1].argmax())
        logits.append(decoder.step(torch.full((decoder.batch, 1), token))[row])
    return torch.stack(logits)


def answered(model: nn.Module, ids_1T: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, Decoder]:
    decoder = Decoder(model, max_tokens=64, compiled=False, logits=True, **settings)
    return stepped(decoder, decoder.prompt(ids_1T)[0]), decoder


def off(made: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative difference; infinite if a token differs."""
    if not torch.equal(made.argmax(-1), wanted.argmax(-1)):
        return float("inf")
    return float((made - wanted).abs().max() / wanted.abs().max())


def said(made: torch.Tensor, wanted: torch.Tensor, done: str = "yes") -> str:
    return done if (found := off(made, wanted)) < 1e-4 else f"NO ({found:.1e})"


def tried(what: Callable[[], str]) -> str:
    """What came of it; a refusal by name is one, another error is wrong."""
    try:
        with torch.inference_mode():
            return what()
    except UnsupportedModelError:
        return "refused"
    except Exception as error:
        return f"NO ({type(error).__name__})"


def joined(model: nn.Module, wanted: torch.Tensor) -> str:
    """A second sequence is read beside the first, which goes on meanwhile and leaves."""
    decoder, other, ids = Decoder(model, max_tokens=64, batch=2, compiled=False, logits=True), prompt(5, 2), prompt()
    token = int(decoder.prompt(other)[0].argmax())
    for _ in decoder.add(ids):
        token = int(decoder.step(torch.tensor([[token]]))[0].argmax())
    decoder.retain([1])
    return said(stepped(decoder, decoder.step(ids[:, -1:])[0]), wanted)


def forked(model: nn.Module, wanted: torch.Tensor) -> str:
    decoder = Decoder(model, max_tokens=64, batch=3, compiled=False, logits=True)
    first_V = decoder.prompt(prompt())[0]
    decoder.fork(3)
    decoder.retain([2, 1])
    return said(stepped(decoder, first_V, row=1), wanted)


def continued(model: nn.Module) -> str:
    """The next question of a conversation, of 16 tokens more."""
    ids, more = prompt(), prompt(16, 3)
    whole, _ = answered(model, torch.cat([ids, more], 1))
    decoder = Decoder(model, max_tokens=64, compiled=False, logits=True)
    decoder.prompt(ids)
    first_V = decoder.prompt(torch.cat([ids, more], 1), known=PROMPT)[0]
    return said(stepped(decoder, first_V), whole, "yes" if decoder.continues else "read again")


def drafted(model: nn.Module, wanted: torch.Tensor) -> str:
    import torch_pi2

    made = torch_pi2.generate(model, prompt(), max_new_tokens=NEW, prompt_lookup=4, eos_token_id=[]).sequences[0]
    return "yes" if made == wanted.argmax(-1).tolist() else "NO"


def judge(family: str, make: Callable[[str], nn.Module] = tiny) -> Row:
    try:
        model: Any = make(family)
        kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ["of its own"]
        layers = ", ".join(dict.fromkeys(kinds))
        with torch.inference_mode():
            wanted = usual(model, prompt())
    except Exception as error:  # what a family's code does with a tiny configuration
        return Row(family, "-", f"not tried: {type(error).__name__}")
    steps = tried(lambda: said(answered(model, prompt(), recorded=False)[0], wanted))
    if steps != "yes":
        return Row(family, layers, steps)

    def recorded() -> str:
        made, decoder = answered(model, prompt())
        return said(made, wanted, "yes" if any(r.is_stable for r in decoder._runners.values()) else "eager")

    def pieces() -> str:
        made, decoder = answered(model, prompt(), chunk_tokens=4)
        return said(made, wanted, "yes" if decoder.continues else "read whole")

    cells = recorded, pieces, lambda: continued(model), lambda: joined(model, wanted), lambda: forked(model, wanted)
    return Row(family, layers, steps, *map(tried, (*cells, lambda: drafted(model, wanted))))


HEAD = """# Recurrent states

Written by `python tests/helpers/recurrent.py`, and compared with what it would write by the long tests
(tests/decode/test_states.py). Families of transformers (and `rwkv7`, which is here) whose layers have recurrent states
(Mamba's, of short convolutions, of linear attention) in place of keys and values or beside them, with random weights in
a tiny configuration. "Yes" is the greedy answer of transformers' own `generate`, with the same logits up to the order
of floating-point sums.

* **steps**: prompts and steps of a `Decoder`, and so `torch_pi2.generate`, `serve` and `model.generate`.
* **recorded**: steps are replayed without the model's Python code; "eager": its code makes other calls each time.
* **pieces**: prompts can be read in pieces (`chunk_tokens`, budgets); "read whole": transformers' code begins anew in
  each piece, which the Decoder notices, and reads the prompt whole.
* **continued**: the next question of a conversation keeps what was read and answered; "read again": as above.
* **joins**: sequences of several lengths are decoded together, and join and leave (`serve`); "refused": one by one.
* **forks**: several answers to one prompt.
* **drafts**: `prompt_lookup` and `assistant_model`. States cannot be taken back, so they are refused by name.

In a `Decoder` steps of Mamba-2, gated delta rules, RWKV-7 and short convolutions are by operators of ours
(torch_pi2/ops/states.py). `serve` keeps states after whole prompts, for those that go on there. A step that fails
drops its sequences. `model.generate` of prompts with padding uses transformers' own loop.
"""


def page(rows: list[Row]) -> str:
    table = [
        "| family | layers | steps | recorded | pieces | continued | joins | forks | drafts |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([HEAD, *table, *(row.line() for row in rows), ""])


#: Family -> its line in the committed page.
committed = partial(committed_in, PAGE)


def main() -> None:
    write(with_states(), judge, PAGE, page)


if __name__ == "__main__":
    main()
