"""Keys and values in 8 and 4 bits: bytes, recorded steps, several sequences, prefixes, verifying, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import recurrent
import torch
import transformers
from tiny_models import VOCAB, tiny
from torch import nn

import torch_pi2
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ConfigError, ShapeError
from torch_pi2.formats import KV
from torch_pi2.serve.batch import Batch

PROMPT_BT = torch.randint(VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))

_ALL = "full_attention"
_SIZES: Any = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 2}
_SIZES |= {"num_key_value_heads": 1}


def fed(decoder: Decoder, steps: int) -> torch.Tensor:
    """Logits of steps with the same tokens."""
    batch = len(decoder.lengths)
    tokens_BT = torch.randint(VOCAB, (1, steps), generator=torch.Generator().manual_seed(1)).expand(batch, -1)
    return torch.stack([decoder.step(tokens_BT[:, i : i + 1]) for i in range(steps)])


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", ["qwen2", "llama-relu", "windows"])
def test_logits_are_near_those_of_the_models_dtype(name: str) -> None:
    """Grouped heads and windows; recorded steps with the bits of the model's own code, in one program."""
    model, results = (with_windows() if name == "windows" else tiny(name)), {}
    for kv in (None, *KV):
        decoder = Decoder(model, max_tokens=64, logits=True, kv=kv)
        results[kv] = [decoder.prompt(PROMPT_BT), fed(decoder, 20)]
        if kv is not None:
            assert decoder._runners[1, 1, False].is_stable
            plain = Decoder(model, max_tokens=64, logits=True, kv=kv, recorded=False)
            assert torch.equal(plain.prompt(PROMPT_BT), results[kv][0])
            assert torch.equal(fed(plain, 20), results[kv][1])
    for part in range(2):
        int8, int4 = (off(results[kv][part], results[None][part]) for kv in KV)
        assert 0 < int8 < 0.02
        assert int8 < int4 < 0.3


@torch.no_grad()
def test_what_all_keys_have_in_common_costs_nothing() -> None:
    """Biases in slowly turning channels, as in Qwen2.5; a layer whose keys differ much keeps 8 bits."""
    model, found = tiny("qwen2"), {}
    model.model.rotary_emb.inv_freq[3] = 1e-7
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.view(-1, 8)[:, [3, 7]] = 100
    for kv, measured in ((None, True), ("int8", True), ("int8", False), ("int4", True)):
        decoder = Decoder(model, max_tokens=64, logits=True, kv=kv)
        decoder._measured |= not measured
        found[kv, measured] = decoder.prompt(PROMPT_BT)
    wanted = found.pop((None, True))
    with_mean, without, _ = (off(logits, wanted) for logits in found.values())
    assert with_mean < 0.02
    assert without > 5 * with_mean
    assert [memory.kv for memory in decoder._kv._memory] == ["int4", "int4"]
    model.model.layers.append(tiny("qwen2").model.layers[0])
    model.model.layers[2].self_attn.layer_idx, model.config.num_hidden_layers = 2, 3
    model.model.layers[2].self_attn.config = model.config
    model.config.layer_types = [*model.config.layer_types, model.config.layer_types[0]]
    model.model.layers[0].self_attn.k_proj.weight *= 100
    decoder = Decoder(model, max_tokens=64, kv="int4")
    decoder.prompt(PROMPT_BT)
    assert [memory.kv for memory in decoder._kv._memory] == ["int8", "int4", "int4"]


@pytest.mark.parametrize(("kv", "most"), [("int8", 0.54), ("int4", 0.29)])
def test_memory_is_halved_and_quartered(kv: str, most: float) -> None:
    model, size = with_wide_heads(), []
    for each in (None, kv):
        decoder = Decoder(model, max_tokens=64, kv=each)
        decoder.prompt(PROMPT_BT)
        size.append(sum(t.nbytes for memory in decoder._kv._memory for t in memory.tensors()))
    assert size[1] / size[0] < most


def with_windows() -> nn.Module:
    """Layers that see 16 tokens, and one that sees all."""
    config = transformers.Gemma3TextConfig(
        **_SIZES, num_hidden_layers=3, head_dim=24, sliding_window=16, layer_types=[*["sliding_attention"] * 2, _ALL]
    )
    torch.manual_seed(0)
    return transformers.Gemma3ForCausalLM(config).eval()


