"""``cached_attention``: its reference against torch's attention, its kernel in ExecuTorch against its reference, and
decoders with windows, soft caps and caches in 16 and 8 bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exported import drawn_model
from runner_calls import run
from tiny_models import BUILDERS
from torch import nn
from torch.library import opcheck

import torch_pi2
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.export import attention
from torch_pi2.export import executorch as backend
from torch_pi2.export.attention import KV_DTYPES, cached_attention, define, packed, takes_attention, unpacked
from torch_pi2.export.decoder import Lanes, check_traced, method_spec
from torch_pi2.export.manifest import Manifest
from torch_pi2.export.partitioner import lower
from torch_pi2.export.program import MethodSpec, trace
from torch_pi2.export.run import Bundle

LANES, LENGTH = 3, 150
#: Batch, query heads, key heads, tokens, width.
SIZES = [(1, 4, 2, 1, 8), (2, 6, 2, 1, 13), (1, 4, 4, 9, 40), (1, 8, 1, 70, 24)]


def drawn(size: tuple[int, ...], kv: str, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Query, key and value of new tokens; a cache that has something everywhere."""
    batch, heads, key_heads, tokens, width = size
    rng = torch.Generator().manual_seed(seed)
    new = [torch.randn(batch, n, tokens, width, generator=rng) for n in (heads, key_heads, key_heads)]
    cache = [packed(torch.randn(LANES, key_heads, LENGTH, width, generator=rng), KV_DTYPES[kv]) for _ in range(2)]
    return new, cache


