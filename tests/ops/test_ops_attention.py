"""``attention``: against the reference and torch's SDPA, the same bits in any company, what is not seen, refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from operators import opcheck

from torch_pi2.errors import GradientError
from torch_pi2.ops import attention as reference
from torch_pi2.ops import load

load()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: batch, key heads, group, tokens, length, width
SIZES = [
    (1, 1, 1, 1, 1, 8),
    (2, 3, 1, 2, 63, 32),
    (1, 2, 4, 1, 65, 128),
    (3, 2, 8, 3, 130, 40),
    (2, 1, 7, 16, 517, 80),
    (1, 2, 3, 5, 1030, 256),
    (1, 1, 5, 4, 100, 13),
    (1, 2, 3, 70, 130, 24),
    (2, 16, 4, 35, 600, 40),
    (1, 1, 100, 3, 70, 16),
]

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tensors(
    batch: int, key_heads: int, group: int, tokens: int, length: int, width: int, dtype: torch.dtype = torch.float32
) -> Tensors:
    generator = torch.Generator().manual_seed(length + width)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, width, generator=generator).to(dtype)

    keys, values = some(batch, key_heads, length), some(batch, key_heads, length)
    return some(batch, key_heads * group, tokens), keys, values


def causal(tokens: int, length: int, used: int) -> torch.Tensor:
    """``[1, 1, T, L]``: ``used`` positions with the new tokens at their end."""
    return torch.arange(length) <= torch.arange(used - tokens, used)[None, None, :, None]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.pi2.attention(query, key, value, mask, query.shape[-1] ** -0.5)
    return result


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_equals_the_reference(isa: str, size: tuple[int, ...], dtype: torch.dtype) -> None:
    query, key, value = tensors(*size, dtype=dtype)
    batch, _, _, tokens, length, width = size
    scattered = torch.rand(batch, 1, tokens, length, generator=torch.Generator().manual_seed(0)) < 0.4
    padded = causal(tokens, length, length).expand(batch, -1, -1, -1).clone()
    padded[-1, ..., : length // 3] = False
    sinks_N = torch.linspace(-4, 6, query.shape[1])
    for mask in (None, causal(tokens, length, max(tokens, length - 2)), scattered, padded):
        for scale, sinks in ((width**-0.5, None), (-1.0, None), (width**-0.5, sinks_N)):
            found = torch.ops.pi2.attention(query, key, value, mask, scale, False, sinks)
            wanted = reference.attention(query, key, value, mask, scale, False, sinks)
            assert found.dtype is dtype
            assert found.shape == (batch, tokens, query.shape[1], width)
            rounding = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(found, wanted, rtol=0, atol=rounding * (1 + float(wanted.abs().max())))


def test_attention_is_torchs(isa: str) -> None:
    query, key, value = tensors(2, 2, 4, 90, 700, 64)
    few = query[:, :, :3]
    mask = causal(3, 700, 600)
    wanted = F.scaled_dot_product_attention(few, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(attend(few, key, value, mask), wanted, rtol=0, atol=2e-6)
    for length in (120, 7):  # more tokens than keys
        keys, values = key[:, :, :length], value[:, :, :length]
        wanted = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True).transpose(1, 2)
        for op in (torch.ops.pi2.attention, reference.attention):
            found = op(query, keys, values, None, 64**-0.5, True)
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


def test_scores_far_apart(isa: str) -> None:
    """Weights from 1 to nothing; the largest score comes last, first or in between."""
    _, key, value = tensors(1, 1, 1, 1, 300, 16)
    scores = torch.linspace(-300, 300, 300)
    for order in (scores, scores.flip(0), scores.roll(77)):
        key.zero_()
        key[0, 0, :, 0] = order
        query = torch.zeros(1, 1, 1, 16)
        query[..., 0] = 1
        found = torch.ops.pi2.attention(query, key, value, None, 1.0)
        weights = order.double().softmax(0)
        torch.testing.assert_close(found[0, 0, 0].double(), weights @ value[0, 0].double(), rtol=0, atol=2e-6)


def test_the_exponential_is_accurate(isa: str) -> None:
    """One position scores 0, another x: its weight is e^x / (1 + e^x)."""
    for x in torch.linspace(-85, 0, 400).tolist():
        key, value = torch.tensor([0.0, x]).view(1, 1, 2, 1), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
        found = torch.ops.pi2.attention(torch.ones(1, 1, 1, 1), key, value, None, 1.0)
        score = torch.tensor(x).double()  # as it was rounded
        torch.testing.assert_close(found.double().flatten()[0], score.exp() / (1 + score.exp()), rtol=4e-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_a_token_has_the_bits_of_a_step(isa: str, group: int, dtype: torch.dtype) -> None:
    """Over several boundaries of blocks and splits, in a batch and alone, and in a longer cache."""
    query, key, value = tensors(2, 2, group, 16, 640, 40, dtype)
    for used in (16, 70, 520, 640):
        mask = causal(16, 640, used)
        together = attend(query, key, value, mask)
        for first, tokens in ((0, 4), (5, 1), (8, 8), (15, 1)):
            part = slice(first, first + tokens)
            assert torch.equal(attend(query[:, :, part], key, value, mask[:, :, part]), together[:, part])
        for row in range(2):
            alone = attend(*(t[row : row + 1] for t in (query, key, value)), mask)
            assert torch.equal(alone[0], together[row])
        exact = (query, key[:, :, :used].contiguous(), value[:, :, :used].contiguous(), mask[..., :used])
        assert torch.equal(attend(*exact), together)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_of_a_prompt_has_the_bits_of_a_step(isa: str, dtype: torch.dtype) -> None:
    """Whole, in pieces, in a longer cache and one by one; 64 tiles of queries and fewer."""
    for size in ((1, 2, 4, 600, 640, 24), (2, 1, 3, 130, 200, 40), (1, 32, 1, 150, 150, 16)):
        query, key, value = tensors(*size, dtype=dtype)
        tokens, length = size[3:5]
        together = torch.ops.pi2.attention(query, key, value, None, size[-1] ** -0.5, True)
        mask = torch.ones(tokens, length, dtype=torch.bool).tril()[None, None]
        assert torch.equal(attend(query, key, value, mask), together)
        for first, last in ((0, 100), (100, tokens), (70, 71), (tokens - 1, tokens)):
            part = attend(query[:, :, first:last], key[:, :, :last], value[:, :, :last], mask[:, :, first:last, :last])
            assert torch.equal(part, together[:, first:last])


@pytest.mark.parametrize("tokens", [3, 300])
def test_threads_do_not_change_bits(isa: str, tokens: int) -> None:
    query, key, value = tensors(2, 3, 4, tokens, 2100, 64)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(attend(query, key, value, causal(tokens, 2100, 2050)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_what_a_token_does_not_see_is_not_there(isa: str) -> None:
    """NaN in the empty end, before a padded sequence, and in the tokens that follow."""
    query, key, value = tensors(2, 2, 4, 4, 200, 24)
    mask = causal(4, 200, 150).expand(2, -1, -1, -1).clone()
    mask[1, ..., :37] = False
    wanted = attend(query, key, value, mask)
    for t in (key, value):
        t[:, :, 150:] = torch.nan
        t[1, :, :37] = torch.inf
    assert torch.equal(attend(query, key, value, mask), wanted)
    for t in (key, value):
        t[:, :, 148:] = torch.nan
    found = attend(query, key, value, mask)
    assert torch.equal(found[:, :2], wanted[:, :2])
    assert found[:, 2:].isnan().all()


def test_who_sees_nothing_gets_zeros(isa: str) -> None:
    query, key, value = tensors(2, 1, 2, 2, 70, 16)
    mask = torch.ones(2, 1, 2, 70, dtype=torch.bool)
    mask[1, :, 0] = False
    found = attend(query, key, value, mask)
    assert not found[1, 0].any()
    assert torch.equal(found[0], attend(query, key, value, None)[0])
    assert not attend(query, key, value, torch.zeros_like(mask)).any()
    assert attend(query, key[:, :, :0], value[:, :, :0], None).shape == (2, 2, 2, 16)


def test_layouts_are_read_as_they_are() -> None:
    query, key, value = tensors(2, 2, 2, 3, 80, 16)
    mask = causal(3, 80, 75)
    wanted = attend(query, key, value, mask)
    other = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    assert torch.equal(attend(*other, mask), wanted)
    columns = [t.mT.contiguous().mT for t in (query, key, value)]
    assert torch.equal(attend(*columns, mask.mT.contiguous().mT), wanted)
    assert torch.equal(attend(query, key, value, mask.expand(2, -1, -1, -1)), wanted)


def test_opcheck() -> None:
    for dtype in DTYPES:
        args = tensors(2, 2, 3, 2, 70, 24, dtype)
        opcheck(torch.ops.pi2.attention.default, (*args, causal(2, 70, 66), 0.2))
        opcheck(torch.ops.pi2.attention.default, (*args, None, 0.2))
        opcheck(torch.ops.pi2.attention.default, (*args, None, 0.2, True))
        opcheck(torch.ops.pi2.attention.default, (*args, None, 0.2, True, torch.ones(6)))


def test_refusals() -> None:
    query, key, value = tensors(1, 2, 2, 1, 9, 8)
    mask = causal(1, 9, 9)
    cases = [
        ((query[0], key, value, mask), r"query: expected \[batch, heads, tokens, width\], found \[4, 1, 8\]"),
        ((query.double(), key, value, mask), "dtype of query: expected float32, bfloat16 or float16"),
        ((query, key.half(), value, mask), "dtype of key: expected query's, found another"),
        ((query, key, value.half(), mask), "dtype of value: expected query's, found another"),
        ((query, key[..., :4], value, mask), r"key: expected \[1, key heads, length, 8\] for query .*\[1, 2, 9, 4\]"),
        ((query, key, value[:, :, :8], mask), r"value: expected \[1, 2, 9, 8\], as key is, found \[1, 2, 8, 8\]"),
        ((query[:, :3], key, value, mask), "key: expected heads of which query's 3 are a multiple, found 2"),
        ((query, key, value, mask.float()), "dtype of mask: expected bool, found another"),
        ((query, key, value, mask[..., :8]), r"mask: expected \[1 or 1, 1, 1, 9\], found \[1, 1, 1, 8\]"),
        ((query, key, value, mask.expand(1, 4, 1, 9)), r"mask: expected .*All heads of a token see the same"),
    ]
    for args, message in cases:
        with pytest.raises(RuntimeError, match=f"pi2: {message}"):
            torch.ops.pi2.attention(*args, 1.0)
    with pytest.raises(RuntimeError, match="pi2: mask, causal: expected one of them, found both"):
        torch.ops.pi2.attention(query, key, value, mask, 1.0, True)
    for sinks in (torch.ones(3), torch.ones(4).half()):
        with pytest.raises(RuntimeError, match=r"pi2: sinks: expected float32 \[4\], one of each head"):
            torch.ops.pi2.attention(query, key, value, mask, 1.0, False, sinks)
    with pytest.raises(GradientError, match=r"pi2\.attention"):
        torch.ops.pi2.attention(query.requires_grad_(), key, value, mask, 1.0)


def quantised(x: torch.Tensor, kv: str) -> torch.Tensor:
    """A cache that holds ``x [B, K, L, D]``."""
    batch, heads, length, width = x.shape
    rows = torch.zeros(batch, heads, length, reference.kv_row_bytes(kv, width), dtype=reference.KV_DTYPES[kv])
    torch.ops.pi2.write_kv(x, rows, torch.arange(length).expand(batch, -1))
    return rows


def test_bytes_of_quantised_rows() -> None:
    for width, int8, int4 in ((64, 0.54, 0.29), (128, 0.52, 0.29), (256, 0.51, 0.29)):
        assert 0.5 <= reference.kv_row_bytes("int8", width) / (2 * width) <= int8
        assert 0.25 <= reference.kv_row_bytes("int4", width) / (2 * width) <= int4


@pytest.mark.parametrize("width", [1, 8, 13, 40, 64, 96, 256])
def test_rotation_is_its_inverse_and_keeps_products(width: int) -> None:
    x, y = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(width))
    torch.testing.assert_close(reference.rotated(reference.rotated(x)), x)
    torch.testing.assert_close((reference.rotated(x) * reference.rotated(y)).sum(-1), (x * y).sum(-1))
    if width == 64:  # what is in one number is spread over all
        assert reference.rotated(torch.eye(64)).abs().unique().tolist() == [0.125]


@pytest.mark.parametrize("kv", reference.KV_DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantised_attention_equals_the_reference(isa: str, kv: str, size: tuple[int, ...], dtype: torch.dtype) -> None:
    """The written rows bit by bit, also of numbers that are not finite, which nobody sees."""
    query, key, value = tensors(*size, dtype=dtype)
    batch, _, _, tokens, length, width = size
    key[..., 0] *= 30
    mask = causal(tokens, length, max(tokens, length - 2)).expand(batch, -1, -1, -1).clone()
    if length > tokens + 4:
        key[:, :, 3, width // 2], value[0, :, 3, 0], mask[..., 3] = torch.inf, torch.nan, False
    rows = [quantised(t, kv) for t in (key, value)]
    for x, found in zip((key, value), rows, strict=True):
        wanted = torch.zeros_like(found)
        reference.write_kv(x, wanted, torch.arange(length).expand(batch, -1))
        assert torch.equal(found, wanted)
    for of, sinks in ((mask, None), (mask, torch.linspace(-4, 6, query.shape[1])), (None, None)):
        args = (query, *rows, of, width**-0.5, False, sinks)
        found, wanted = torch.ops.pi2.attention(*args), reference.attention(*args)
        assert found.dtype is dtype
        rounding = 4e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
        atol = rounding * (1 + float(wanted.nan_to_num().abs().max()))
        torch.testing.assert_close(found, wanted, rtol=0, atol=atol, equal_nan=True)


@pytest.mark.parametrize(("kv", "off"), [("int8", 0.02), ("int4", 0.3)])
def test_quantised_attention_is_near_attention(kv: str, off: float) -> None:
    query, key, value = tensors(2, 2, 4, 3, 700, 64)
    key[..., 5] += 20  # a channel that is large in all keys, as in Qwen2.5, which softmax does not see
    wanted = attend(query, key, value, None)
    found = attend(query, quantised(key, kv), quantised(value, kv), None)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < off


@pytest.mark.parametrize("kv", reference.KV_DTYPES)
def test_a_token_over_quantised_keys_has_the_bits_of_a_step(isa: str, kv: str) -> None:
    """Alone, in a batch, in a view of a longer cache, written at once or one by one, with one thread or three."""
    query, key, value = tensors(2, 3, 4, 16, 640, 40)
    rows = [torch.zeros(3, 3, 800, reference.kv_row_bytes(kv, 40), dtype=reference.KV_DTYPES[kv]) for _ in range(2)]
    rows = [t[:2] for t in rows]
    for x, into in zip((key, value), rows, strict=True):
        for at in range(640):
            torch.ops.pi2.write_kv(x[:, :, at : at + 1], into, torch.full((2, 1), at))
        assert torch.equal(into[:, :, :640], quantised(x, kv))
    mask, threads = causal(16, 800, 600), torch.get_num_threads()
    together = attend(query, *rows, mask)
    for first, tokens in ((0, 4), (5, 1), (15, 1)):
        part = slice(first, first + tokens)
        assert torch.equal(attend(query[:, :, part], *rows, mask[:, :, part]), together[:, part])
    assert torch.equal(attend(query[1:], rows[0][1:], rows[1][1:], mask), together[1:])
    try:
        torch.set_num_threads(3)
        assert torch.equal(attend(query, *rows, mask), together)
    finally:
        torch.set_num_threads(threads)


def test_opcheck_of_quantised_keys() -> None:
    for kv, dtype in reference.KV_DTYPES.items():
        query, key, value = tensors(2, 2, 3, 2, 70, 24, torch.bfloat16)
        rows = [quantised(t, kv) for t in (key, value)]
        assert rows[0].dtype is dtype
        opcheck(torch.ops.pi2.attention.default, (query, *rows, causal(2, 70, 66), 0.2))
        opcheck(torch.ops.pi2.write_kv.default, (key[:, :, :3], rows[0], torch.tensor([[1, 5, 2], [7, 0, 69]])))


def test_refusals_of_quantised_keys() -> None:
    query, key, value = tensors(1, 2, 2, 1, 9, 8)
    rows, at = quantised(key, "int8"), torch.zeros(1, 9, dtype=torch.int64)
    for args, message in (
        ((query, rows, value), "dtype of value: expected key's, found another"),
        ((query, rows[..., :8], rows), r"key: expected \[1, key heads, length, 12\] .* found \[1, 2, 9, 8\]"),
        ((query, rows, rows[:, :, :8]), "value: expected .*, as key is"),
    ):
        with pytest.raises(RuntimeError, match=f"pi2: {message}"):
            torch.ops.pi2.attention(*args, None, 1.0)
    for args, message in (
        ((key, key, at), r"rows: expected int8 or uint8 .* for x"),
        ((key, rows[..., :8], at), r"rows: expected int8 or uint8 \[1, 2, length, 12\]"),
        ((key, rows, at[:, :8]), r"at: expected int64 \[1, 9\], a position of each token"),
        ((key, rows, at.int()), r"at: expected int64 \[1, 9\], a position of each token"),
        ((key, rows, at + 9), "at: expected positions of 0 to 8, found another"),
        ((key, rows, at - 1), "at: expected positions of 0 to 8, found another"),
        ((key.double(), rows, at), "dtype of x: expected float32, bfloat16 or float16"),
    ):
        with pytest.raises(RuntimeError, match=f"pi2: {message}"):
            torch.ops.pi2.write_kv(*args)
