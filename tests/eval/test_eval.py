"""Loss and timing: against an independent computation, and on what must be refused."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from losses import nats_per_token
from tiny_models import LAYERS, tiny
from tiny_tokenizers import byte_tokenizer
from torch import nn
from transformers import PreTrainedTokenizerFast

from torch_pi2.errors import CalibrationError, ConfigError, NonFiniteError
from torch_pi2.eval.loss import bits_per_byte
from torch_pi2.eval.timing import time_decode
from torch_pi2.eval.work import Work, work

TEXT = "def f(x):\n    return x + 1  # plain\nprint(f(2))\n" * 8


class Bigram(nn.Module):
    """Logits from the last token alone: its loss does not depend on windows, so any windowing must agree."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, vocab)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.table(ids_BT)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(TEXT)


@pytest.fixture
def bigram() -> Bigram:
    torch.manual_seed(0)
    return Bigram(300)


def independent_bits_per_byte(model: Bigram, ids: list[int], tokenizer: Any) -> tuple[float, int]:
    """(bits per byte, bytes) in plain Python, bytes by decoding what was scored."""
    log_p = torch.log_softmax(model.table.weight.detach().double(), -1)
    nats = -sum(float(log_p[a, b]) for a, b in pairwise(ids))
    n_bytes = len(tokenizer.decode(ids[1:], clean_up_tokenization_spaces=False).encode())
    return nats / math.log(2) / n_bytes, n_bytes


@pytest.mark.parametrize(("window", "batch_size"), [(512, 8), (7, 3), (1, 1), (16, 64)])
def test_bits_per_byte_agrees_with_plain_python(bigram, tokenizer, window, batch_size) -> None:
    ids = tokenizer(TEXT)["input_ids"]
    wanted, n_bytes = independent_bits_per_byte(bigram, ids, tokenizer)
    report = bits_per_byte(bigram, tokenizer, TEXT, window=window, batch_size=batch_size)
    assert (report.tokens, report.bytes) == (len(ids) - 1, n_bytes)
    assert report.bits_per_byte == pytest.approx(wanted, rel=1e-5)
    assert report.perplexity == pytest.approx(math.exp(report.nats_per_token))
    assert report.bits_per_byte == pytest.approx(report.nats_per_token * report.tokens / math.log(2) / report.bytes)


def test_max_tokens_scores_a_prefix(bigram, tokenizer) -> None:
    ids = tokenizer(TEXT)["input_ids"][:21]
    wanted, n_bytes = independent_bits_per_byte(bigram, ids, tokenizer)
    report = bits_per_byte(bigram, tokenizer, TEXT, window=6, max_tokens=20)
    assert (report.tokens, report.bytes) == (20, n_bytes)
    assert report.bits_per_byte == pytest.approx(wanted, rel=1e-5)


def test_characters_split_over_tokens_are_scored_whole(bigram) -> None:
    tokenizer = byte_tokenizer("abc", size=258)
    text = "é→𝄞" * 4  # 2, 3 and 4 bytes, one token each
    assert len(tokenizer(text)["input_ids"]) == 36
    for max_tokens in range(4, 34):
        report = bits_per_byte(bigram, tokenizer, text, max_tokens=max_tokens)
        assert report.tokens == report.bytes, max_tokens  # one byte a token, nothing counted twice
        assert max_tokens - 4 < report.tokens <= max_tokens


def test_a_tokenizer_with_bos_scores_the_first_token_too(bigram) -> None:
    with_bos = byte_tokenizer(TEXT, bos=True)
    ids = with_bos(TEXT)["input_ids"]
    report = bits_per_byte(bigram, with_bos, TEXT, window=10_000)
    assert (report.tokens, report.bytes) == (len(ids) - 1, len(TEXT.encode()))
    wanted = nats_per_token(bigram, [torch.tensor([ids])])
    assert report.nats_per_token == pytest.approx(wanted, rel=1e-6)
    short = bits_per_byte(bigram, with_bos, TEXT, window=8)  # BOS before every window: other contexts, same tokens
    assert (short.tokens, short.bytes) == (report.tokens, report.bytes)
    assert short.nats_per_token != pytest.approx(wanted, rel=1e-6)


