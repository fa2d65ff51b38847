"""``Decoder.join``: sequences of several lengths that come and go between steps, each as if it were alone."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import VOCAB, tiny
from torch import nn

import torch_pi2
from torch_pi2.decode.decode import Decoder
from torch_pi2.errors import ConfigError, ShapeError, UnsupportedModelError

PROMPTS = [
    torch.randint(1, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(tokens)) for tokens in (7, 1, 40, 3)
]


def quantised() -> nn.Module:
    """All products are ours: the bits of a sequence do not depend on its company."""
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=VOCAB, hidden_act="relu")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    return torch_pi2.optimize(model, weights="int4", activations="int8")


def alone(model: nn.Module, prompt_1T: torch.Tensor, steps: int, **settings: bool) -> list[torch.Tensor]:
    """Logits ``[V]`` after the prompt and each greedy step."""
    decoder = Decoder(model, max_tokens=64, logits=True, **settings)
    found = [decoder.prompt(prompt_1T)]
    for _ in range(steps):
        found.append(decoder.step(found[-1].argmax(-1, keepdim=True)))
    return [logits_1V[0] for logits_1V in found]


@pytest.mark.parametrize("compiled", [False, True])
def test_each_sequence_has_the_bits_that_it_has_alone(compiled: bool) -> None:
    model = quantised()
    wanted = [alone(model, prompt_1T, 8, compiled=compiled) for prompt_1T in PROMPTS]
    decoder = Decoder(model, max_tokens=64, batch=3, compiled=compiled, logits=True)
    rows: list[int] = []  # which prompt is in each
    found: dict[int, list[torch.Tensor]] = {}

    def join(i: int) -> None:
        found[i] = [decoder.join(PROMPTS[i])[0]]
        rows.append(i)

    def step() -> None:
        ids_B1 = torch.stack([found[i][-1].argmax(-1, keepdim=True) for i in rows])
        for i, logits_V in zip(rows, decoder.step(ids_B1), strict=True):
            found[i].append(logits_V)

    join(0)
    step()
    join(1)
    join(2)
    assert decoder.lengths == [8, 1, 40]
    assert decoder.length == 40
    for _ in range(3):
        step()
    rows[:] = [rows[row] for row in decoder.keep([1, 2])]  # the first leaves, the last takes its row
    assert rows == [2, 1]
    assert decoder.lengths == [43, 4]
    join(3)
    for _ in range(2):
        step()
    for i, steps in {0: 4, 1: 5, 2: 5, 3: 2}.items():
        assert len(found[i]) == steps + 1
        assert all(torch.equal(*pair) for pair in zip(found[i], wanted[i], strict=False)), i


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "opt", "falcon", "nemotron", "drelu"]
)
def test_every_architecture(name: str) -> None:
    model = tiny(name)
    wanted = [alone(model, prompt_1T, 3, compiled=False) for prompt_1T in PROMPTS[:3]]
    decoder = Decoder(model, max_tokens=64, batch=3, compiled=False, logits=True)
    logits = [decoder.join(prompt_1T)[0] for prompt_1T in PROMPTS[:3]]
    for step in range(3):
        for found_V, of_this in zip(logits, wanted, strict=True):
            torch.testing.assert_close(found_V, of_this[step], rtol=0, atol=2e-4)
        logits = list(decoder.step(torch.stack([w[step].argmax(-1, keepdim=True) for w in wanted])))


def test_what_another_sequence_left_is_not_seen() -> None:
    """NaN, which attention other than ours would multiply by zero."""
    model = tiny("gemma2")
    decoder = Decoder(model, max_tokens=64, batch=2, compiled=False, logits=True)
    if decoder._positions:
        decoder.join(PROMPTS[0])
    decoder.prompt(PROMPTS[2])
    for memory in decoder._kv._memory:
        for tensor in memory.tensors():
            with torch.inference_mode():
                tensor[:, :, :40] = torch.nan
    for found, wanted in zip(
        (logits := decoder.prompt(PROMPTS[0]), decoder.step(logits.argmax(-1, keepdim=True))),
        alone(model, PROMPTS[0], 1, compiled=False),
        strict=True,
    ):
        assert torch.equal(found[0], wanted)


def test_a_join_that_fails_leaves_the_others_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama-relu")
    decoder = Decoder(model, max_tokens=64, batch=2, compiled=False, logits=True)
    wanted = alone(model, PROMPTS[0], 2, compiled=False)
    decoder.join(PROMPTS[0])

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", fails)
        with pytest.raises(KeyboardInterrupt):
            decoder.join(PROMPTS[2])
    assert (decoder.batch, decoder.lengths) == (1, [7])
    assert torch.equal(decoder.step(wanted[0].argmax(-1, keepdim=True)[None])[0], wanted[1])
    decoder.join(PROMPTS[1])
    assert decoder.lengths == [8, 1]


def test_take_back_and_the_room_of_several_lengths() -> None:
    decoder = Decoder(tiny("llama-relu"), max_tokens=41, batch=2, compiled=False)
    decoder.join(PROMPTS[0])
    decoder.join(PROMPTS[2])
    fed_B1 = torch.tensor([[3], [4]])
    first = decoder.step(fed_B1)
    with pytest.raises(
        ShapeError, match=r"\[2, 1\] and fewer than 41 tokens before it, found \[2, 1\] after 41 tokens"
    ):
        decoder.step(fed_B1)
    decoder.take_back(1)
    assert decoder.lengths == [7, 40]
    assert torch.equal(decoder.step(fed_B1), first)
    with pytest.raises(ShapeError, match="0 to 7 tokens, of 8 that were read, found 8"):
        decoder.take_back(8)


def test_refusals() -> None:
    model = tiny("llama-relu")
    decoder = Decoder(model, max_tokens=41, batch=2, compiled=False)
    decoder.join(PROMPTS[0])
    for wrong in (PROMPTS[0].expand(2, -1), torch.zeros(1, 41, dtype=torch.int64), PROMPTS[0][:, :0]):
        with pytest.raises(ShapeError, match=r"join: expected \[1, 1 to 40\] while there are fewer than 2 sequences"):
            decoder.join(wrong)
    with pytest.raises(ConfigError, match="join: expected tokens of 0 to"):
        decoder.join(torch.tensor([[VOCAB]]))
    decoder.join(PROMPTS[0])
    with pytest.raises(ShapeError, match=r"found \[1, 7\] beside 2. Let others leave first"):
        decoder.join(PROMPTS[0])
    eager = tiny("llama-relu")
    eager.set_attn_implementation("eager")
    decoder = Decoder(eager, max_tokens=41, batch=2, compiled=False)
    decoder.join(PROMPTS[0])  # alone it may
    with pytest.raises(UnsupportedModelError, match=r"uses sdpa, and has .* to decode sequences of several lengths"):
        decoder.join(PROMPTS[1])


def test_the_next_question_of_a_talk() -> None:
    """What is known of a prompt is not read again: the bits of reading all of it."""
    model = quantised()
    talk_1T = torch.randint(1, VOCAB, (1, 50), generator=torch.Generator().manual_seed(5))
    decoder = Decoder(model, max_tokens=64, compiled=False, logits=True)
    decoder.prompt(talk_1T[:, :30])
    decoder.step(talk_1T[:, 30:31])
    assert decoder.lengths == [31]
    other_1T = torch.cat([talk_1T[:, :28], talk_1T[:, 20:40]], 1)  # the last question was another
    for prompt_1T, known, again in ((other_1T, 28, 20), (talk_1T, 28, 22), (talk_1T, 49, 12), (talk_1T[:, :6], 3, 6)):
        read: list[int] = []
        hook = model.register_forward_pre_hook(
            lambda _, __, given, read=read: read.append(given["input_ids"].shape[1]), with_kwargs=True
        )
        found = decoder.prompt(prompt_1T, known=known)
        hook.remove()
        assert read == [again]
        wanted = alone(model, prompt_1T, 1, compiled=False)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(decoder.step(wanted[0].argmax(-1, keepdim=True)[None])[0], wanted[1])
    decoder.prompt(talk_1T)
    for prompt_1T, known in ((talk_1T, 50), (talk_1T, 60), (talk_1T, -1), (talk_1T[:, :20], 20)):
        with pytest.raises(ShapeError, match=r"prompt\(known=...\): expected 0, or one prompt of more tokens"):
            decoder.prompt(prompt_1T, known=known)
    assert decoder.lengths == [50]
    with pytest.raises(ShapeError, match="has so many"):
        Decoder(model, max_tokens=64, compiled=False).prompt(talk_1T, known=1)
