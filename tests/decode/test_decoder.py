"""``Decoder``: the same tokens as Hugging Face's own loop; q, k and v become one call over one piece of memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_models import VOCAB, tiny
from torch import nn

import torch_pi2
from benchmarks.attention import Recorder
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.decode.attention import masks_of, packed_attention, packed_sdpa
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ConfigError, DtypeError, Pi2Error, ShapeError, UnsupportedModelError
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.ops import load

load()
PROMPT_BT = torch.randint(VOCAB, (1, 7), generator=torch.Generator().manual_seed(0))
NEW = 6


def quantised(name: str) -> nn.Module:
    """A tiny model with our dense FFNs and every other linear in int4."""
    model = torch_pi2.optimize(tiny(name), config=torch_pi2.Config(method="dense"))
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and not isinstance(module.weight, OffloadedParameter):
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, QuantLinear.from_linear(module, "int4"))
    return model.eval()


@torch.inference_mode()
def expected(model: nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """Greedy tokens ``[B, NEW]`` without any cache."""
    for _ in range(NEW):
        ids_BT = torch.cat((ids_BT, model(ids_BT).logits[:, -1:].argmax(-1)), 1)
    return ids_BT[:, -NEW:]


def decoded(decoder: Decoder, ids_BT: torch.Tensor) -> torch.Tensor:
    tokens = [decoder.prompt(ids_BT)]
    while len(tokens) < NEW:
        tokens.append(decoder.step(tokens[-1]))
    return torch.cat(tokens, 1)


def calls(decoder: Decoder, name: str) -> int:
    """How often an operator runs in one step."""
    token = decoder.prompt(PROMPT_BT)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        decoder.step(token)
    return sum(e.count for e in profiler.key_averages() if e.key == name)


@pytest.mark.parametrize("name", ["llama-relu", "gemma"])
def test_eager_decoding_is_that_of_the_model_and_starts_anew_with_each_prompt(name):
    model = tiny(name)
    decoder = Decoder(model, max_tokens=16, compiled=False)
    other_BT = PROMPT_BT.flip(1)
    for ids_BT in (PROMPT_BT, other_BT, PROMPT_BT):
        assert torch.equal(decoded(decoder, ids_BT), expected(model, ids_BT))


@pytest.mark.slow
def test_compiled_decoding_merges_linears_of_one_input_and_moves_their_rows_once():
    model = quantised("qwen2")  # q, k and v have biases
    want = expected(model, PROMPT_BT)
    decoder = Decoder(model, max_tokens=16, compiled=True)
    assert torch.equal(decoded(decoder, PROMPT_BT), want)
    layers = len(model.model.layers)
    assert calls(Decoder(model, max_tokens=16, compiled=False), "pi2::linear") == 4 * layers + 1
    assert calls(decoder, "pi2::linear") == 2 * layers + 1
    attention = model.model.layers[0].self_attn
    rows = [attention.q_proj.rows, attention.k_proj.rows, attention.v_proj.rows]
    assert rows[0].data_ptr() + rows[0].nbytes == rows[1].data_ptr()
    assert rows[1].data_ptr() + rows[1].nbytes == rows[2].data_ptr()
    # A second decoder finds them in place, and has its own code: the first one's cache is not touched.
    places = [r.data_ptr() for r in rows]
    pair = Decoder(model, max_tokens=12, batch=2)
    both = torch.cat((PROMPT_BT, PROMPT_BT.flip(1)))
    assert torch.equal(decoded(pair, both), expected(model, both))
    assert [r.data_ptr() for r in rows] == places
    assert torch.equal(decoded(decoder, PROMPT_BT), want)
    assert torch.equal(expected(model, PROMPT_BT), want)


def test_code_compiled_with_one_thread_is_right_with_two():
    """Inductor keeps it for both: what one thread does once, two must not do twice."""
    model, threads = quantised("qwen2"), torch.get_num_threads()
    decoder, both_BT = Decoder(model, max_tokens=13, batch=2), torch.cat((PROMPT_BT, PROMPT_BT.flip(1)))
    want = expected(model, both_BT)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(decoded(decoder, both_BT), want)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_compiled_decoders_of_two_models_do_not_share_code():
    first, second = (Decoder(tiny("llama-relu", seed=seed), max_tokens=16) for seed in (0, 1))
    assert torch.equal(decoded(first, PROMPT_BT), expected(first.model, PROMPT_BT))
    assert torch.equal(decoded(second, PROMPT_BT), expected(second.model, PROMPT_BT))
    assert not sparse_layers(first.model)  # the backend's own rewriting left the model alone
    assert first.model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_a_compiled_step_takes_ids_of_any_layout_and_integer_type():
    """It has no guards: what lies otherwise than at its first step would be read as other ids."""
    decoder, fed_BT = Decoder(tiny("llama-relu"), max_tokens=16, batch=2), torch.tensor([[3, 5, 7], [11, 13, 17]])
    results = []
    for layout in (torch.Tensor.contiguous, lambda ids_B1: ids_B1, torch.Tensor.int):
        decoder.prompt(PROMPT_BT.expand(2, -1))
        results.append(torch.cat([decoder.step(layout(ids_B1)) for ids_B1 in fed_BT.split(1, dim=1)], 1))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("tokens", [1, 3])
def test_packed_attention_is_attention(tokens: int):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, t, 8, generator=generator) for n, t in ((6, tokens), (2, 9), (2, 9)))
    mask = torch.ones(2, 1, tokens, 9, dtype=torch.bool)
    mask[0, :, :, 5:] = mask[1, :, :, :2] = False
    module = nn.Module()
    module.num_key_value_groups = 3
    got, weights = packed_sdpa(module, query, key, value, mask, scaling=0.2)
    repeated = (t.repeat_interleave(3, 1) for t in (key, value))
    want = F.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.2).transpose(1, 2)
    assert weights is None
    assert got.shape == want.shape
    assert torch.allclose(got, want, atol=1e-6)


def test_a_prompt_without_a_mask_is_causal_unless_the_module_is_not():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, t, 8, generator=generator) for n, t in ((6, 40), (2, 100), (2, 100)))
    repeated = [t.repeat_interleave(3, 1) for t in (key, value)]
    causal, full = (
        F.scaled_dot_product_attention(query, *repeated, is_causal=c, scale=0.2).transpose(1, 2) for c in (True, False)
    )
    module = nn.Module()
    module.num_key_value_groups = 3
    for set_so, asked, wanted in (
        (None, None, causal),
        (False, None, full),
        (True, False, full),
        (False, True, causal),
    ):
        if set_so is not None:
            module.is_causal = set_so
        got = packed_sdpa(module, query, key, value, None, scaling=0.2, is_causal=asked)[0]
        assert torch.allclose(got, wanted, atol=1e-6)
    step = packed_sdpa(module, query[:, :, :1], key, value, None, scaling=0.2, is_causal=True)[0]
    assert torch.allclose(step, full[:, :1], atol=1e-6)  # one token is the newest: it sees all


def test_attention_that_the_operator_has_not_is_torchs():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, t, 8, generator=generator) for n, t in ((6, 2), (2, 9), (2, 9)))
    module, mask = nn.Module(), torch.ones(2, 1, 2, 9, dtype=torch.bool)
    module.num_key_value_groups = 3
    cases = [
        (query, value, mask, {}, torch.ops.pi2.attention),
        (query, value, mask.float(), {}, F.scaled_dot_product_attention),
        (query, value, mask.expand(2, 6, 2, 9), {}, F.scaled_dot_product_attention),
        (query, value, None, {"is_causal": False}, torch.ops.pi2.attention),
        (query, value, mask, {"position_bias": torch.zeros(2, 6, 2, 9)}, F.scaled_dot_product_attention),
        (query, value[..., :4], mask, {}, F.scaled_dot_product_attention),
    ]
    for q, v, m, settings, op in cases:
        with Recorder() as recorder:
            got = packed_sdpa(module, q, key, v, m, **settings)[0]
        assert [call[0] for call in recorder.calls] == [op]
        repeated = (t.repeat_interleave(3, 1) for t in (key, v))
        want = F.scaled_dot_product_attention(q, *repeated).transpose(
            1, 2
        )  # all see all; adding 1 everywhere is nothing
        assert torch.allclose(got, want, atol=1e-6)


def test_a_class_that_does_not_look_attention_up_keeps_its_own():
    model = tiny("falcon")
    with packed_attention(model):
        assert model.config._attn_implementation == "sdpa"
    ids_BT = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))
    assert torch.equal(decoded(Decoder(model, max_tokens=24, compiled=False), ids_BT), expected(model, ids_BT))


class OwnAttention(nn.Module):
    """As models that bring their code have it: a token of its own sees all that the cache returns, or a mask of their
    own is as long as the cache says that it is.
    """

    def __init__(self, of_llama: Any, masked: bool) -> None:
        super().__init__()
        self.of_llama, self.masked, self.layer_idx = of_llama, masked, of_llama.layer_idx

    def forward(self, hidden_states, position_embeddings, **kwargs):
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        shape = (*hidden_states.shape[:-1], -1, self.of_llama.head_dim)
        parts = self.of_llama.q_proj, self.of_llama.k_proj, self.of_llama.v_proj
        q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in parts)
        q, k = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        before = cache.get_seq_length(self.layer_idx)
        k, v = cache.update(k, v, self.layer_idx)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * self.of_llama.scaling
        if self.masked or q.shape[2] > 1:
            hidden = torch.ones(q.shape[2], before + q.shape[2], dtype=torch.bool).triu(before + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(hidden_states.shape)
        return self.of_llama.o_proj(mixed), None


@pytest.mark.parametrize("masked", [True, False])
def test_attention_of_other_code_sees_no_places_that_are_not_written_yet(masked: bool) -> None:
    model: Any = tiny("llama-relu")
    for layer in model.model.layers:
        layer.self_attn = OwnAttention(layer.self_attn, masked)
    want = expected(model, PROMPT_BT)
    torch_pi2.optimize(model)
    for decoder in (Decoder(model, max_tokens=24), Decoder(model, max_tokens=24, batch=3, recorded=False)):
        assert torch.equal(decoded(decoder, PROMPT_BT), want)
        assert torch.equal(decoded(decoder, PROMPT_BT), want)
    token = decoder.prompt(PROMPT_BT)
    decoder.fork(2)
    both = [token.expand(2, 1)]
    while len(both) < NEW:
        both.append(decoder.step(both[-1]))
    assert torch.equal(torch.cat(both, 1), want.expand(2, NEW))
    decoder.rollback(2)
    assert torch.equal(decoder.step(both[-3]), both[-2])
    with pytest.raises(UnsupportedModelError, match="sequences of several lengths"):
        next(decoder.add(PROMPT_BT[:, :3]))
    assert torch_pi2.generate(model, PROMPT_BT, max_new_tokens=NEW).sequences[0] == want[0].tolist()
    of_generate = {"attention_mask": torch.ones_like(PROMPT_BT), "max_new_tokens": NEW, "do_sample": False}
    assert torch.equal(model.generate(PROMPT_BT, **of_generate)[:, -NEW:], want)


def gpt_oss() -> nn.Module:
    """Attention with sinks; transformers computes it by ``eager``."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 64}
    config = transformers.GptOssConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1 if name.endswith("sinks") else 0, 0.3)
    return model