def test_hugging_face_loss_is_the_models_own(tokenizer) -> None:
    model = tiny("llama")
    ids_BT = torch.randint(0, 64, (3, 17))
    with torch.no_grad():
        wanted = float(model(input_ids=ids_BT, labels=ids_BT).loss)
    assert nats_per_token(model, [ids_BT]) == pytest.approx(wanted, rel=1e-5)


def test_mode_and_gradients_are_left_as_they_were(bigram, tokenizer) -> None:
    bigram.train()
    bits_per_byte(bigram, tokenizer, TEXT)
    assert bigram.training
    assert torch.is_grad_enabled()
    assert bigram.table.weight.grad is None


@pytest.mark.parametrize("text", ["", "d"])
def test_too_short_text_is_refused(bigram, tokenizer, text) -> None:
    with pytest.raises(CalibrationError, match=r"expected at least two tokens, found .* characters.*longer text"):
        bits_per_byte(bigram, tokenizer, text)


@pytest.mark.parametrize("setting", ["window", "batch_size", "max_tokens"])
def test_settings_below_one_are_refused(bigram, tokenizer, setting) -> None:
    with pytest.raises(ConfigError, match=f"{setting}: expected a positive number, found 0"):
        bits_per_byte(bigram, tokenizer, TEXT, **{setting: 0})


def test_nan_loss_is_refused(bigram, tokenizer) -> None:
    bigram.table.weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="loss: expected a finite number, found nan"):
        bits_per_byte(bigram, tokenizer, TEXT)


# --- timing ---


class Slow(nn.Module):
    """An FFN that takes a known time."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = inner, seconds

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.inner(x_BTH)


def slowed(seconds: float) -> nn.Module:
    model = tiny("llama")
    for layer in model.model.layers:
        layer.mlp = Slow(layer.mlp, seconds)
    return model


PROMPT = torch.ones(1, 4, dtype=torch.long)


def test_a_slower_model_takes_longer() -> None:
    timing, fast = time_decode([slowed(0.01), slowed(0.001)], PROMPT, new_tokens=3, warmup=0, rounds=3)
    assert timing.total_ms > max(10 * LAYERS, fast.total_ms)
    assert min(timing.rounds) <= timing.total_ms <= max(timing.rounds)


def test_the_prompt_is_not_timed_and_decoding_uses_the_cache() -> None:
    lengths: list[int] = []
    model = tiny("llama")
    model.model.embed_tokens.register_forward_pre_hook(lambda _m, inputs: lengths.append(inputs[0].shape[1]))
    time_decode([model], PROMPT, new_tokens=3, warmup=0, rounds=1)
    assert lengths == [4, 1, 1, 1]


# --- work ---


def test_work_counts_what_the_operator_did() -> None:
    from torch_pi2.ops import load

    load()
    x_TH = torch.randn(5, 16)
    rows_IRH = torch.randn(40, 3, 16)
    active_TC = torch.rand(5, 30) < 0.3
    with work() as done:
        torch.ops.pi2.sparse_ffn(x_TH, rows_IRH, None, None, None, active_TC, "relu", True, 10, 0.0)
    assert done.neurons == 5 * 40
    computed = 5 * 10 + int(active_TC.sum())
    assert done.gate_rows == computed
    assert done.neurons_computed == pytest.approx(computed / 200)
    gate_TI, up_TI = x_TH @ rows_IRH[:, 0].T, x_TH @ rows_IRH[:, 1].T
    asked = torch.cat([torch.ones(5, 10, dtype=torch.bool), active_TC], 1)
    assert done.up_rows == int((asked & (gate_TI > 0)).sum())
    assert done.down_rows == int((asked & (gate_TI > 0) & (up_TI > 0)).sum())
    assert done.rows_used == pytest.approx((computed + done.up_rows + done.down_rows) / 600)


def test_no_work_has_no_shares() -> None:
    model = tiny("llama")
    with work() as done, torch.no_grad():
        model(PROMPT)
    assert done == Work()
    assert done.to_json()["neurons_computed"] is None
