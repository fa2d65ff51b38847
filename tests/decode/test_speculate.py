"""Speculative decoding: bits and text as step by step, whatever is guessed; guessing that does not pay rests."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import Always, always_draft
from tiny_models import VOCAB, tiny
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import torch_pi2
from benchmarks.speculate import Knowing
from benchmarks.subject import Rooms
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.decode import speculate as speculate_module
from torch_pi2.decode.decoder import VERIFIED, Decoder
from torch_pi2.decode.generate import generate
from torch_pi2.decode.plan_controller import follow
from torch_pi2.decode.speculate import MOST_DRAFTED, Assistant, Pace, PromptLookup
from torch_pi2.errors import ConfigError, ShapeError
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.prompt import has_tiles, single_steps
from torch_pi2.rewrite.state import store_of
from torch_pi2.types.plan import Bucket, HardwarePlan, PromptPlan

IDS = torch.randint(1, VOCAB, (1, 7), generator=torch.Generator().manual_seed(0))
FED = torch.randint(1, VOCAB, (1, VERIFIED), generator=torch.Generator().manual_seed(1))
NEW = 24


def ours(name: str, weights: str = "int4", int8: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny model all of whose linears, small as they are, and feed-forward layers are quantised."""
    settings: dict[str, Any] = {"weights": weights, "activations": "int8" if int8 else "float"}
    model = torch_pi2.optimize(tiny(name).to(dtype), config=torch_pi2.Config(method="dense", **settings))
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and not isinstance(module.weight, OffloadedParameter):
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, QuantLinear.from_linear(module, weights, int8))
    return model.eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return ours("llama")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)


def guessed(monkeypatch: pytest.MonkeyPatch, model: nn.Module, share: float, **settings: Any) -> tuple[Any, Any]:
    """Plain and speculative generation with guesses of which ``share`` are right."""
    how = {"max_new_tokens": NEW, "eos_token_id": []} | settings
    plain = generate(model, IDS, **how)
    free = generate(model, IDS, max_new_tokens=2 * NEW, eos_token_id=[]).sequences[0]
    with monkeypatch.context() as patched:
        patched.setattr(speculate_module, "Pace", Always)
        patched.setattr(speculate_module, "PromptLookup", lambda: Knowing([*IDS[0].tolist(), *free], share, VOCAB))
        return plain, generate(model, IDS, **how, prompt_lookup=5)


# --- a pass has the bits of steps ---


@pytest.mark.parametrize(
    ("name", "weights", "int8", "dtype"),
    [
        *[(name, "int4", False, torch.float32) for name in ("llama-bias", "drelu", "qwen3", "gemma", "phi3", "opt")],
        ("llama", "int8", True, torch.float32),
        ("llama", "int4", True, torch.bfloat16),
    ],
)
def test_a_pass_has_the_bits_of_steps(name: str, weights: str, int8: bool, dtype: torch.dtype) -> None:
    decoder = Decoder(ours(name, weights, int8, dtype), max_tokens=24, compiled=False, logits=True)
    for tokens in (1, 2, 3, 5, VERIFIED):
        decoder.prompt(IDS)
        steps_TV = torch.cat([decoder.step(id_11) for id_11 in FED[:, :tokens].split(1, 1)])
        decoder.rollback(tokens)
        assert torch.equal(decoder.verify(FED[:, :tokens]), steps_TV)
        assert decoder.length == IDS.shape[1] + tokens
        decoder.rollback(tokens)  # what was rejected is as if it had never been
        assert torch.equal(decoder.step(FED[:, :1]), steps_TV[:1])


@pytest.mark.slow
def test_a_compiled_pass_has_the_bits_of_compiled_steps(model: nn.Module) -> None:
    decoder = Decoder(model, max_tokens=24, logits=True, compiled=True)
    for tokens in (2, 5):
        for _ in range(2):
            decoder.prompt(IDS)
            steps_TV = torch.cat([decoder.step(id_11) for id_11 in FED[:, :tokens].split(1, 1)])
            decoder.rollback(tokens)
            assert torch.equal(decoder.verify(FED[:, :tokens]), steps_TV)
    assert sorted(decoder._compiled_steps) == [(1, 1, False), (1, 2, True), (1, 5, True)]


