"""``Decoder.add``: sequences of several lengths that come and go between steps, each as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import transformers
from shared import small_store
from tiny_models import VOCAB, tiny
from torch import nn

import torch_pi2
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ConfigError, ShapeError, UnsupportedModelError
from torch_pi2.layers.prompt import has_tiles

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


def join(decoder: Decoder, prompt_1T: torch.Tensor, known: Sequence[list[torch.Tensor]] = ()) -> torch.Tensor:
    """What the next step is to be fed with ``[1]``."""
    for _ in decoder.add(prompt_1T, known):
        pass
    return prompt_1T[0, -1:]


def alone(model: nn.Module, prompt_1T: torch.Tensor, steps: int, **settings: bool) -> list[torch.Tensor]:
    """Logits ``[V]`` after the prompt and each greedy step."""
    decoder = Decoder(model, max_tokens=64, logits=True, **settings)
    found = [decoder.step(join(decoder, prompt_1T)[None])]
    for _ in range(steps):
        found.append(decoder.step(found[-1].argmax(-1, keepdim=True)))
    return [logits_1V[0] for logits_1V in found]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_sequence_has_the_bits_that_it_has_alone(compiled: bool) -> None:
    model = quantised()
    wanted = [alone(model, prompt_1T, 8, compiled=compiled) for prompt_1T in PROMPTS]
    decoder = Decoder(model, max_tokens=64, batch=3, compiled=compiled, logits=True)
    rows: list[int] = []  # which prompt is in each
    found: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(PROMPTS))}

    def comes(i: int) -> None:
        join(decoder, PROMPTS[i])
        rows.append(i)

    def step() -> None:
        fed = [found[i][-1].argmax(-1, keepdim=True) if found[i] else PROMPTS[i][0, -1:] for i in rows]
        for i, logits_V in zip(rows, decoder.step(torch.stack(fed)), strict=True):
            found[i].append(logits_V)

    comes(0)
    step()
    comes(1)
    comes(2)
    assert decoder.lengths == [7, 0, 39]
    assert decoder.length == 39
    for _ in range(3):
        step()
    rows[:] = [rows[row] for row in decoder.retain([1, 2])]  # the first leaves, the last takes its row
    assert rows == [2, 1]
    assert decoder.lengths == [42, 3]
    comes(3)
    for _ in range(2):
        step()
    for i, steps in {0: 4, 1: 5, 2: 5, 3: 2}.items():
        assert len(found[i]) == steps
        assert all(torch.equal(*pair) for pair in zip(found[i], wanted[i], strict=False)), i


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "opt", "falcon", "nemotron", "drelu"]
)
def test_every_architecture(name: str) -> None:
    model = tiny(name)
    wanted = [alone(model, prompt_1T, 3, compiled=False) for prompt_1T in PROMPTS[:3]]
    decoder = Decoder(model, max_tokens=64, batch=3, compiled=False, logits=True)
    fed_B1 = torch.stack([join(decoder, prompt_1T) for prompt_1T in PROMPTS[:3]])
    for step in range(4):
        for found_V, of_this in zip(decoder.step(fed_B1), wanted, strict=True):
            torch.testing.assert_close(found_V, of_this[step], rtol=0, atol=2e-4)
        fed_B1 = torch.stack([of_this[step].argmax(-1, keepdim=True) for of_this in wanted])


def test_what_another_sequence_left_is_not_seen() -> None:
    """NaN, which attention other than ours would multiply by zero."""
    model = tiny("gemma2")
    decoder = Decoder(model, max_tokens=64, batch=2, compiled=False, logits=True)
    decoder.prompt(PROMPTS[2])
    for memory in decoder._kv._memory:
        for tensor in memory.tensors():
            with torch.inference_mode():
                tensor[:, :, :40] = torch.nan
    other = Decoder(model, max_tokens=64, compiled=False, logits=True)
    for one in (decoder, other):
        one.prompt(PROMPTS[0])
    assert torch.equal(decoder.step(PROMPTS[1]), other.step(PROMPTS[1]))


def test_a_join_that_fails_leaves_the_others_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama-relu")
    decoder = Decoder(model, max_tokens=64, batch=2, compiled=False, logits=True)
    wanted = alone(model, PROMPTS[0], 2, compiled=False)
    join(decoder, PROMPTS[0])

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", fails)
        with pytest.raises(KeyboardInterrupt):
            join(decoder, PROMPTS[2])
    assert (decoder.batch, decoder.lengths) == (1, [6])
    assert torch.equal(decoder.step(PROMPTS[0][:, -1:])[0], wanted[0])
    join(decoder, PROMPTS[1])
    assert decoder.lengths == [7, 0]


def test_take_back_and_the_room_of_several_lengths() -> None:
    decoder = Decoder(tiny("llama-relu"), max_tokens=41, batch=2, compiled=False)
    join(decoder, PROMPTS[0])
    join(decoder, PROMPTS[2])
    decoder.step(torch.tensor([[1], [2]]))
    fed_B1 = torch.tensor([[3], [4]])
    first = decoder.step(fed_B1)
    with pytest.raises(
        ShapeError, match=r"\[2, 1\] and fewer than 41 tokens before it, found \[2, 1\] after 41 tokens"
    ):
        decoder.step(fed_B1)
    decoder.rollback(1)
    assert decoder.lengths == [7, 40]
    assert torch.equal(decoder.step(fed_B1), first)
    with pytest.raises(ShapeError, match="0 to 7 tokens, of 8 that were read, found 8"):
        decoder.rollback(8)


def test_refusals() -> None:
    model = tiny("llama-relu")
    decoder = Decoder(model, max_tokens=41, batch=2, compiled=False)
    join(decoder, PROMPTS[0])
    for wrong in (PROMPTS[0].expand(2, -1), torch.zeros(1, 41, dtype=torch.int64), PROMPTS[0][:, :0]):
        with pytest.raises(ShapeError, match=r"add: expected \[1, 1 to 40\] while there are fewer than 2 seq"):
            join(decoder, wrong)
    with pytest.raises(ConfigError, match="add: expected tokens of 0 to"):
        join(decoder, torch.tensor([[VOCAB]]))
    join(decoder, PROMPTS[0])
    with pytest.raises(ShapeError, match=r"found \[1, 7\] beside 2. Drop others first"):
        join(decoder, PROMPTS[0])
    other = tiny("llama-relu")
    other.set_attn_implementation("flex_attention")
    decoder = Decoder(other, max_tokens=41, batch=2, compiled=False)
    decoder.lengths = [7]  # as after a prompt, which alone it may read
    with pytest.raises(UnsupportedModelError, match=r"uses sdpa, and has .* to decode sequences of several lengths"):
        join(decoder, PROMPTS[1])


def test_masks_that_are_added_to_scores() -> None:
    """As models with eager attention have them (Gemma 2): sequences of several lengths, each what it is alone."""
    model = tiny("llama-relu")
    model.set_attn_implementation("eager")
    together = Decoder(model, max_tokens=64, batch=len(PROMPTS), compiled=False)
    for prompt_1T in PROMPTS:
        join(together, prompt_1T)
    ids_B1 = torch.cat([prompt_1T[:, -1:] for prompt_1T in PROMPTS])
    found = [ids_B1 := together.step(ids_B1) for _ in range(12)]
    for row, prompt_1T in enumerate(PROMPTS):
        wanted = model.generate(prompt_1T, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, -12:]
        assert [int(ids[row]) for ids in found] == wanted.tolist()


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
        other = Decoder(model, max_tokens=64, compiled=False, logits=True)
        assert torch.equal(found, other.prompt(prompt_1T))
        assert torch.equal(decoder.step(PROMPTS[1]), other.step(PROMPTS[1]))
    decoder.prompt(talk_1T)
    for prompt_1T, known in ((talk_1T, 50), (talk_1T, 60), (talk_1T, -1), (talk_1T[:, :20], 20)):
        with pytest.raises(ShapeError, match=r"prompt\(known=...\): expected 0, or one prompt of more tokens"):
            decoder.prompt(prompt_1T, known=known)
    assert decoder.lengths == [50]
    with pytest.raises(ShapeError, match="has so many"):
        Decoder(model, max_tokens=64, compiled=False).prompt(talk_1T, known=1)


@pytest.mark.skipif(not has_tiles(), reason="pieces are lossless where the kernels have tiles")
def test_steps_between_the_pieces_of_a_prompt() -> None:
    """Neither sees the other; pieces are short while there are others, and have the same bits."""
    model = quantised()
    long_1T = torch.randint(1, VOCAB, (1, 301), generator=torch.Generator().manual_seed(6))
    decoders = [Decoder(model, max_tokens=310, batch=3, compiled=False, logits=True) for _ in range(3)]
    beside, alone_long, alone_short = decoders
    assert list(alone_long.add(long_1T)) == [150, 0]
    wanted = [join(one, PROMPTS[i]) for one, i in ((alone_short, 0), (beside, 0))]
    join(beside, PROMPTS[1])
    fed_1 = wanted[0]
    left = []
    for tokens in beside.add(long_1T):
        left.append(tokens)
        step = beside.step(torch.stack([fed_1, PROMPTS[1][0]][: beside.batch]))
        assert torch.equal(step[:1], alone_short.step(fed_1[None]))
        fed_1 = step[0].argmax(-1, keepdim=True)
        if len(left) == 2:
            assert beside.retain([0]) == [0]
    assert left == [240, 180, 120, 60, 0]
    assert beside.lengths == [11, 300]  # in the row that became free
    found_2V = beside.step(torch.stack([fed_1, long_1T[0, -1:]]))
    assert torch.equal(found_2V[0], alone_short.step(fed_1[None])[0])
    assert torch.equal(found_2V[1], alone_long.step(long_1T[:, -1:])[0])


def test_what_cannot_be_while_a_prompt_is_read() -> None:
    decoder = Decoder(tiny("llama-relu"), max_tokens=41, batch=3, compiled=False)
    join(decoder, PROMPTS[0])
    pieces = decoder.add(PROMPTS[2])
    late = decoder.add(PROMPTS[2])
    assert next(pieces) == 0
    for what in (
        lambda: decoder.prompt(PROMPTS[0]),
        lambda: decoder.fork(2),
        lambda: decoder.add(PROMPTS[1]),
        lambda: next(late),
    ):
        with pytest.raises(ShapeError, match="expected no sequence whose prompt is being read, found one that is bei"):
            what()
    pieces.close()
    decoder.fork(2)
    assert decoder.lengths == [6, 6]


def test_known_keys_and_values() -> None:
    """All of them: nothing is read. Part of them: 12 tokens more, at most, whose bits would be others."""
    model = quantised()
    decoder = Decoder(model, max_tokens=64, batch=2, compiled=False, logits=True)
    fed_1 = join(decoder, PROMPTS[2])
    known = [decoder.copy_kv(0, 0, 32), decoder.copy_kv(0, 32, 39)]
    wanted = decoder.step(fed_1[None])
    decoder.retain([])
    for parts, read in ((known, []), (known[:1], [0])):
        assert list(decoder.add(PROMPTS[2], parts)) == read
        assert decoder.lengths == [39]
        assert torch.equal(decoder.step(fed_1[None]), wanted)
        decoder.retain([])
        fresh = Decoder(model, max_tokens=64, batch=2, compiled=False, logits=True)  # has no memory for them yet
        assert list(fresh.add(PROMPTS[2], parts)) == read
        assert torch.equal(fresh.step(fed_1[None]), wanted)


@pytest.mark.parametrize("count", [1, 2])
def test_over_a_store_others_may_leave_while_one_joins(count: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Their memory goes back to the system, and not that of the one."""
    model = torch_pi2.load(small_store(tmp_path_factory) / "store", budget="1GB")
    ids_1T = torch.arange(1, 30)[None]
    decoder = Decoder(model, max_tokens=40, batch=3, compiled=False, logits=True)
    join(decoder, ids_1T)
    wanted = decoder.step(ids_1T[:, -1:])
    decoder.retain([])
    for _ in range(count):
        join(decoder, PROMPTS[1])
    pieces = decoder.add(ids_1T)
    assert next(pieces) == 0
    decoder.retain([])
    assert next(pieces, None) is None
    assert torch.equal(decoder.step(ids_1T[:, -1:]), wanted)
