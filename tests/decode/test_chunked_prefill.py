"""Which models are read in pieces, and may have sequences of several lengths; what would be wrong is not."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers
from tiny_models import tiny
from torch import nn

import torch_pi2
from torch_pi2.decode.attention import packed_attention
from torch_pi2.decode.chunked_prefill import (
    CHUNK_TOKENS,
    lossless_chunk_tokens,
    same_frequencies_up_to,
    takes_several_lengths,
    uses_our_attention,
)
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.layers.prompt import has_tiles

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "hidden_act": "relu",
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 32,
    "long_factor": [1.0 + i for i in range(32)],
    "original_max_position_embeddings": 200,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
IDS = torch.randint(3, 100, (1, 300), generator=torch.Generator().manual_seed(1))


def made(name: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | more)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def quantised(name: str, **more: Any) -> nn.Module:
    return torch_pi2.optimize(made(name, **more), weights="int8", activations="int8", calibration=IDS[:, :64])


def wide(name: str, **rope: Any) -> nn.Module:
    """A model whose positions matter."""
    model = made(name, **rope)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.08)
    return model


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 200}),
        ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 200}),
    ],
    ids=["longrope", "dynamic"],
)
def test_frequencies_that_depend_on_the_length(name: str, rope: dict[str, Any]) -> None:
    model = wide(name, **rope)
    assert same_frequencies_up_to(model) == 200
    with torch.no_grad():
        wanted = model(IDS).logits[:, -1]
    for chunk in (0, 100):
        decoder = Decoder(model, max_tokens=310, batch=2, compiled=False, logits=True, chunk_tokens=chunk)
        assert torch.allclose(decoder.prompt(IDS), wanted, atol=1e-3)
        assert torch.allclose(decoder.prompt(IDS, known=250), wanted, atol=1e-3)  # whatever was known of it
    with pytest.raises(UnsupportedModelError, match="rotary frequencies that do not depend on the length"):
        decoder.add(IDS)
    decoder = Decoder(model, max_tokens=200, batch=2, compiled=False)  # so far they are the same
    for tokens in (50, 60):
        assert list(decoder.add(IDS[:, :tokens])) == [0]
    assert same_frequencies_up_to(made("Llama")) > 1 << 40


@pytest.mark.slow
def test_who_computes_attention() -> None:
    wanted = CHUNK_TOKENS if has_tiles() else 0
    assert lossless_chunk_tokens(quantised("Llama")) == wanted
    assert lossless_chunk_tokens(quantised("Qwen2")) == wanted
    eager = quantised("Llama")
    eager.set_attn_implementation("eager")
    assert lossless_chunk_tokens(eager) == 0
    assert lossless_chunk_tokens(quantised("StableLm")) == 0  # its own attention
    assert lossless_chunk_tokens(quantised("Gemma2", head_dim=64)) == 0
    capped = quantised("Llama")
    capped.config.attn_logit_softcapping = 30.0
    assert lossless_chunk_tokens(capped) == 0
    buffers = quantised("Llama")
    buffers.model.layers[0].self_attn.register_buffer("mixing", torch.eye(4))
    assert lossless_chunk_tokens(buffers) == 0


def test_what_a_model_takes_while_another_thread_steps() -> None:
    """Its configuration names our attention meanwhile, which is sdpa's."""
    models = [quantised("Llama"), quantised("Llama", attn_implementation="eager")]
    for model in models:
        found = takes_several_lengths(model, 64), uses_our_attention(model), lossless_chunk_tokens(model)
        with packed_attention(model):
            during = takes_several_lengths(model, 64), uses_our_attention(model), lossless_chunk_tokens(model)
        assert during == found
    assert [uses_our_attention(model) for model in models] == [True, False]


def test_two_threads_in_one_model() -> None:
    """Whoever leaves first does not take attention from the other."""
    model = tiny("llama-relu")
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with packed_attention(model):
            entered.set()
            left.wait(20)

    thread = threading.Thread(target=other)
    with packed_attention(model):
        thread.start()
        entered.wait(20)
    assert model.config._attn_implementation == "pi2_sdpa"
    left.set()
    thread.join()
    assert model.config._attn_implementation == "sdpa"