def with_wide_heads() -> nn.Module:
    """In bfloat16, with heads of 64."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**_SIZES, num_hidden_layers=2, head_dim=64)
    return transformers.LlamaForCausalLM(config).bfloat16().eval()


@pytest.mark.parametrize("kv", KV)
def test_sequences_together_have_the_bits_that_each_has_alone(kv: str) -> None:
    """fork, retain and add; rows that move keep what was written."""
    model = tiny("qwen2")
    alone = Decoder(model, max_tokens=64, logits=True, kv=kv)
    alone.prompt(PROMPT_BT)
    wanted = fed(alone, 12)
    group = Decoder(model, max_tokens=64, batch=3, logits=True, kv=kv)
    group.prompt(PROMPT_BT)
    group.fork(3)
    found = fed(group, 6)
    group.retain([2])
    rest = [group.step(t) for t in _tokens(12)[:, 6:].split(1, 1)]
    torch.testing.assert_close(found[:, 1:2], wanted[:6], rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.stack(rest), wanted[6:], rtol=0, atol=1e-5)
    for _ in group.add(PROMPT_BT[:, :20], [group.copy_kv(0, 0, 8)]):
        pass
    assert group.lengths == [52, 19]


def _tokens(steps: int) -> torch.Tensor:
    return torch.randint(VOCAB, (1, steps), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kv", KV)
def test_a_known_prefix_and_verified_tokens_have_the_bits_of_prompts_and_steps(kv: str) -> None:
    model = tiny("qwen2")
    decoder = Decoder(model, max_tokens=64, logits=True, kv=kv)
    decoder.prompt(PROMPT_BT[:, :20])
    again = decoder.prompt(PROMPT_BT, known=20)
    torch.testing.assert_close(again, decoder.prompt(PROMPT_BT), rtol=0, atol=1e-5)
    logits = decoder.verify(_tokens(5))
    decoder.rollback(5)
    steps = torch.cat([decoder.step(t) for t in _tokens(5).split(1, 1)])
    torch.testing.assert_close(logits, steps, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kv", KV)
def test_generate_and_servers_have_the_decoders_tokens(kv: str) -> None:
    """A prefix is kept in fewer bytes, too."""
    model = tiny("qwen2")
    wanted = torch_pi2.generate(model, PROMPT_BT, max_new_tokens=8, eos_token_id=[], kv=kv).sequences[0]
    decoder = Decoder(model, max_tokens=64, kv=kv)
    token, own = decoder.prompt(PROMPT_BT), []
    for _ in range(8):
        own.append(int(token))
        token = decoder.step(token)
    assert own == wanted
    with pytest.raises(ConfigError, match=r"generate\(kv\): expected None with a decoder"):
        torch_pi2.generate(model, PROMPT_BT, max_new_tokens=8, decoder=decoder, kv=kv)
    found: dict[str | None, int] = {}
    for each in (None, kv):
        batch = Batch(with_wide_heads(), max_tokens=64, max_batch_size=2, prefix_bytes=1 << 20, kv=each)
        batch._decoder.prompt(PROMPT_BT)
        found[each] = sum(t.nbytes for t in batch._decoder.copy_kv(0, 0, 32))
    assert found[kv] < 0.54 * found[None]


@pytest.mark.slow
@pytest.mark.parametrize("kv", KV)
def test_compiled_steps_write_into_the_same_memory(kv: str) -> None:
    model = tiny("qwen2")
    found = []
    for compiled in (False, True):
        decoder = Decoder(model, max_tokens=64, logits=True, compiled=compiled, kv=kv)
        decoder.prompt(PROMPT_BT)
        found.append(fed(decoder, 6))
        assert bool(decoder._compiled_steps) is compiled
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4)


def test_refusals() -> None:
    model = tiny("qwen2")
    with pytest.raises(ConfigError, match="kv: expected int8 or int4, found 'fp8'"):
        Decoder(model, max_tokens=64, kv="fp8")
    for name in ("gemma2", "falcon"):
        with pytest.raises(ConfigError, match=r"kv of \w+: expected a model on the CPU .*found soft caps"):
            Decoder(tiny(name), max_tokens=64, kv="int8")
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match=r"found attention 'eager'. Call model.set_attn_implementation\('sdpa'\)"):
        Decoder(model, max_tokens=64, kv="int8")
    model.set_attn_implementation("sdpa")
    assert Decoder(model, max_tokens=64, kv="int8").prompt(PROMPT_BT).shape == (1, 1)
    for name in ("mamba", "mamba2"):
        with pytest.raises(ConfigError, match=r"found recurrent states alone, without keys and values. Leave it out"):
            Decoder(recurrent.tiny(name), max_tokens=64, kv="int8")


@pytest.mark.parametrize("read", [False, True])
def test_known_keys_of_another_format_are_refused(read: bool) -> None:
    """Before and after a first prompt has allocated memory; other sequences go on."""
    model = tiny("qwen2")
    copied = {}
    for kv in (None, *KV):
        decoder = Decoder(model, max_tokens=64, kv=kv)
        decoder.prompt(PROMPT_BT)
        copied[kv] = decoder.copy_kv(0, 0, 8)
    for kv in (None, *KV):
        decoder = Decoder(model, max_tokens=64, batch=2, logits=True, kv=kv)
        if read:
            decoder.prompt(PROMPT_BT[:1])
        for other in {None, *KV} - {kv}:
            words = rf"expected {kv or 'float'}.*found {other or 'float32'} \[\d+, T, \d+\]"
            with pytest.raises(ShapeError, match=words):
                list(decoder.add(PROMPT_BT[:1], [copied[other]]))
        narrower = [part[..., :-1] for part in copied[kv]]
        if read or kv:
            with pytest.raises(ShapeError, match=r"known keys and values: expected .* Copy them from"):
                list(decoder.add(PROMPT_BT[:1], [narrower]))
            with pytest.raises(ShapeError, match=r"expected \d tensors, found 2"):
                list(decoder.add(PROMPT_BT[:1], [copied[kv][:2]]))
        list(decoder.add(PROMPT_BT[:1], [copied[kv]]))
        assert decoder.step(torch.ones(1 + read, 1, dtype=torch.int64)).isfinite().all()
