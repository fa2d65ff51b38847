"""``torch_pi2.generate``: several continuations of one prompt in one batch that becomes smaller as they end."""

from __future__ import annotations

import copy
import ctypes
import logging
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import VOCAB, overflowing, tiny
from torch import fx, nn

import torch_pi2
from torch_pi2.decode.chunked_prefill import CHUNK_TOKENS, lossless_chunk_tokens
from torch_pi2.decode.decoder import Decoder
from torch_pi2.decode.generate import Generated, generate
from torch_pi2.decode.plan_controller import follow
from torch_pi2.decode.sequence import Sampling, pick
from torch_pi2.errors import ConfigError, NonFiniteError, OutOfMemoryError, ShapeError
from torch_pi2.layers.prompt import has_tiles
from torch_pi2.types.plan import Bucket, HardwarePlan, PromptPlan

IDS = torch.randint(1, VOCAB, (1, 7), generator=torch.Generator().manual_seed(0))
NEW = 10
#: So many tokens end a sequence that some end early.
ENDS = [2, 5, 9, 11, 13]


def sampled(model: nn.Module, sequences: int, **settings: Any) -> Generated:
    how = {"do_sample": True, "temperature": 1.5, "max_new_tokens": NEW, "eos_token_id": ENDS} | settings
    return generate(model, IDS, num_return_sequences=sequences, **how)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return torch_pi2.optimize(tiny("llama-relu"))


@pytest.mark.parametrize(("name", "sparse"), [("llama-relu", True), ("gemma", False), ("opt", True)])
def test_greedy_is_what_transformers_generates(name: str, sparse: bool) -> None:
    model = tiny(name)
    if sparse:
        torch_pi2.optimize(model)
    how: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": NEW, "do_sample": False}
    free = model.generate(IDS, eos_token_id=None, **how)[0, IDS.shape[1] :].tolist()
    assert len(free) == NEW
    for ends in (None, [], free[3]):
        more = {} if ends is None else {"eos_token_id": ends or None}
        want = model.generate(IDS, **how, **more)[0, IDS.shape[1] :].tolist()
        got = generate(model, IDS, max_new_tokens=NEW, eos_token_id=ends)
        assert got.sequences == [want]
        assert got.steps == len(got.step_ms) == len(want) - 1
        assert got.prompt_ms > 0
    assert len(want) < NEW


def test_each_sequence_is_what_its_seed_gives_alone(model: nn.Module) -> None:
    seen: list[tuple[int, int]] = []
    together = sampled(model, 5, seed=40, streamer=lambda i, token: seen.append((i, token)))
    lengths = [len(tokens) for tokens in together.sequences]
    assert min(lengths) < max(lengths)
    assert len(set(map(tuple, together.sequences))) > 1
    assert together.batches == [sum(n > step for n in lengths) for step in range(1, max(lengths))]
    assert together.batches[0] > together.batches[-1]
    for i, tokens in enumerate(together.sequences):
        assert sampled(model, 1, seed=40 + i).sequences == [tokens]
        assert (tokens[-1] in ENDS) == (len(tokens) < NEW) or len(tokens) == NEW
        assert [token for sequence, token in seen if sequence == i] == tokens
    assert sampled(model, 5, seed=40).sequences == together.sequences
    assert sampled(model, 2, seed=41).sequences == together.sequences[1:3]


def test_a_streamer_that_raises_leaves_all_usable(model: nn.Module) -> None:
    wanted = sampled(model, 3, seed=40)
    decoder = Decoder(model, max_tokens=IDS.shape[1] + NEW, batch=3, compiled=False, logits=True)
    left = iter(range(100))

    def streamer(_sequence: int, _token: int) -> None:
        if next(left) in (0, 6, 15):
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            sampled(model, 3, seed=40, decoder=decoder, streamer=streamer)
        assert sampled(model, 3, seed=40, decoder=decoder).sequences == wanted.sequences


@contextmanager
def counted_tokens(model: nn.Module) -> Iterator[list[int]]:
    """Tokens of each forward of ``model``."""
    read: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    yield read
    hook.remove()


