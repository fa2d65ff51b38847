"""Models with recurrent states: steps, pieces of prompts, several sequences; what cannot be is refused by name."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import recurrent
import torch
from families import tiny_family
from recurrent import QUICK, answered, committed, judge, off, prompt, usual, with_states
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_pi2
from torch_pi2.decode import step_graph, step_program
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import NonFiniteError, ShapeError, UnsupportedModelError
from torch_pi2.serve.batch import Batch, EndEvent, Sequence, TokenEvent


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_family("nemotron_h")


@pytest.mark.parametrize("family", QUICK)
def test_steps_and_pieces_are_those_of_transformers(family: str) -> None:
    model = recurrent.tiny(family)
    wanted = usual(model, prompt())
    made, decoder = answered(model, prompt())
    assert off(made, wanted) < 1e-5
    assert any(runner.is_stable for runner in decoder._runners.values())
    made, decoder = answered(model, prompt(), chunk_tokens=4)
    assert off(made, wanted) < 1e-5
    assert decoder.continues is (family != "mamba")


class _Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("family", "recurrences", "convolutions"),
    [("nemotron_h", 1, 1), ("mamba", 0, 2), ("qwen3_next", 1, 1), ("lfm2", 0, 1), ("rwkv7", 3, 0)],
)
def test_steps_are_by_our_operators(family: str, recurrences: int, convolutions: int) -> None:
    model = recurrent.tiny(family)
    wanted = usual(model, prompt())
    with _Counts() as counts:
        made, _ = answered(model, prompt())
    assert off(made, wanted) < 1e-5
    found = counts.calls["pi2.recurrence.default"], counts.calls["pi2.conv_step.default"]
    steps = recurrent.NEW - 1
    assert found == (steps * recurrences, steps * convolutions)
    if family != "rwkv7":  # transformers' functions are its own elsewhere
        with _Counts() as counts:
            usual(model, prompt(), 2)
        assert not any("pi2" in name for name in counts.calls)


@pytest.mark.slow
@pytest.mark.parametrize("family", QUICK)
def test_what_the_page_says(family: str) -> None:
    assert judge(family).line() == committed()[family], "python tests/helpers/recurrent.py writes docs/STATES.md"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", [name for name in committed() if name not in QUICK])
def test_what_the_page_says_of_the_others(family: str) -> None:
    assert judge(family).line() == committed()[family], "python tests/helpers/recurrent.py writes docs/STATES.md"


@pytest.mark.slow
def test_the_page_has_every_family_and_none_is_wrong() -> None:
    assert list(committed()) == with_states()
    assert not [line for line in committed().values() if "| NO" in line]
    rows = [recurrent.Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in committed().values()]
    assert recurrent.PAGE.read_text() == recurrent.page(rows)


def test_forgotten_states_show(model: nn.Module) -> None:
    """The comparison here notices wrong states."""
    wanted = usual(model, prompt())
    decoder = Decoder(model, max_tokens=64, compiled=False, logits=True)
    first_V = decoder.prompt(prompt())[0]
    with torch.inference_mode():
        decoder._kv.clear_states(0)
    assert off(recurrent.stepped(decoder, first_V), wanted) > 1e-4


def test_nothing_is_taken_back_in_silence(model: nn.Module) -> None:
    decoder = Decoder(model, max_tokens=64, compiled=False, logits=True)
    decoder.prompt(prompt())
    with pytest.raises(UnsupportedModelError, match="recurrent states"):
        decoder.verify(torch.tensor([[5, 6]]))
    with pytest.raises(UnsupportedModelError, match="recurrent states"):
        decoder.rollback(1)
    kv, (tokens, states) = [decoder.copy_kv(0, 0, 4)], decoder.copy_states(0)
    decoder.retain([])
    for wrong in (None, (tokens, states)):  # states after other tokens than those of the keys and values
        with pytest.raises(ShapeError, match="recurrent states"):
            list(decoder.add(prompt(), kv, wrong))
    decoder.prompt(prompt())
    with pytest.raises(UnsupportedModelError, match="prompt_lookup of NemotronH"):
        torch_pi2.generate(model, prompt(), prompt_lookup=3)
    with pytest.raises(UnsupportedModelError, match="assistant_model of NemotronH"):
        torch_pi2.generate(model, prompt(), assistant_model=copy.deepcopy(model))
    assert len(decoder.step(torch.tensor([[5]]))) == 1


@pytest.mark.parametrize("known", [recurrent.PROMPT, 4])
def test_the_next_question_of_a_conversation(model: nn.Module, known: int) -> None:
    """States of all known tokens go on; of fewer there are none, and the prompt is read whole."""
    ids = torch.cat([prompt(), prompt(16, 3)], 1)
    wanted = usual(model, ids)
    decoder = Decoder(model, max_tokens=64, compiled=False, logits=True)
    decoder.prompt(prompt())
    assert off(recurrent.stepped(decoder, decoder.prompt(ids, known=known)[0]), wanted) < 1e-5


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_short_prompts_beside_another_sequence(model: nn.Module, tokens: int) -> None:
    ids = prompt(tokens, 4)
    wanted = usual(model, ids)
    decoder = Decoder(model, max_tokens=64, batch=2, compiled=False, logits=True)
    decoder.prompt(prompt())
    for _ in decoder.add(ids):
        decoder.step(torch.tensor([[7]]))
    decoder.retain([1])
    assert off(recurrent.stepped(decoder, decoder.step(ids[:, -1:])[0]), wanted) < 1e-5


@pytest.mark.parametrize("after", [1, 20])  # recorded steps, too
def test_a_step_that_fails_drops_its_sequences(monkeypatch: pytest.MonkeyPatch, model: Any, after: int) -> None:
    decoder = Decoder(model, max_tokens=64, compiled=False, logits=True)
    decoder.prompt(prompt())
    for token in range(5, 5 + after):
        decoder.step(torch.tensor([[token]]))
    with monkeypatch.context() as patched, torch.inference_mode():
        weight = model.get_output_embeddings().weight
        patched.setattr(weight, "data", weight.data * float("nan"))
        with pytest.raises(NonFiniteError):
            decoder.step(torch.tensor([[5]]))
    with pytest.raises(ShapeError, match="prompt before it"):
        decoder.step(torch.tensor([[5]]))
    assert off(recurrent.stepped(decoder, decoder.prompt(prompt())[0]), usual(model, prompt())) < 1e-5


def test_served_sequences_join_and_leave(model: nn.Module) -> None:
    prompts = [prompt(tokens, seed)[0].tolist() for seed, tokens in enumerate((9, 1, 20, 3, 14))]
    limits = [5, 12, 3, 20, 8]
    wanted = [usual(model, torch.tensor([ids]), limit).argmax(-1).tolist() for ids, limit in zip(prompts, limits)]
    made: list[list[int]] = [[] for _ in prompts]
    ends: list[EndEvent] = []

    def tell(i: int, event: TokenEvent | EndEvent) -> None:
        if isinstance(event, TokenEvent):
            made[i].append(event.token)
        else:
            ends.append(event)

    batch = Batch(model, max_tokens=64, max_batch_size=3, prefix_bytes=1 << 20)
    for i, ids in enumerate(prompts):
        batch.submit(Sequence(ids, limits[i], lambda event, i=i: tell(i, event)))  # type: ignore[misc]
    batch.start()
    batch.close()
    assert [end.reason for end in ends] == ["length"] * len(prompts)
    assert made == wanted


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_steps_that_read_states_before_they_change_them_become_programs(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Each program is compared with what PyTorch computed from the states of before."""
    translations, model = [], tiny_family(family)

    def translated(*given: Any) -> Any:
        translations.append(step_program.translated(*given))
        return translations[-1]

    monkeypatch.setattr(step_graph, "translated", translated)
    made, _ = answered(model, prompt())
    assert off(made, usual(model, prompt())) < 1e-5
    assert [len(translation.programs) > 3 for _, translation in translations] == [True]


@pytest.mark.slow
def test_compiled_steps() -> None:
    model = tiny_family("bamba")
    decoder = Decoder(model, max_tokens=64, logits=True)
    made = recurrent.stepped(decoder, decoder.prompt(prompt())[0])
    assert off(made, usual(model, prompt())) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("weights", [{}, {"weights": "int8"}])
def test_optimised_models_and_padded_prompts(model: nn.Module, weights: dict[str, str]) -> None:
    """``torch_pi2.generate`` and ``model.generate``; a prompt with padding gives what it gives alone."""
    ours: Any = torch_pi2.optimize(copy.deepcopy(model), method="exact", **weights)
    alone = ours.generate(prompt(), max_new_tokens=8, do_sample=False)[0, recurrent.PROMPT :].tolist()
    assert torch_pi2.generate(ours, prompt(), max_new_tokens=8).sequences[0] == alone
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), prompt()], 1)
    ids, mask = torch.cat([padded, prompt(14, 5)]), torch.ones(2, 14, dtype=torch.int64)
    mask[0, :3] = 0
    made = ours.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert made[0, 14:].tolist() == alone