def test_sinks_are_in_the_sum():
    model = gpt_oss()
    ids_BT = torch.randint(VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(ids_BT).logits
        with packed_attention(model), Recorder() as recorder:
            found = model(ids_BT).logits
        sinks = model.model.layers[0].self_attn.sinks
        sinks += 3
        with packed_attention(model):
            assert not torch.allclose(model(ids_BT).logits, wanted, atol=1e-2)
        sinks -= 3
    assert [call[0] for call in recorder.calls] == [torch.ops.pi2.attention] * 2
    assert model.config._attn_implementation == "eager"  # as before
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    decoder = Decoder(model, max_tokens=48, compiled=False)
    assert torch.equal(decoded(decoder, ids_BT), expected(model, ids_BT))
    assert calls(decoder, "pi2::attention") == 2


def test_sinks_with_what_the_operator_has_not():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, t, 8, generator=generator) for n, t in ((6, 2), (2, 9), (2, 9)))
    module, sinks_N = nn.Module(), torch.ones(6)
    wanted = packed_sdpa(module, query, key, value, None, s_aux=sinks_N)[0]
    with Recorder() as recorder:  # gradients
        found = packed_sdpa(module, query.clone().requires_grad_(), key, value, None, s_aux=sinks_N)[0]
    assert not recorder.calls
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    for more, mask in (({"dropout": 0.1}, None), ({}, torch.zeros(2, 1, 2, 9))):
        with pytest.raises(ConfigError, match="attention of Module with sinks: expected boolean masks for all heads"):
            packed_sdpa(module, query, key, value, mask, s_aux=sinks_N, **more)