@pytest.mark.parametrize("batch", [1, 3])
def test_pieces_of_a_model_with_int8_activations_have_the_bits_of_the_whole(batch: int) -> None:
    """And are what a prompt in memory is read in where that is so; not where a product of PyTorch's is left."""
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=100, hidden_act="relu")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    assert lossless_chunk_tokens(model) == 0
    model = torch_pi2.optimize(model, weights="int4", activations="int8")
    assert lossless_chunk_tokens(model) == (CHUNK_TOKENS if has_tiles() else 0)
    ids_BT = torch.randint(1, 90, (batch, 300), generator=torch.Generator().manual_seed(0))
    found = []
    for chunk in (300, 0, 70, 256) if has_tiles() else (300, 0):
        decoder = Decoder(model, max_tokens=302, batch=batch, compiled=False, logits=True, chunk_tokens=chunk)
        with counted_tokens(model) as read:
            found.append([decoder.prompt(ids_BT), *(layer.keys for layer in decoder.cache.layers)])
        if chunk == 0:
            assert read == ({1: [150, 150], 3: [75, 75, 75, 75]}[batch] if has_tiles() else [300])
        assert all(torch.equal(*pair) for pair in zip(found[0], found[-1], strict=True))
    model.model.layers[0].self_attn.q_proj = nn.Linear(256, 256, bias=False)
    assert lossless_chunk_tokens(model) == 0


@pytest.mark.parametrize(("tokens", "chunk", "pieces"), [(7, 6, [4, 3]), (10, 3, [3, 3, 2, 2]), (6, 3, [3, 3])])
def test_no_piece_of_a_prompt_is_a_step(model: nn.Module, tokens: int, chunk: int, pieces: list[int]) -> None:
    decoder = Decoder(model, max_tokens=16, compiled=False, chunk_tokens=chunk)
    with counted_tokens(model) as read:
        decoder.prompt(torch.arange(1, tokens + 1)[None])
    assert read == pieces


# --- rows of keys and values ---


def in_memory(tensor: torch.Tensor) -> float:
    """The share of the pages inside a contiguous tensor that are resident."""
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    pages = (tensor.data_ptr() + tensor.nbytes - first) // page
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * page), found) == 0
    return sum(each & 1 for each in found) / pages


def test_rows_have_memory_when_they_are_used(model: nn.Module) -> None:
    decoder = Decoder(model, max_tokens=4096, batch=4, compiled=False)
    token = decoder.prompt(IDS)
    keys = decoder._kv._memory[0].keys
    assert keys.shape[::2] == (4, 4096)
    assert in_memory(keys) < 0.05
    decoder.fork(4)
    again = decoder.step(token.repeat(4, 1))
    assert torch.equal(again[:1].expand(4, 1), again)
    assert not keys[:, :, IDS.shape[1] + 1 :].any()


def test_sequences_leave_and_the_last_take_their_rows(model: nn.Module) -> None:
    decoder = Decoder(model, max_tokens=24, batch=5, compiled=False)
    token = decoder.prompt(IDS)
    assert decoder.batch == 1
    decoder.fork(5)
    told = {i: [token.item(), 3 + i] for i in range(5)}  # each goes its own way
    rows = list(range(5))
    places = [layer.keys.data_ptr() for layer in decoder.cache.layers]

    def fed() -> torch.Tensor:
        return torch.tensor([[told[i][-1]] for i in rows])

    decoder.step(torch.tensor([[told[i][0]] for i in rows]))
    for kept, came_from in (([0, 2, 3, 4], [0, 4, 2, 3]), ([1, 3], [3, 1]), ([0, 1], [0, 1]), ([1], [1])):
        assert decoder.retain(kept) == came_from
        rows = [rows[row] for row in came_from]
        assert decoder.batch == len(rows)
        assert [layer.keys.data_ptr() for layer in decoder.cache.layers] == places
        found = decoder.step(fed())
        for row, i in enumerate(rows):
            alone = torch.cat([IDS, torch.tensor([told[i]])], 1)
            with torch.no_grad():
                want = model(alone).logits[0, -1].argmax()
            assert found[row] == want
            told[i].append(int(found[row]))
    again = decoder.prompt(IDS.flip(1))  # another prompt, one sequence
    assert torch.equal(again, Decoder(model, max_tokens=24, compiled=False).prompt(IDS.flip(1)))


