"""``model.generate`` of optimised models: transformers' loop over our steps, or the way that it would go without us."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny_models import _LLAMA, randomise, tiny
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import torch_pi2
from torch_pi2.decode.decoder import Decoder
from torch_pi2.decode.hf_generate import ATTRIBUTE
from torch_pi2.decode.kv_cache import cache_name, cache_of
from torch_pi2.errors import UnsupportedModelError

IDS = torch.tensor([[5, 9, 33, 17, 40]])
HOW = {"max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture
def model() -> Any:
    return torch_pi2.optimize(tiny("llama-relu"))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of sequences with each step of a Decoder."""
    seen, step = list[int](), Decoder.step

    def counted(self: Decoder, ids_B1: torch.Tensor) -> torch.Tensor:
        seen.append(len(ids_B1))
        return step(self, ids_B1)

    monkeypatch.setattr(Decoder, "step", counted)
    return seen


def by_transformers(model: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``model.generate`` gives without our steps."""
    pool = vars(model).pop(ATTRIBUTE)
    try:
        return model.generate(*args, **kwargs)
    finally:
        object.__setattr__(model, ATTRIBUTE, pool)


ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "an end": {"eos_token_id": list(range(0, 64, 7)), "do_sample": True, "num_return_sequences": 3},
    "processors": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 4, "bad_words_ids": [[7]]},
    "a processor": {"logits_processor": LogitsProcessorList([lambda ids, scores: scores.roll(1, -1)])},
    "criteria": {"stopping_criteria": StoppingCriteriaList([lambda ids, scores: ids[:, -1] > 30])},
    "guidance": {"guidance_scale": 1.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED)
def test_our_steps_give_what_transformers_does(model: Any, steps: list[int], asked: str) -> None:
    how = HOW | ASKED[asked]
    torch.manual_seed(3)
    wanted = by_transformers(model, IDS, **how)
    assert not steps
    for _ in range(2):  # the second with the steps that the first has recorded
        torch.manual_seed(3)
        assert torch.equal(model.generate(IDS, **how), wanted)
        assert len(steps) == wanted.shape[1] - IDS.shape[1] - 1
        assert set(steps) == {how.get("num_return_sequences", 1)}
        steps.clear()


def test_prompts_of_one_length_and_other_ways_to_call(model: Any, steps: list[int]) -> None:
    ids = torch.stack([IDS[0], IDS[0].flip(0)])
    wanted = by_transformers(model, ids, **HOW)
    mask = torch.ones_like(ids)
    ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {"input_ids": ids, "attention_mask": mask}),
        ((ids, copy.deepcopy(model.generation_config)), {"attention_mask": mask}),
        ((), {"inputs": ids, "position_ids": torch.arange(5).expand(2, -1)}),
    ]
    for args, kwargs in ways:
        assert torch.equal(model.generate(*args, **kwargs, **HOW), wanted)
        assert steps == [2] * 19
        steps.clear()


OTHERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "beams": lambda _: {"num_beams": 2},
    "an assistant": lambda _: {"assistant_model": tiny("llama-relu", seed=1)},
    "lookup": lambda _: {"prompt_lookup_num_tokens": 2},
    "a cache": lambda model: {cache_name(model): DynamicCache(config=model.config)},
    "a kind of cache": lambda _: {"cache_implementation": "static"},
    "no cache": lambda _: {"use_cache": False},
    "padding": lambda _: {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])},
    "positions": lambda _: {"position_ids": torch.arange(1, 6)[None]},
    "pieces": lambda _: {"prefill_chunk_size": 2},
    "all logits": lambda _: {"logits_to_keep": 0},
    "a loop": lambda model: {"custom_generate": lambda *args, **kwargs: type(model)._sample(*args, **kwargs)},
}


@pytest.mark.slow
@pytest.mark.parametrize("asked", OTHERS)
def test_what_steps_have_not_goes_the_way_of_transformers(model: Any, steps: list[int], asked: str) -> None:
    wanted = by_transformers(model, IDS, **HOW | OTHERS[asked](model))
    assert torch.equal(model.generate(IDS, **HOW | OTHERS[asked](model)), wanted)
    assert not steps


def test_outputs_embeddings_and_state_of_the_model(model: Any, steps: list[int]) -> None:
    outputs = model.generate(IDS, **HOW, return_dict_in_generate=True, output_scores=True)
    assert len(outputs.scores) == 20
    assert cache_of(outputs).get_seq_length() == 24
    embedded = model.get_input_embeddings()(IDS)
    assert torch.equal(model.generate(inputs_embeds=embedded, **HOW), outputs.sequences[:, 5:])
    model.train()
    model.generate(IDS, **HOW)
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(IDS, **HOW)
    seen = list[Any]()
    hook = model.model.layers[0].register_forward_hook(lambda _m, _a, kwargs, _o: seen.append(kwargs), with_kwargs=True)
    assert torch.equal(model.generate(IDS, **HOW), outputs.sequences)
    assert len(seen) == 20
    assert all(isinstance(kwargs[cache_name(model)], DynamicCache) for kwargs in seen)
    assert not steps
    hook.remove()
    assert torch.equal(model.generate(IDS, **HOW), outputs.sequences)
    assert len(steps) == 19
    layers = model.generate(IDS, **HOW, return_dict_in_generate=True, output_hidden_states=True).hidden_states
    assert len(layers) == 20
    assert len(steps) == 19
    assert any(layer._forward_hooks for layer in model.model.layers)  # which transformers leaves behind
    assert torch.equal(model.generate(IDS, **HOW), outputs.sequences)
    assert len(steps) == 2 * 19


def test_models_that_a_decoder_does_not_take(steps: list[int]) -> None:
    with_biases = torch_pi2.optimize(tiny("falcon-bias"), weights="int8", method="dense")
    assert torch.equal(with_biases.generate(IDS, **HOW), by_transformers(with_biases, IDS, **HOW))
    assert not steps


class Wrapped(torch.nn.Module):
    """An embedding as PEFT wraps one whose tokens it trains."""

    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids_BT: torch.Tensor) -> Any:
        return self.table(ids_BT) * 2


def test_methods_and_embeddings_put_on_a_model_are_heeded(model: Any, steps: list[int]) -> None:
    """As PEFT does to add embeddings of a prompt, and to train some tokens."""
    usual, prompt = model.prepare_inputs_for_generation, torch.randn(1, 3, model.config.hidden_size)

    def with_prompt(*args: Any, **kwargs: Any) -> Any:
        inputs = usual(*args, **kwargs)
        if (ids_BT := inputs.get("input_ids")) is not None and ids_BT.shape[1] == IDS.shape[1]:
            inputs |= {"inputs_embeds": torch.cat([prompt, model.get_input_embeddings()(ids_BT)], 1)}
            inputs |= {"input_ids": None, "attention_mask": None, "position_ids": None}
        return inputs

    plain = model.generate(IDS, **HOW)
    steps.clear()
    model.prepare_inputs_for_generation = with_prompt
    assert torch.equal(found := model.generate(IDS, **HOW), by_transformers(model, IDS, **HOW))
    assert not torch.equal(found, plain)
    del model.prepare_inputs_for_generation
    model.set_input_embeddings(Wrapped(model.get_input_embeddings()))
    assert torch.equal(model.generate(IDS, **HOW), by_transformers(model, IDS, **HOW))
    assert not steps
    with pytest.raises(UnsupportedModelError, match="expected a table with num_embeddings, found Wrapped"):
        torch_pi2.generate(model, IDS, max_new_tokens=2)


@pytest.mark.slow
def test_answers_longer_than_a_sliding_window(steps: list[int]) -> None:
    config = transformers.MistralConfig(**_LLAMA | {"hidden_act": "relu"}, sliding_window=64)
    model: Any = torch_pi2.optimize(randomise(transformers.MistralForCausalLM(config).eval()))
    for new in (20, 70):
        how = HOW | {"max_new_tokens": new}
        wanted = by_transformers(model, IDS, **how)
        for _ in range(2):
            assert torch.equal(model.generate(IDS, **how), wanted)
        found = torch_pi2.generate(model, IDS, max_new_tokens=new, eos_token_id=[]).sequences
        assert found == [wanted[0, 5:].tolist()]
    assert len(steps) == 3 * 19 + 3 * 69


@pytest.mark.parametrize("positional", [False, True])
def test_a_processor_is_heard_however_it_is_passed(model: Any, positional: bool) -> None:
    first = by_transformers(model, IDS, **HOW)[0, IDS.shape[1] : IDS.shape[1] + 1]

    def never(ids_BT: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        return scores_BV.index_fill(1, first, -1e9)

    config, listed = transformers.GenerationConfig(**HOW), LogitsProcessorList([never])
    how: dict[str, Any] = {} if positional else {"logits_processor": listed}
    given = (config, listed) if positional else (config,)
    wanted = by_transformers(model, IDS, *given, **how)
    assert torch.equal(model.generate(IDS, *given, **how), wanted)
    assert not torch.equal(wanted, by_transformers(model, IDS, config))


def test_streams_and_calls_within(model: Any, steps: list[int]) -> None:
    """A streamer may generate, too: the call within has steps of its own."""
    wanted, within = by_transformers(model, IDS, **HOW), list[torch.Tensor]()

    class Streamer(BaseStreamer):
        def __init__(self) -> None:
            self.said = list[int]()

        def put(self, value: torch.Tensor) -> None:
            self.said += value.flatten().tolist()
            if len(self.said) == 9:
                within.append(model.generate(IDS.flip(1), **HOW))

        def end(self) -> None:
            self.said.append(-1)

    streamer = Streamer()
    assert torch.equal(model.generate(IDS, **HOW, streamer=streamer), wanted)
    assert streamer.said == [*wanted[0].tolist(), -1]
    assert torch.equal(within[0], by_transformers(model, IDS.flip(1), **HOW))
    assert len(steps) == 2 * 19


def test_threads_at_once(model: Any) -> None:
    prompts = [IDS.roll(i, 1) for i in range(4)]
    wanted = [by_transformers(model, ids, **HOW) for ids in prompts]
    found: dict[int, torch.Tensor] = {}

    def go(i: int) -> None:
        for _ in range(3):
            found[i] = model.generate(prompts[i], **HOW)

    threads = [threading.Thread(target=go, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], wanted[i]) for i in range(4))


@pytest.mark.slow
def test_a_changed_model_is_seen(model: Any, steps: list[int]) -> None:
    for _ in range(2):
        model.generate(IDS, **HOW)
    model.to(torch.bfloat16)
    assert torch.equal(model.generate(IDS, **HOW), by_transformers(model, IDS, **HOW))
    model.to(torch.float32)
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0)
    assert torch.equal(model.generate(IDS, **HOW), by_transformers(model, IDS, **HOW))
    longer = HOW | {"max_new_tokens": 300}
    assert torch.equal(model.generate(IDS, **longer), by_transformers(model, IDS, **longer))
    assert len(steps) == 4 * 19 + 299


def test_copies_pickles_and_restoring(model: Any, steps: list[int]) -> None:
    wanted = model.generate(IDS, **HOW)
    assert list(inspect.signature(model.generate).parameters)[:3] == ["inputs", "generation_config", "logits_processor"]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        steps.clear()
        other.lm_head.weight.data = other.lm_head.weight.data.flip(0)
        assert torch.equal(other.generate(IDS, **HOW), by_transformers(other, IDS, **HOW))
        assert not torch.equal(other.generate(IDS, **HOW), wanted)
        assert len(steps) == 2 * 19
    shallow = copy.copy(model)
    steps.clear()
    for one in (shallow, model):
        assert torch.equal(one.generate(IDS, **HOW), wanted)
    assert len(steps) == 2 * 19
    steps.clear()
    torch_pi2.restore(model)
    assert torch.equal(model.generate(IDS, **HOW), wanted)
    assert torch.equal(tiny("llama-relu").generate(IDS, **HOW), wanted)
    assert not steps


def test_a_model_that_nobody_else_holds(steps: list[int]) -> None:
    wanted = tiny("llama-relu").generate(IDS, **HOW)
    assert torch.equal(torch_pi2.optimize(tiny("llama-relu")).generate(IDS, **HOW), wanted)
    assert len(steps) == 19


@pytest.mark.slow
def test_classes_whose_generate_calls_that_of_another(steps: list[int]) -> None:
    class Own(transformers.LlamaForCausalLM):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return super().generate(*args, **kwargs)

    plain = tiny("llama-relu")
    torch_pi2.optimize(tiny("llama-relu"))
    model = Own(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    torch_pi2.optimize(model)
    assert torch.equal(model.generate(IDS, **HOW), plain.generate(IDS, **HOW))
    assert len(steps) == 19
    assert torch.equal(by_transformers(model, IDS, **HOW), plain.generate(IDS, **HOW))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [("llama-relu", 0), ("llama-relu", 2), ("opt", 1)])
def test_a_model_goes_when_nobody_holds_it(name: str, said: int) -> None:
    """With all its weights, and not when garbage is collected next: another may be loaded into its memory."""
    model: Any = torch_pi2.optimize(tiny(name))
    for _ in range(said):
        model.generate(IDS, **HOW)
        torch_pi2.generate(model, IDS, max_new_tokens=20)
    seen = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
    gc.collect()
    gc.disable()
    try:
        del model
        assert not [part for part in seen if part() is not None]
    finally:
        gc.enable()


def test_forwards_that_name_no_cache(recwarn: pytest.WarningsRecorder, steps: list[int]) -> None:
    class Sub(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model: Any = torch_pi2.optimize(randomise(Sub(tiny("llama-relu").config).eval()))
    wanted = by_transformers(model, IDS, **HOW)
    recwarn.clear()
    assert torch.equal(model.generate(IDS, **HOW), wanted)
    assert not recwarn.list
    assert len(steps) == 19


def test_a_users_own_generate_stays() -> None:
    model: Any = tiny("llama-relu")
    model.generate = len
    torch_pi2.optimize(model)
    assert model.generate is len
    torch_pi2.restore(model)
    assert model.generate is len


def test_one_decoder_for_both_ways(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, init = list[int](), Decoder.__init__

    def counted(self: Decoder, *args: Any, **kwargs: Any) -> None:
        made.append(kwargs["batch"])
        init(self, *args, **kwargs)

    monkeypatch.setattr(Decoder, "__init__", counted)
    wanted = by_transformers(model, IDS, **HOW)[0, 5:].tolist()
    for _ in range(2):
        assert model.generate(IDS, **HOW)[0, 5:].tolist() == wanted
        assert torch_pi2.generate(model, IDS, max_new_tokens=20).sequences == [wanted]
        assert torch_pi2.generate(model, IDS, max_new_tokens=20, prompt_lookup=3).sequences == [wanted]
    assert made == [1]
    for _ in range(2):
        assert torch_pi2.generate(model, IDS, max_new_tokens=20, num_return_sequences=3).sequences == [wanted] * 3
    assert model.generate(IDS, **HOW)[0, 5:].tolist() == wanted
    assert made == [1, 3]


class _Forced(transformers.LogitsProcessor):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 7] = float("inf")
        return scores


def test_processors_may_set_infinity() -> None:
    model = torch_pi2.optimize(tiny("llama-relu"))
    found = model.generate(IDS, max_new_tokens=3, do_sample=False, logits_processor=LogitsProcessorList([_Forced()]))
    assert found[0, -3:].tolist() == [7, 7, 7]


@pytest.mark.parametrize("whole", [False, True])
def test_a_cache_that_was_patched_is_used(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Halved(DynamicCache):
        def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(key, value * 0.5, *args, **kwargs)

    update = transformers.cache_utils.DynamicLayer.update
    dense = tiny("llama-relu")
    model = torch_pi2.optimize(copy.deepcopy(dense))
    model.generate(IDS, max_new_tokens=20, do_sample=False)
    if whole:
        monkeypatch.setattr(transformers.generation.utils, "DynamicCache", Halved)
    else:
        monkeypatch.setattr(
            transformers.cache_utils.DynamicLayer,
            "update",
            lambda self, key, value, *_, **__: update(self, key, value * 0.5),
        )
    found, wanted = (one.generate(IDS, max_new_tokens=20, do_sample=False) for one in (model, dense))
    assert torch.equal(found, wanted)