def test_a_pass_has_the_hot_neurons_of_one_token() -> None:
    """With a predictor others are lossy otherwise; and a plan's prompts begin where passes still are."""
    text = torch.randint(1, VOCAB, (4, 32), generator=torch.Generator().manual_seed(2))
    config = torch_pi2.Config(method="signbit", weights="int4")
    model = torch_pi2.optimize(tiny("llama-relu"), config=config, calibration=[{"input_ids": text}])
    layer = sparse_layers(model)[0]
    assert layer.has_predictor
    most = layer.site.intermediate
    hot = [tuple(max(n, layer.least_hot) for layer in sparse_layers(model)) for n in (0, most)]
    buckets = tuple(Bucket(b, n, (0, 0), (0, 0)) for b, n in zip((1, 4), hot, strict=True))
    x = torch.randn(1, 6, layer.site.hidden, generator=torch.Generator().manual_seed(3))
    follow(model, HardwarePlan({}, None, 0, 64, buckets, PromptPlan((5, 5))))
    with torch.no_grad():
        alone = torch.cat([layer(row) for row in x.split(1, 1)], 1)
        assert not torch.equal(layer(x), alone)
        with single_steps():
            assert torch.equal(layer(x), alone)


def test_passes_that_cannot_be(model: nn.Module) -> None:
    decoder = Decoder(model, max_tokens=12, batch=2, compiled=False, logits=True)
    with pytest.raises(ShapeError, match="verify: expected a prompt before it"):
        decoder.verify(FED[:, :2])
    decoder.prompt(IDS)
    for ids, found in ((FED[:, :6], r"\[1, 6\] for 1 after 7"), (FED[:, :2].repeat(2, 1), r"\[2, 2\] for 1 after 7")):
        with pytest.raises(ShapeError, match=rf"verify: expected \[1, 1 to 8\] .* at most 12 tokens .* found {found}"):
            decoder.verify(ids)
    with pytest.raises(ShapeError, match=r"rollback: expected 0 to 6 tokens, of 7 .* found 7\."):
        decoder.rollback(7)
    decoder.fork(2)
    with pytest.raises(ShapeError, match=r"found \[1, 2\] for 2 after 7 tokens"):
        decoder.verify(FED[:, :2])