def test_parts_with_another_attention_keep_it():
    text = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    seen = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text, num_attention_heads=2),
        vision_config=transformers.CLIPVisionConfig(**seen, num_attention_heads=2),
    )
    asked = {"": "sdpa", "text_config": "sdpa", "vision_config": "eager"}
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation=asked)

    def used() -> list[str]:
        return [c._attn_implementation for c in (model.config, model.config.text_config, model.config.vision_config)]

    assert used() == ["sdpa", "sdpa", "eager"]
    with packed_attention(model):
        assert used() == ["pi2_sdpa", "pi2_sdpa", "eager"]
    assert used() == ["sdpa", "sdpa", "eager"]


#: Windows or chunks of 8 positions: in all layers, in some, and as eager attention adds them.
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "phi3": {"sliding_window": 8, "pad_token_id": 0},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "num_local_experts": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str) -> None:
    """Longer sequences than they are, of several lengths, give the tokens of the model without any cache."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model(name, **sizes, **heads, **WINDOWS[name])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in (p for p in model.parameters() if p.dim() > 1):
        nn.init.normal_(parameter, 0, 0.3)
    prompts = [torch.randint(1, VOCAB, (1, n), generator=torch.Generator().manual_seed(n)) for n in (20, 11)]
    wanted = [expected(model, ids_1T) for ids_1T in prompts]
    decoder = Decoder(model, max_tokens=40, compiled=False)
    assert [decoded(decoder, ids_1T).tolist() for ids_1T in prompts] == [w.tolist() for w in wanted]
    both = Decoder(model, max_tokens=40, batch=2, compiled=False)
    for ids_1T in prompts:
        list(both.add(ids_1T))
    fed_B1, steps = torch.cat([ids_1T[:, -1:] for ids_1T in prompts]), []
    for _ in range(NEW):
        fed_B1 = both.step(fed_B1)
        steps.append(fed_B1)
    assert torch.cat(steps, 1).tolist() == torch.cat(wanted).tolist()


def test_masks() -> None:
    text = transformers.AutoConfig.for_model("gemma2", num_hidden_layers=2, sliding_window=3)
    config = SimpleNamespace(get_text_config=lambda **_: text)  # that of a model with images, too
    masks = masks_of(config, torch.tensor([[4, 5], [0, 1]]), 8)
    assert isinstance(masks, dict)
    assert sorted(masks) == ["full_attention", "sliding_attention"]
    rows = {kind: [["".join("01"[s] for s in row) for row in b[0]] for b in seen.int()] for kind, seen in masks.items()}
    assert rows["full_attention"] == [["11111000", "11111100"], ["10000000", "11000000"]]
    assert rows["sliding_attention"] == [["00111000", "00011100"], ["10000000", "11000000"]]
    added = masks_of(config, torch.tensor([[4, 5], [0, 1]]), 8, torch.float16)
    assert isinstance(added, dict)
    assert torch.equal(added["sliding_attention"] == 0, masks["sliding_attention"])
    assert float(added["sliding_attention"].min()) == torch.finfo(torch.float16).min
    assert isinstance(masks_of(config, torch.tensor([[1]]), 3), torch.Tensor)  # never filled


def test_models_whose_cache_cannot_be_static() -> None:
    small = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    t5 = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2)
    encoder: Any = nn.Module()
    encoder.config = t5
    for model, found in ((nn.Linear(2, 2), "a model without a configuration"), (encoder, "an encoder-decoder")):
        with pytest.raises(UnsupportedModelError, match=f"expected a causal language model .* found {found}"):
            Decoder(model, max_tokens=16)
    with pytest.raises(UnsupportedModelError, match=r"found attention with linear biases \(ALiBi\)"):
        Decoder(tiny("falcon-bias"), max_tokens=16)
    roberta = transformers.RobertaConfig(**small, num_attention_heads=2, intermediate_size=32, is_decoder=True)
    with pytest.raises(UnsupportedModelError, match="found positions that its code derives from the ids"):
        Decoder(transformers.RobertaForCausalLM(roberta).eval(), max_tokens=16)
    windows = {"attention_types": [[["global", "local"], 1]], "window_size": 12, "num_heads": 2, "num_layers": 2}
    neo = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(vocab_size=VOCAB, hidden_size=32, **windows)).eval()
    Decoder(neo, max_tokens=12)
    with pytest.raises(UnsupportedModelError, match="windows of 12 tokens that end with the cache"):
        Decoder(neo, max_tokens=16)
    own = transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**small, embedding_dim=32, num_heads=4))
    with pytest.raises(UnsupportedModelError, match="found a cache of its own, xLSTMCache"):
        Decoder(own, max_tokens=16)
    rwkv = transformers.RwkvForCausalLM(transformers.RwkvConfig(**small, attention_hidden_size=32)).eval()
    decoder = Decoder(rwkv, max_tokens=16, compiled=False)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="found one that leaves it empty: what it knows of the prompt"):
            decoder.prompt(PROMPT_BT)
        assert decoder.length == 0


def test_wrong_sizes():
    model = tiny("llama")
    with pytest.raises(ConfigError, match="max_tokens, batch: expected at least 2 and 1, found 1, 1"):
        Decoder(model, max_tokens=1)
    decoder = Decoder(model, max_tokens=8, compiled=False)
    with pytest.raises(ShapeError, match=r"decoding step: expected a prompt before it, found none that was read"):
        decoder.step(torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"prompt: expected \[1, 1 to 8\], found \[1, 9\]"):
        decoder.prompt(torch.zeros(1, 9, dtype=torch.long))
    token = decoder.step(decoder.prompt(PROMPT_BT))
    with pytest.raises(ShapeError, match=r"decoding step: .* found \[1, 1\] after 8 tokens"):
        decoder.step(token)
    decoder.prompt(PROMPT_BT)
    with pytest.raises(ShapeError, match=r"found \[2, 1\] after 7 tokens"):
        decoder.step(token.repeat(2, 1))


def test_a_prompt_that_failed_leaves_nothing_to_go_on_from(monkeypatch: pytest.MonkeyPatch):
    model = tiny("llama")
    decoder = Decoder(model, max_tokens=32, compiled=False)
    token = decoder.prompt(PROMPT_BT)
    monkeypatch.setattr(model, "forward", None)
    with pytest.raises(TypeError):
        decoder.prompt(PROMPT_BT)
    monkeypatch.undo()
    with pytest.raises(ShapeError, match="expected a prompt before it"):
        decoder.step(token)


WRONG_IDS: dict[str, tuple[Any, str]] = {
    "list": ([1, 2], "prompt: expected a tensor of ids \\[B, T\\], found a list"),
    "one row": (torch.arange(3), "prompt: expected a tensor of ids \\[B, T\\], found \\[3\\]"),
    "floats": (torch.ones(1, 3), "prompt: expected integer token ids, found float32"),
    "negative": (torch.tensor([[-1]]), "prompt: expected tokens of 0 to .*, found the token -1"),
}


@pytest.mark.parametrize("name", WRONG_IDS)
def test_ids_are_checked(name: str) -> None:
    ids, message = WRONG_IDS[name]
    with pytest.raises(Pi2Error, match=message):
        Decoder(tiny("llama-relu"), max_tokens=8).prompt(ids)


@pytest.mark.parametrize(
    ("settings", "message"), [({"max_tokens": 5.5}, "whole number"), ({"backend": "x"}, "inductor")]
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Decoder(tiny("llama-relu"), **({"max_tokens": 8} | settings))


def test_a_model_that_was_converted_needs_another_decoder() -> None:
    model = tiny("llama-relu")
    decoder = Decoder(model, max_tokens=40, compiled=False)
    decoder.prompt(PROMPT_BT)
    model.to(torch.bfloat16)
    with pytest.raises(DtypeError, match="Make another Decoder after converting"):
        decoder.prompt(PROMPT_BT)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("began", [True, False])
@torch.no_grad()
def test_autocast_stays_as_it_was_in_the_first_prompt(recorded: bool, began: bool) -> None:
    """Recorded steps would go on without heeding it."""
    decoder = Decoder(torch_pi2.optimize(tiny("llama-relu")), max_tokens=32, recorded=recorded)

    def autocast(enabled: bool) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=enabled)

    with autocast(began):
        token = decoder.prompt(PROMPT_BT)
        for _ in range(12):
            token = decoder.step(token)
    other = r"expected (torch\.autocast|float32|bfloat16).*, as in the first prompt.*Keep torch\.autocast"
    with autocast(not began), pytest.raises(DtypeError, match=other):
        decoder.step(token)
    with autocast(began):
        decoder.step(token)
    with autocast(not began), pytest.raises(DtypeError, match=other):
        decoder.prompt(PROMPT_BT)