def test_a_step_is_compiled_once_for_each_number_of_sequences(model: nn.Module) -> None:
    graphs: list[int] = []

    def backend(gm: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        graphs.append(next(t.shape[0] for t in inputs if t.dtype == torch.int64 and t.dim() == 2))
        return gm.forward

    decoder = Decoder(model, max_tokens=IDS.shape[1] + NEW, batch=3, backend=backend, compiled=True, logits=True)
    runs = [sampled(model, 3, seed=40, decoder=decoder) for _ in range(2)]
    assert sorted(graphs) == sorted(set(runs[0].batches))
    assert len(graphs) > 1
    wanted = sampled(model, 3, seed=40)
    assert [run.sequences for run in runs] == [wanted.sequences] * 2


def test_a_prompt_that_failed_leaves_room_for_one_of_another_batch(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(model, max_tokens=16, batch=2, compiled=False)
    last = model.get_submodule("model.layers.1")
    with monkeypatch.context() as patched:
        patched.setattr(last, "forward", None)
        with pytest.raises(TypeError):
            decoder.prompt(IDS)
    both = torch.cat([IDS, IDS.flip(1)])
    assert torch.equal(decoder.prompt(both)[:1], Decoder(model, max_tokens=16, compiled=False).prompt(IDS))


def test_the_memory_of_sequences_that_ended_goes_back(tmp_path: Path) -> None:
    torch_pi2.synthetic(tmp_path / "m", "tiny", layers=1, rank=16)
    torch_pi2.pack(tmp_path / "m", tmp_path / "s")
    models = [torch_pi2.load(tmp_path / "m"), torch_pi2.load(tmp_path / "s", budget="1GiB")]
    prompt = torch.arange(1, 200)[None]
    decoders = [Decoder(each, max_tokens=1024, batch=4, compiled=False) for each in models]
    for decoder in decoders:
        token = decoder.prompt(prompt)
        decoder.fork(4)
        rows = decoder.cache.layers[0].keys
        decoder.step(token.repeat(4, 1))
        assert bool(rows[3].any())
        decoder.retain([0])
        assert bool(rows[0].any())
    assert bool(rows[3, :, :100].any()) is False  # over a store; pages of a tensor's end may be shared with others
    again = [decoder.prompt(prompt) for decoder in decoders]
    for decoder, token in zip(decoders, again, strict=True):
        decoder.fork(2)
        assert torch.equal(*decoder.step(token.repeat(2, 1)))


# --- a plan that is followed ---


def test_the_plan_follows_as_sequences_end(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    buckets = tuple(Bucket(b, (hot, hot), (0, 0), (0, 0)) for b, hot in ((1, 0), (2, 10), (5, 48)))
    wanted, planned, seen = sampled(model, 5, seed=40), copy.deepcopy(model), list[int]()
    controller = follow(planned, HardwarePlan({}, None, 0, 64, buckets, PromptPlan((0, 0))))
    step = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda *args: (step(*args), seen.append(controller.bucket.batch))[0])
    assert sampled(planned, 5, seed=40).sequences == wanted.sequences  # the exact gate: no setting changes a bit
    assert seen == [1 if b == 1 else 2 if b == 2 else 5 for b in wanted.batches]


# --- settings ---


def test_drawing() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -4.0])
    assert pick(logits, None) == 1

    def drawn(**settings: Any) -> set[int]:
        generator = torch.Generator().manual_seed(0)
        return {pick(logits, Sampling(**settings), generator) for _ in range(300)}

    assert drawn() >= {0, 1, 2}
    assert drawn(temperature=100.0) == {0, 1, 2, 3}
    assert drawn(temperature=0.01) == drawn(top_k=1) == drawn(top_p=0.1) == {1}
    assert drawn(top_k=2) == drawn(top_p=0.7) == {1, 2}
    assert drawn(top_k=9) == drawn()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_return_sequences": 0}, r"num_return_sequences: expected 1 or more, found 0\."),
        ({"max_new_tokens": 0}, r"max_new_tokens: expected 1 or more, found 0\."),
        (
            {"do_sample": True, "temperature": 0.0},
            r"sampling: expected a temperature of 1e-06 or .* found 0, 0 and 1\.",
        ),
        ({"do_sample": True, "temperature": 1e-320}, r"sampling: .* found 9\.99989e-321, 0 and 1\."),
        ({"seed": 10**30}, r"generate\(seed\): expected a whole number"),
        ({"do_sample": True, "top_p": 1.5}, r"top_p above 0 and at most 1, found 1, 0 and 1\.5\."),
        ({"do_sample": True, "top_k": -1}, r"top_k of 0 or more, .* found 1, -1 and 1\."),
    ],
)
def test_settings_that_make_no_sense(model: nn.Module, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(model, IDS, **settings)


def test_more_tokens_than_any_memory_holds(model: nn.Module) -> None:
    with pytest.raises(OutOfMemoryError, match=r"keys and values: expected memory for 1 x \d+ tokens, found"):
        generate(model, IDS, max_new_tokens=10**13)


def test_wrong_inputs(model: nn.Module) -> None:
    for ids, found in ((IDS[0], r"int64 \[7\]"), (IDS.repeat(2, 1), r"int64 \[2, 7\]"), (IDS.float(), "float32")):
        with pytest.raises(ShapeError, match=rf"input_ids: expected one prompt, int64 \[1, tokens\], found {found}"):
            generate(model, ids)
    for token in (VOCAB, -1):
        with pytest.raises(ConfigError, match=rf"tokens of 0 to {VOCAB - 1}, .*, found the token {token}\."):
            generate(model, torch.tensor([[1, token]]))
    decoder = Decoder(model, max_tokens=9, compiled=False)
    with pytest.raises(ConfigError, match=r"for 2 sequences and 70 tokens, found one of this model without logits"):
        generate(model, IDS, num_return_sequences=2, decoder=decoder)
    with pytest.raises(ConfigError, match=r"found one of another model without logits, for 1 sequences and 9 tokens"):
        generate(tiny("llama"), IDS, decoder=decoder)
    with pytest.raises(ShapeError, match=r"fork: expected a prompt before it, found none that was read to its end"):
        decoder.fork(1)
    with pytest.raises(ShapeError, match=r"retain: expected a prompt before it"):
        decoder.retain([0])
    decoder.prompt(IDS)
    with pytest.raises(ShapeError, match=r"fork: expected 1 to 1 sequences from 1, found 2 from 1\."):
        decoder.fork(2)
    for rows, found in (([1], "1"), ([-1, 0], "-1, 0")):
        with pytest.raises(ShapeError, match=rf"retain: expected rows from 0 to 0, found {found}\."):
            decoder.retain(rows)
    with pytest.raises(ShapeError, match=r"prompt: expected \[1, 1 to 9\], found \[2, 7\]"):
        decoder.prompt(IDS.repeat(2, 1))


def test_what_is_not_applied_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama")
    model.generation_config.repetition_penalty = 1.2
    with caplog.at_level(logging.WARNING, "torch_pi2"):
        generate(model, IDS, max_new_tokens=1)
    assert "has repetition_penalty, which is not applied" in caplog.text


#: A call with a prompt of one token too many for float16, and one with good tokens before it.
OVERFLOWS: dict[str, Any] = {
    "greedy": lambda model, ids: generate(model, ids, max_new_tokens=4),
    "sampled": lambda model, ids: generate(model, ids, max_new_tokens=4, do_sample=True),
    "several": lambda model, ids: generate(model, ids, max_new_tokens=4, do_sample=True, num_return_sequences=2),
    "drafts": lambda model, ids: generate(model, ids, max_new_tokens=4, prompt_lookup=3),
    "transformers": lambda model, ids: model.generate(ids, max_new_tokens=4, do_sample=False),
    "beams": lambda model, ids: model.generate(ids, max_new_tokens=4, num_beams=2),
    "padded": lambda model, ids: model.generate(
        ids.repeat(2, 1), attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]), max_new_tokens=4, do_sample=False
    ),
    "one of two": lambda model, ids: model.generate(
        torch.cat([torch.tensor([[1, 2, 3]]), ids]), max_new_tokens=4, do_sample=False
    ),
    "tokens": lambda model, ids: Decoder(model, max_tokens=16, compiled=False).prompt(ids),
    "logits": lambda model, ids: Decoder(model, max_tokens=16, compiled=False, logits=True).prompt(ids),
}