def test_a_pass_that_fails_can_be_repeated(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(model, max_tokens=24, compiled=False, logits=True)
    decoder.prompt(IDS)
    want = decoder.verify(FED)
    decoder.prompt(IDS)
    with monkeypatch.context() as patched:
        patched.setattr(model.get_submodule("model.layers.1"), "forward", None)
        with pytest.raises(TypeError):
            decoder.verify(FED)
    assert torch.equal(decoder.verify(FED), want)


# --- the text is that of steps ---


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_text_is_that_of_steps(monkeypatch: pytest.MonkeyPatch, model: nn.Module, share: float) -> None:
    heard: list[tuple[int, int]] = []
    plain, got = guessed(monkeypatch, model, share, streamer=lambda i, token: heard.append((i, token)))
    assert got.sequences == plain.sequences
    assert [token for _, token in heard[NEW:]] == got.sequences[0]  # after those of plain decoding, in order
    assert got.drafts.drafted >= got.drafts.accepted == NEW - 1 - got.steps
    assert got.drafts.passes <= got.steps == len(got.step_ms)
    if share == 1:
        assert got.drafts.accepted == got.drafts.drafted
        assert got.steps == 8  # three passes with five drafts, and steps where there is no room for so many
    if share == 0:
        assert got.drafts.accepted == 0


@pytest.mark.parametrize("new", [1, 2, 3, 6, 7])
def test_no_more_tokens_than_asked_for(monkeypatch: pytest.MonkeyPatch, model: nn.Module, new: int) -> None:
    room = Decoder(model, max_tokens=IDS.shape[1] + max(1, new - 1), compiled=False, logits=True)
    for _ in range(2):
        plain, got = guessed(monkeypatch, model, 1.0, max_new_tokens=new, decoder=room)
        assert got.sequences == plain.sequences
        assert len(got.sequences[0]) == new


@pytest.mark.usefixtures("always")
def test_drawn_text_is_that_of_steps(model: nn.Module) -> None:
    how: dict[str, Any] = {"do_sample": True, "temperature": 0.2, "max_new_tokens": NEW, "eos_token_id": []}
    for seed in range(3):
        got = generate(model, IDS, **how, seed=seed, assistant_model=model)
        assert got.sequences == generate(model, IDS, **how, seed=seed).sequences
        assert got.drafts is not None
        assert 0 < got.drafts.accepted <= got.drafts.drafted


def test_an_end_inside_of_guesses(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    free = generate(model, IDS, max_new_tokens=NEW, eos_token_id=[]).sequences[0]
    for end in range(1, 9):
        for share in (1.0, 0.5):
            plain, got = guessed(monkeypatch, model, share, eos_token_id=free[end])
            assert got.sequences == plain.sequences == [free[: free.index(free[end]) + 1]]


def test_looking_up_what_was_there() -> None:
    lookup = PromptLookup()
    lookup.begin([5, 1, 2, 3, 9, 8, 2, 3])
    assert lookup.propose([5, 1, 2, 3, 9, 8, 2, 3], 3) == [9, 8, 2]
    assert lookup.propose([5, 1, 2, 3, 9, 8, 2, 3, 7], 3) == []
    assert lookup.propose([5, 1, 2, 3, 9, 8, 2, 3, 7, 2, 3], 2) == [7, 2]  # the latest
    assert lookup.propose([5, 1, 2, 3, 9, 8, 2, 3, 7, 2, 3, 9, 1, 2, 3], 1) == [9]  # the longest
    again = PromptLookup()
    assert again.propose([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]  # goes on repeating
    assert again.propose([4], 2) == []


@pytest.mark.usefixtures("always")
def test_prompt_lookup(model: nn.Module) -> None:
    prompt = torch.tensor([[3, 4, 5, 6, 7, 3, 4, 5]])
    plain = generate(model, prompt, max_new_tokens=40, eos_token_id=[])
    got = generate(model, prompt, max_new_tokens=40, eos_token_id=[], prompt_lookup=3)
    assert plain.drafts is None
    assert got.sequences == plain.sequences
    assert got.drafts is not None
    assert got.drafts.passes > 0


@pytest.mark.usefixtures("always")
def test_an_assistant(model: nn.Module) -> None:
    how: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": []}
    plain = generate(model, IDS, **how).sequences
    itself = generate(model, IDS, **how, assistant_model=model)
    assert itself.sequences == plain
    assert itself.drafts is not None
    assert itself.drafts.accepted == itself.drafts.drafted > 0  # with its own bits it agrees with itself
    for other, count in ((tiny("llama-relu", seed=5), None), (tiny("opt"), MOST_DRAFTED), (ours("qwen2"), 1)):
        got = generate(model, IDS, **how, assistant_model=other, draft_tokens=count)
        assert got.sequences == plain
        assert got.drafts is not None
        assert got.drafts.passes > 0


@pytest.mark.usefixtures("always")
def test_an_assistant_drafts_frequent_tokens(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the first ids of its head, which is not copied, unless a prompt has many others."""
    monkeypatch.setattr(speculate_module, "_FREQUENT", 32)
    monkeypatch.setattr(speculate_module, "_TEMPLATE", 0)
    drafted, propose = set[int](), Assistant.propose

    def noted(self: Assistant, tokens: Sequence[int], count: int) -> list[int]:
        found = propose(self, tokens, count)
        drafted.update(found)
        return found

    monkeypatch.setattr(Assistant, "propose", noted)
    how: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": []}
    for prompt, most in ((IDS % 32, 31), (IDS % 32 + 32, VOCAB - 1), (IDS % 32, 31)):
        for _ in range(2):
            drafted.clear()
            got = generate(model, prompt, **how, assistant_model=model)
            assert got.sequences == generate(model, prompt, **how).sequences
            assert max(drafted) <= most
        assert most == 31 or max(drafted) > 31
    (few,) = [made for of, made in speculate_module._frequent.items() if of is model]
    head, whole = few.lm_head, model.lm_head
    assert head.rows.data_ptr() == whole.rows.data_ptr()  # type: ignore[union-attr, operator]
    assert (head.out_features, whole.out_features) == (32, VOCAB)
    gc.collect()
    made, gone = weakref.ref(few), weakref.ref(fresh := ours("llama"))
    generate(fresh, IDS % 32, **how, assistant_model=fresh)
    del fresh
    gc.collect()
    assert gone() is None  # the pool of a draft model keeps nothing alive
    assert made() is few


def small_llama(**settings: Any) -> nn.Module:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes | {"num_attention_heads": 4, "num_key_value_heads": 2} | settings)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def test_tokens_that_an_assistant_does_not_have(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    """Vocabularies are padded otherwise: the text is the same, and other tokens have drafts."""
    monkeypatch.setattr(speculate_module, "Pace", Always)
    how: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": []}
    wanted = generate(model, IDS, **how, prompt_lookup=0).sequences
    few = small_llama(vocab_size=VOCAB - 4)
    prompt = torch.cat((torch.tensor([[VOCAB - 1]]), IDS), 1)
    for ids, want in ((IDS, wanted), (prompt, generate(model, prompt, **how, prompt_lookup=0).sequences)):
        got = generate(model, ids, **how, assistant_model=few)
        assert got.sequences == want
        assert got.drafts is not None
        assert got.drafts.drafted > 0


@pytest.mark.usefixtures("always")
def test_an_assistant_that_fails_ends_no_answer(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    broken = tiny("llama", seed=3)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))  # type: ignore[union-attr, operator]
    how: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": []}
    got = generate(model, IDS, **how, assistant_model=broken)
    assert got.sequences == generate(model, IDS, **how, prompt_lookup=0).sequences
    assert got.drafts is not None
    assert got.drafts.drafted == 0
    assert caplog.text.count("the draft model failed, and drafts no more: logits: expected finite numbers") == 1


def test_defaults_leave_alone_what_sees_several_tokens(model: nn.Module) -> None:
    """Hooks, and rotary frequencies of the longest position; the latter end explicit drafts, too."""
    hooked = ours("llama", int8=True)
    decoder = Decoder(hooked, max_tokens=64, logits=True)
    assert decoder.passes_are_steps() == has_tiles()
    handle = hooked.get_submodule("model.layers.0").register_forward_hook(lambda _m, _x, y: y)
    assert not decoder.passes_are_steps()
    handle.remove()
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    long = small_llama(max_position_embeddings=16, rope_parameters=rope)
    got = generate(long, IDS, max_new_tokens=20, eos_token_id=[], assistant_model=long)
    assert got.sequences == generate(long, IDS, max_new_tokens=20, eos_token_id=[]).sequences
    decoder = Decoder(long, max_tokens=64, logits=True)
    decoder.prompt(IDS)
    assert decoder.room_to_verify == min(VERIFIED, 16 - IDS.shape[1])
    for token in FED[0]:
        decoder.step(token[None, None])
    decoder.step(FED[:, :1])
    assert decoder.room_to_verify == 16 - IDS.shape[1] - VERIFIED - 1


def test_an_assistant_that_rested_reads_what_was_said_meanwhile(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Resting(Always):
        calls = 0

        def count(self, most: int) -> int:
            self.calls += 1
            return super().count(most) if self.calls % 12 == 0 else 0

    monkeypatch.setattr(speculate_module, "Pace", Resting)
    got = generate(model, IDS, max_new_tokens=40, eos_token_id=[], assistant_model=model)
    assert got.drafts is not None
    assert got.drafts.accepted == got.drafts.drafted > 0
    assert got.sequences == generate(model, IDS, max_new_tokens=40, eos_token_id=[]).sequences


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_compiled_text_is_that_of_compiled_steps(model: nn.Module) -> None:
    how: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": [], "compiled": True}
    decoder = Decoder(model, max_tokens=IDS.shape[1] + NEW, logits=True, compiled=True)
    plain = generate(model, IDS, **how, decoder=decoder)
    got = generate(model, IDS, **how, decoder=decoder, assistant_model=model, draft_tokens=2)
    assert got.sequences == plain.sequences
    assert got.drafts is not None
    assert got.drafts.accepted == got.drafts.drafted > 0
    assert sorted(decoder._compiled_steps) == [(1, 1, False), (1, 3, True)]


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [False, True])
def test_text_over_a_cache_that_evicts_is_that_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lookahead: bool
) -> None:
    """What wrong guesses read pushes neurons out, never a bit of the text."""
    torch_pi2.synthetic(tmp_path / "m", "tiny", layers=2, rank=16, weights="int4")
    torch_pi2.pack(tmp_path / "m", tmp_path / "s")
    whole = torch_pi2.load(tmp_path / "m", activations="int8")
    offload = torch_pi2.OffloadConfig(lookahead=lookahead)
    budget = Rooms(tmp_path / "s", 128).budget(offload, 0.2)
    stored = torch_pi2.load(tmp_path / "s", activations="int8", budget=budget, context=128, offload=offload)
    plain, _ = guessed(monkeypatch, whole, 1.0)
    store = store_of(stored)
    assert store is not None
    for share in (0.0, 0.6, 1.0):
        store.stats(reset=True)
        steps, got = guessed(monkeypatch, stored, share)
        assert got.sequences == steps.sequences == plain.sequences
        assert got.drafts.drafted > 0
        assert store.stats()["evictions"] > 0


# --- whether it pays ---


def simulated(cost: float, share: float, tokens: int, counts: Sequence[int] = range(1, 6)) -> tuple[float, Pace]:
    """Steps' time, as a share of that of plain ones, of so many tokens; a guess costs ``cost`` steps."""
    pace, chance, done, spent = Pace(counts), random.Random(0), 0, 0.0
    while done < tokens:
        n = pace.count(tokens - done - 1)
        noise = 1 + 0.1 * (chance.random() - 0.5)
        if n == 0:
            pace.plain(8.0 * noise)
            done, spent = done + 1, spent + 1
            continue
        right = next((i for i in range(n) if chance.random() >= share), n)
        pace.passed(8.0 * (1 + n * cost) * noise, n, right)
        done, spent = done + right + 1, spent + 1 + n * cost
    return spent / done, pace


@pytest.mark.parametrize("counts", [range(1, 8), [4]])
def test_wrong_drafts_cost_little_and_right_ones_are_taken(counts: Sequence[int]) -> None:
    for cost, share, tokens in itertools.product((0.15, 0.3, 0.6, 0.9), (0.0, 0.1, 0.3), (128, 200, 1000)):
        time, _ = simulated(cost, share, tokens, counts)
        assert time <= 1 / 0.97, (cost, share, tokens)
    time, pace = simulated(0.27, 0.9, 256, counts)
    assert time < 1 / 1.5
    assert not pace.off


def test_drafts_that_are_seldom_wrong_gain() -> None:
    assert simulated(0.27, 0.7, 1000)[0] < 1 / 1.15


def test_guessing_that_does_not_pay_rests_longer_each_time() -> None:
    _, pace = simulated(0.2, 0.0, 1000)
    assert pace._rest >= 8 * Pace.REST
    for _ in range(200):
        pace.plain(8.0)
    while pace.count(9) == 0:  # but it has another try
        pace.plain(8.0)


def test_a_pass_that_was_disturbed_does_not_end_it() -> None:
    pace = Pace([2])
    for _ in range(1 + Pace.LEAST_STEPS):
        pace.plain(8.0)
    pace.passed(8000.0, pace.count(9), 2)
    waited = 0
    while pace.count(9) == 0:
        pace.plain(8.0)
        waited += 1
    assert waited < 3 * Pace.REST


def test_generation_that_gains_nothing_switches_itself_off(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    class Slow(Pace):
        def passed(self, ms: float, guesses: int, right: int) -> None:
            super().passed(1e4 * ms, guesses, right)

    monkeypatch.setattr(speculate_module, "Pace", Slow)
    prompt = torch.tensor([[3, 4, 5, 6, 7, 3, 4, 5]])
    how: dict[str, Any] = {"max_new_tokens": 50, "eos_token_id": []}
    got = generate(model, prompt, **how, assistant_model=tiny("opt"))
    assert got.drafts is not None
    assert got.drafts.switched_off
    assert 0 < got.drafts.passes < 12
    assert got.sequences == generate(model, prompt, **how).sequences


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_lookup": 8}, r"prompt_lookup: expected 1 to 7, found 8\. More are not verified in one pass"),
        ({"prompt_lookup": -1}, r"prompt_lookup: expected 1 to 7, found -1\."),
        ({"assistant": True, "draft_tokens": 0}, r"draft_tokens: expected 1 to 7, found 0\."),
        ({"draft_tokens": 3}, r"draft_tokens: expected .*, found draft_tokens without a model\."),
        ({"prompt_lookup": 3, "assistant": True}, r"found prompt_lookup and assistant_model\. Choose one source"),
        (
            {"assistant": True, "num_return_sequences": 2},
            r"assistant_model: expected one sequence, found num_return_sequences=2\.",
        ),
    ],
)
def test_settings_that_make_no_sense(model: nn.Module, settings: dict[str, Any], message: str) -> None:
    if settings.pop("assistant", False):
        settings = settings | {"assistant_model": model}
    with pytest.raises(ConfigError, match=message):
        generate(model, IDS, **settings)


def test_assistants_that_are_none(model: nn.Module) -> None:
    with torch.device("meta"):
        nothing = type(model)(model.config)
    for other, found in (
        (nn.Linear(3, 3), "found a Linear, which says nothing about next tokens"),
        (model.model, "found a LlamaModel, which says nothing about next tokens"),
        (nothing, r"found one without weights \(on meta\)"),
    ):
        with pytest.raises(ConfigError, match=f"assistant_model: expected a causal language model .* {found}"):
            generate(model, IDS, assistant_model=other)


@pytest.mark.usefixtures("always")
def test_an_assistant_guesses_as_far_as_it_has_positions(model: nn.Module) -> None:
    short = tiny("opt")
    short.config.max_position_embeddings = 16  # as if its table ended there
    how: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": []}
    want = generate(model, IDS, **how).sequences
    got = generate(model, IDS, **how, assistant_model=short, draft_tokens=3)
    assert got.sequences == want
    assert got.drafts is not None
    assert 0 < got.drafts.passes <= 16 - IDS.shape[1] - 3
    long = generate(model, IDS.repeat(1, 3), **how, assistant_model=short)  # not even the prompt
    assert long.drafts is not None
    assert (long.drafts.drafted, long.sequences) == (0, generate(model, IDS.repeat(1, 3), **how).sequences)


def test_a_streamer_that_raises_leaves_a_decoder_that_goes_on(model: nn.Module) -> None:
    decoder = Decoder(model, max_tokens=64, compiled=False, logits=True)
    said: list[int] = []

    def streamer(_: int, token: int) -> None:
        said.append(token)
        if len(said) == 6:
            raise KeyboardInterrupt

    how: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": []}
    want = generate(model, IDS, **how).sequences[0]
    with pytest.raises(KeyboardInterrupt):
        generate(model, IDS, **how, decoder=decoder, assistant_model=model, streamer=streamer)
    assert said == want[:6]
    assert decoder.length == IDS.shape[1] + 5
    for t in range(6, 12):
        said.append(int(decoder.step(torch.tensor([[said[-1]]])).argmax()))
        assert said[t] == want[t]


def test_nothing_is_compiled_for_passes_that_have_no_room(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Decoder, "compile_passes", lambda _, tokens: asked.append(tokens))
    for limit in (1, 4, 5, 6):
        generate(model, IDS, max_new_tokens=limit, eos_token_id=[], prompt_lookup=4)
    assert asked == [5]