def rows_of(size: tuple[int, ...], position: int) -> torch.Tensor:
    """Sequences in the last lanes, each a token further than the one before."""
    batch, tokens = size[0], size[3]
    starts = torch.tensor([(LANES - 1 - b) * LENGTH + position + b for b in range(batch)])
    return starts[:, None] + torch.arange(tokens)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [0, 5, 64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_reference_is_torchs_attention(size: tuple[int, ...], window: int, sinks: bool) -> None:
    """A sink is a key of its own score in front of the others, whose value is zero."""
    new, cache = drawn(size, "float32")
    sinks_N = torch.linspace(-3, 5, size[1]) if sinks else None
    before = [c.clone() for c in cache]
    rows_BT = rows_of(size, 60)
    found = cached_attention(*new, rows_BT, *cache, 0.3, window, 0.0, sinks_N)
    for b, rows_T in enumerate(rows_BT):
        lane, positions_T = int(rows_T[0]) // LENGTH, rows_T % LENGTH
        for written, old, added in zip(cache, before, new[1:]):
            assert torch.equal(written[lane][:, positions_T], added[b])
            untouched = torch.ones(LENGTH, dtype=torch.bool)
            untouched[positions_T] = False
            assert torch.equal(written[lane][:, untouched], old[lane][:, untouched])
        seen_TL = torch.arange(LENGTH) <= positions_T[:, None]
        if window:
            seen_TL &= torch.arange(LENGTH) > positions_T[:, None] - window
        keys, values = (c[lane][None] for c in cache)
        mask_NTL = torch.zeros(size[1], *seen_TL.shape).masked_fill(~seen_TL, -torch.inf)
        if sinks_N is not None:
            mask_NTL = torch.cat((sinks_N[:, None, None].expand(-1, len(seen_TL), 1), mask_NTL), -1)
            keys, values = (F.pad(c, (0, 0, 1, 0)) for c in (keys, values))
        wanted = F.scaled_dot_product_attention(
            new[0][b : b + 1], keys, values, attn_mask=mask_NTL[None], scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(found[b], wanted[0].transpose(0, 1), rtol=0, atol=2e-6)


def test_rows_in_whole_numbers() -> None:
    rows = torch.randn(7, 2, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 7)[:, None, None]
    rows[3, 0] = 0
    rows[4, 1] *= 1e-42
    kept = packed(rows, torch.uint8)
    assert kept.shape == (7, 2, 44)
    off = (unpacked(kept) - rows).abs().amax(-1)
    assert bool((off <= rows.abs().amax(-1) / 254 * 1.0001 + 1e-40).all())
    assert not unpacked(kept)[3, 0].any()
    for strange in (float("nan"), float("inf"), float("-inf")):
        rows[0, 0, 5] = strange
        assert unpacked(packed(rows, torch.uint8))[0, 0].isnan().all()


def test_opcheck() -> None:
    define()
    for size in SIZES[:3]:
        new, cache = drawn(size, "float16")
        opcheck(
            torch.ops.pi2.cached_attention.default, (*new, rows_of(size, 3), *cache, 0.3, 0, 0.0, torch.zeros(size[1]))
        )


class Cached(nn.Module):
    """The operator over buffers of a program, which begin as zeros."""

    def __init__(self, size: tuple[int, ...], kv: str, settings: tuple[Any, ...]) -> None:
        super().__init__()
        *self.settings, sinks = settings if len(settings) == 4 else (*settings, None)
        self.sinks = None if sinks is None else nn.Parameter(sinks)
        for name in ("keys", "values"):
            zeros = packed(torch.zeros(LANES, size[2], LENGTH, size[4]), KV_DTYPES[kv])
            self.register_buffer(name, zeros, persistent=False)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        args = (query, key, value, rows, self.keys, self.values, *self.settings, self.sinks)
        return torch.ops.pi2.cached_attention(*args)


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., Any]:
    """A program of the operator for so many tokens at most, in ExecuTorch's runtime."""
    define()
    backend.load_library()
    from executorch.runtime import Runtime

    def load(size: tuple[int, ...], kv: str, settings: tuple[Any, ...]) -> Any:
        new, _ = drawn(size, kv)
        tokens = torch.export.Dim("tokens", min=1, max=80)
        shapes = ({2: tokens}, {2: tokens}, {2: tokens}, {1: tokens}) if size[3] > 1 else None
        made = Cached(size, kv, settings).eval()
        programs = trace({"forward": MethodSpec(made, (*new, rows_of(size, 0)), None, shapes)}, "Cached")
        (tmp_path / "one.pte").write_bytes(b"".join(lower(programs, "Cached").pieces))
        return Runtime.get().load_program(tmp_path / "one.pte").load_method("forward")

    return load


@pytest.mark.parametrize(("kv", "off"), [("float32", 2e-6), ("float16", 2e-6), ("int8", 4e-6)])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_is_the_reference(loaded: Callable[..., Any], size: tuple[int, ...], kv: str, off: float) -> None:
    """Call after call: what it reads is what it wrote."""
    window, softcap = (60, 3.0) if size[3] == 9 else (0, 0.0)
    settings = (0.4, window, softcap, torch.linspace(-3, 5, size[1]) if size[4] in (13, 40) else None)
    method, reference = loaded(size, kv, settings), Cached(size, kv, settings)
    position = 0
    for call in range(5):
        tokens = size[3] if call < 2 or size[3] == 1 else 2
        now = (*size[:3], tokens, size[4])
        new, _ = drawn(now, kv, seed=call)
        rows_BT = rows_of(now, position)
        found = method.execute((*new, rows_BT))[0]
        wanted = reference(*new, rows_BT)
        torch.testing.assert_close(found, wanted, rtol=0, atol=off)
        position += tokens


@pytest.mark.slow
def test_what_the_kernel_refuses(loaded: Callable[..., Any]) -> None:
    size = (1, 4, 2, 3, 8)
    method = loaded(size, "float32", (0.4, 0, 0.0))
    new, _ = drawn(size, "float32")
    for rows in ([[0, 1, LANES * LENGTH]], [[-1, 0, 1]], [[LENGTH - 1, LENGTH, LENGTH + 1]]):
        with pytest.raises(RuntimeError, match="0x12"):  # InvalidArgument
            method.execute((*new, torch.tensor(rows)))
        said = backend.last_error()
        assert "pi2::cached_attention.out, rows: expected rows of one lane of 3, with 150 tokens each" in str(said)


class Writes(nn.Module):
    """``write_cache`` into buffers of a program, which begin as zeros and are what comes back."""

    def __init__(self, size: tuple[int, ...], kv: str) -> None:
        super().__init__()
        for name in ("keys", "values"):
            zeros = packed(torch.zeros(LANES, size[2], LENGTH, size[4]), KV_DTYPES[kv])
            self.register_buffer(name, zeros, persistent=False)

    def forward(self, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lanes = torch.ops.pi2.write_cache(key, value, rows, self.keys, self.values)
        return lanes, self.keys + 0, self.values + 0


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["float32", "float16"])
@pytest.mark.parametrize("size", [(3, 4, 2, 1, 13), (1, 4, 4, 9, 40)], ids=str)
def test_new_tokens_alone(size: tuple[int, ...], kv: str, tmp_path: Path) -> None:
    """The kernel of ``write_cache`` against its reference, call after call."""
    define()
    backend.load_library()
    from executorch.runtime import Runtime

    new, cache = drawn(size, kv)
    opcheck(torch.ops.pi2.write_cache.default, (*new[1:], rows_of(size, 3), *cache))
    programs = trace({"forward": MethodSpec(Writes(size, kv), (*new[1:], rows_of(size, 0)))}, "Writes")
    (tmp_path / "one.pte").write_bytes(b"".join(lower(programs, "Writes").pieces))
    method, reference = Runtime.get().load_program(tmp_path / "one.pte").load_method("forward"), Writes(size, kv)
    for call in range(3):
        new, _ = drawn(size, kv, seed=call)
        rows_BT = rows_of(size, 20 * call)
        for found, wanted in zip(method.execute((*new[1:], rows_BT)), reference(*new[1:], rows_BT), strict=True):
            assert torch.equal(found, wanted)
    with pytest.raises(RuntimeError, match="0x12"):
        method.execute((*new[1:], rows_BT + LANES * LENGTH))
    assert "pi2::write_cache.out, rows: expected rows of one lane of 3, with 150 tokens each" in str(
        backend.last_error()
    )


# --- decoders ---------------------------------------------------------------------------------------------------------


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    found: torch.Tensor = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return found[0, len(prompt) :].tolist()


PROMPT = [3, 17, 40, 9, 22, 51, 8, 30, 11, 45, 6, 28, 60, 33, 19, 2, 57, 14]


def traced(model: nn.Module, max_tokens: int, *, smooth: bool = False) -> None:
    """Its methods as they are exported, in PyTorch, compared with the model."""
    lanes = Lanes(model, 1, max_tokens)
    programs = trace({name: method_spec(name, lanes, 40) for name in ("forward", "decode_b1")}, "model")
    check_traced(lanes, programs, max_prompt=40, smooth=smooth, decode=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Mistral", {"num_hidden_layers": 1}),
        ("Olmo3", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("Qwen2", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}),
        # transformers has this one's window in its mask, and calls attention without
        ("SmolLM3", {"no_rope_layers": [1, 1], "layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}),
        ("Afmoe", {"num_dense_layers": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2}),  # a mask by keyword
    ],
)
def test_windows_of_traced_methods_are_the_models(name: str, config: dict[str, Any]) -> None:
    traced(drawn_model(name, **config, sliding_window=100, max_position_embeddings=512), 300, smooth=True)


@pytest.mark.slow
def test_windows_and_soft_caps(tmp_path: Path) -> None:
    """The same tokens as PyTorch's, a prompt read in pieces, further than the window, in Python and in C++."""
    model = drawn_model("Gemma2", head_dim=8, sliding_window=7, attn_logit_softcapping=5.0)
    model = torch_pi2.optimize(model, method="exact")
    wanted = greedy(model, PROMPT, 24)
    folder = torch_pi2.export(model, tmp_path / "bundle", max_tokens=48, max_prompt=5, batches=(1,))
    with Bundle(folder) as bundle:
        assert bundle.generate(PROMPT, 24).sequences[0].ids == wanted
    assert run(folder, "--ids", ",".join(map(str, PROMPT)), "--max-new-tokens", 24)["sequences"][0]["ids"] == wanted


@pytest.mark.slow
def test_caches_in_16_and_8_bits(tmp_path: Path) -> None:
    """8 bits move the logits by more than two percent, which is not taken for another attention."""
    model = drawn_model("Llama", seed=2, num_hidden_layers=1, max_position_embeddings=1024)
    model = torch_pi2.optimize(model, method="exact")
    sizes = []
    for kv, least, most in (("float16", 0, 2e-3), ("int8", 1e-3, 0.05)):
        folder = torch_pi2.export(model, tmp_path / kv, max_tokens=1024, max_prompt=8, batches=(1, 2), kv=kv)
        assert f"keys and values in {kv}" in Manifest.load(folder).lossy
        sizes.append(Manifest.load(folder).fixed_bytes)
        with Bundle(folder) as bundle, torch.no_grad():
            found = bundle.logits(PROMPT)[-1].reshape(-1)
            wanted = model(torch.tensor([PROMPT])).logits[0, -1]
            assert least < float((found - wanted).norm() / wanted.norm()) < most
            alone = bundle.generate(PROMPT, 12).sequences[0].ids
            two = bundle.generate(PROMPT, 12, num_return_sequences=2, temperature=1e-4, seed=0).sequences  # forked
            assert [s.ids for s in two] == [alone, alone]
    assert sizes[1] < sizes[0]


def test_a_window_that_is_missing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it the traced methods lost: the longest that is offered is hardly longer."""
    monkeypatch.setattr(attention, "_window", lambda *_: 0)
    model = drawn_model("Mistral", sliding_window=90, num_hidden_layers=1, max_position_embeddings=512)
    with pytest.raises(ConfigError, match=r"at most (\d+)") as error:
        traced(model, 110)
    offered = int(re.search(r"at most (\d+)", str(error.value)).group(1))  # type: ignore[union-attr]
    assert 90 <= offered <= 95


def test_attention_of_its_own_code_has_no_other_cache(tmp_path: Path) -> None:
    model = torch_pi2.optimize(BUILDERS["falcon"]().eval(), method="exact")
    assert not takes_attention(model)
    with pytest.raises(UnsupportedModelError, match="with attention in its own code, which reads keys and values in"):
        torch_pi2.export(model, tmp_path / "b", max_tokens=48, kv="float16")