@pytest.mark.parametrize("how", OVERFLOWS)
def test_numbers_that_float16_has_not_are_no_answer(how: str) -> None:
    with pytest.raises(NonFiniteError, match=r"found NaN or infinity.* load the model in bfloat16 or float32"):
        OVERFLOWS[how](torch_pi2.optimize(overflowing(7)), torch.tensor([[1, 2, 7]]))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_that_overflows_has_not_been(compiled: bool) -> None:
    decoder = Decoder(torch_pi2.optimize(overflowing(7)), max_tokens=64, compiled=compiled)
    wanted = [int(decoder.prompt(torch.tensor([[1, 2, 3]])))]
    for _ in range(14):  # the last of them recorded
        wanted.append(int(decoder.step(torch.tensor([[4]]))))
    decoder.prompt(torch.tensor([[1, 2, 3]]))
    for token in wanted[1:]:
        with pytest.raises(NonFiniteError):
            decoder.step(torch.tensor([[7]]))
        assert int(decoder.step(torch.tensor([[4]]))) == token


def test_an_infinite_logit_is_no_answer_and_a_forbidden_token_is_none() -> None:
    logits_V = torch.tensor([1.0, -torch.inf, 3.0])
    assert pick(logits_V, None) == 2
    assert pick(logits_V, Sampling(0.1), torch.Generator().manual_seed(0)) == 2
    for wrong in ([1.0, torch.inf, 3.0], [1.0, torch.nan, 3.0], [-torch.inf] * 3):
        for sampling in (None, Sampling()):
            with pytest.raises(NonFiniteError):
                pick(torch.tensor(wrong), sampling)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_lengths_end_where_positions_do(name: str) -> None:
    """Both have 64: positions that are learnt."""
    model = torch_pi2.optimize(tiny(name)) if name == "opt" else tiny(name)
    ids = torch.arange(4, 44)[None]
    whole = generate(model, ids, max_new_tokens=25, eos_token_id=[])  # the last one is not fed
    assert whole.sequences[0] == model.generate(ids, max_new_tokens=25, eos_token_id=None)[0, 40:].tolist()
    assert len(generate(model, torch.arange(64)[None], max_new_tokens=1).sequences[0]) == 1
    assert len(model.generate(ids, max_new_tokens=999, eos_token_id=whole.sequences[0][3])[0]) <= 44
    for call in (
        lambda: generate(model, ids, max_new_tokens=26),
        lambda: generate(model, ids, max_new_tokens=26, compiled=True),
        lambda: Decoder(model, max_tokens=65),
    ):
        with pytest.raises(ConfigError, match=r"at most 64: .* has a table of so many positions, found 65"):
            call()


def test_an_assistant_with_fewer_positions_drafts_as_far_as_they_go() -> None:
    model = torch_pi2.optimize(tiny("llama-relu"))
    wanted = generate(model, IDS, max_new_tokens=90, eos_token_id=[]).sequences
    assert generate(model, IDS, max_new_tokens=90, eos_token_id=[], assistant_model=tiny("gpt2")).sequences == wanted
