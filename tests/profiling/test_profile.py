"""Profiling: exact counts against a plain reference, on gated, plain, fused and padded inputs; every refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_models import tiny
from torch import nn

import torch_pi2
from torch_pi2.errors import (
    ArtifactError,
    CalibrationError,
    ConfigError,
    DeviceError,
    NonFiniteError,
    StaleArtifactError,
    UnsupportedModelError,
)
from torch_pi2.graph import find_sites
from torch_pi2.profiling.data import MIN_TOKENS, Batch, batches, calibration_batches
from torch_pi2.profiling.run import profile
from torch_pi2.profiling.samples import collect_samples
from torch_pi2.types.config import Config
from torch_pi2.types.site import FFNSite, LinearRef
from torch_pi2.types.stats import ActivationStats, Reservoir, pack_bits, unpack_bits

H, I = 12, 37  # noqa: E741  the package's suffixes; 37 is no multiple of 8


class Gated(nn.Module):
    def __init__(self, act: str = "silu", on_up: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.act, self.on_up = getattr(F, act), on_up
        self.gate, self.up, self.down = nn.Linear(H, I), nn.Linear(H, I), nn.Linear(I, H)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return (self.act(self.gate(x)) * self.act(self.up(x))).abs() if self.on_up else self.act(self.gate(x)).abs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        return self.down(self.act(self.gate(x)) * (self.act(up) if self.on_up else up))


def gated_site(act: str = "silu", on_up: bool = False) -> FFNSite:
    g, u, d = (LinearRef(f"{n}.weight", f"{n}.bias") for n in ("gate", "up", "down"))
    return FFNSite("", 0, act, on_up, g, u, d, H, I, "")


def calls(n: int = 3, b: int = 5, t: int = 9) -> list[tuple[torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(b, t, H, generator=g),) for _ in range(n)]


@pytest.mark.parametrize(
    ("act", "on_up", "threshold"), [("silu", False, 0.2), ("relu", False, 0.0), ("relu", True, 0.0)]
)
def test_counts_are_those_of_a_plain_loop(act: str, on_up: bool, threshold: float) -> None:
    model, data = Gated(act, on_up), calls()
    stats = profile(model, data, [gated_site(act, on_up)], thresholds=threshold, batch_size=4)[""]
    with torch.no_grad():
        score = torch.stack([model.scores(x) for (x,) in data])  # calls, rows, positions, neurons
    fired = score > threshold
    assert stats.tokens == 3 * 5 * 9
    assert torch.equal(stats.fired, fired.sum((0, 1, 2)))
    assert torch.equal(stats.zeros, (score == 0).sum((0, 1, 2)))
    assert stats.fired.dtype is stats.zeros.dtype is torch.int64
    torch.testing.assert_close(stats.abs_sum, score.double().sum((0, 1, 2)), rtol=1e-5, atol=1e-5)
    assert stats.batch_sizes == (1, 2, 4)
    assert stats.batch_groups.tolist() == [3 * 5 * 9, 3 * 2 * 9, 3 * 1 * 9]
    pairs = fired[:, 0:4:2] | fired[:, 1:4:2]
    assert torch.equal(stats.batch_fired[1], pairs.sum((0, 1, 2)))
    assert torch.equal(stats.batch_fired[2], fired[:, :4].any(1).sum((0, 1)))
    assert int(stats.score_hist.sum()) == score.numel()
    assert stats.active_share == pytest.approx(fired.float().mean().item())
    assert stats.sparsity == pytest.approx((score == 0).float().mean().item())


def test_threshold_for_reaches_the_share() -> None:
    model, data = Gated("silu"), calls(4, 8, 32)
    stats = profile(model, data, [gated_site()])
    with torch.no_grad():
        score = torch.cat([model.scores(x).flatten() for (x,) in data])
    for share in (0.1, 0.5, 0.9):
        cut = stats.threshold_for("", share)
        assert float((score > cut).float().mean()) == pytest.approx(1 - share, abs=0.005)
        assert cut == pytest.approx(float(torch.quantile(score, share)), rel=1 / 16)
    assert profile(Gated("relu"), data, [gated_site("relu")]).threshold_for("", 0.1) == 0.0
    with pytest.raises(ConfigError, match=r"share of neurons to skip: expected 0 <= share < 1, found 1.5"):
        stats.threshold_for("", 1.5)


@pytest.mark.parametrize("name", ["drelu", "phi3", "opt", "llama-bias"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted(name: str, side: str) -> None:
    model = tiny(name)
    sites = find_sites(model)
    rows = [torch.randint(3, 64, (n,), generator=torch.Generator().manual_seed(n)) for n in (20, 13, 31, 16)]
    ids, mask = torch.zeros(4, 31, dtype=torch.long), torch.zeros(4, 31, dtype=torch.long)
    for b, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(31 - len(row), 31)
        ids[b, where], mask[b, where] = row, 1
    together = profile(model, [{"input_ids": ids, "attention_mask": mask}], sites)
    apart = profile(model, rows, sites, batch_size=1)
    for s in together:
        assert s.tokens == sum(map(len, rows)) == apart[s.key].tokens
        # Positions differ under left padding only by rounding: allow a few flips of nearly-zero scores.
        slack = 2 if name in ("llama", "phi3") else 3
        assert int((s.fired - apart[s.key].fired).abs().max()) <= slack
        assert 0 < s.active_share < 1 or name in ("llama", "phi3")
        assert s.batch_groups[1] < s.batch_groups[0]


def test_training_flags_come_back_and_dropout_is_off() -> None:
    model = nn.Sequential(nn.Dropout(0.9), Gated("relu"))
    model[0].eval()
    model[1].train()
    model.train(True)
    model[0].training = False
    s = gated_site("relu")
    refs = [LinearRef("1." + r.weight, "1." + str(r.bias)) for r in (s.gate, s.up, s.down) if r]
    site = FFNSite("1", 0, "relu", False, *refs, H, I, "1")
    one, two = (profile(model, calls(), [site])["1"].fired for _ in range(2))
    assert torch.equal(one, two)
    assert [m.training for m in (model, model[0], model[1])] == [True, False, True]
    assert torch.is_grad_enabled()


def test_a_linear_layer_called_under_inference_mode_is_seen() -> None:
    with torch.inference_mode():
        stats = profile(Gated("relu"), calls(), [gated_site("relu")])
    assert stats.tokens == 135


def test_save_load_and_summary(tmp_path: Path) -> None:
    model, data = Gated("relu"), calls(4, 8)
    site = [gated_site("relu")]
    whole = profile(model, data, site)
    path = whole.save(tmp_path)
    assert path == tmp_path / "stats.safetensors"
    loaded = ActivationStats.load(tmp_path, model_hash=whole.model_hash)
    for name in ("fired", "zeros", "abs_sum", "batch_fired", "batch_groups", "score_hist"):
        assert torch.equal(getattr(loaded[""], name), getattr(whole[""], name)), name
    assert [p.name for p in tmp_path.iterdir()] == ["stats.safetensors"]
    layer = whole[""]
    assert layer.frequency(4).mean() > layer.frequency().mean() == pytest.approx(layer.active_share)
    assert 0 < layer.skew() < 1


def test_loading_refuses_what_does_not_belong(tmp_path: Path) -> None:
    stats = profile(Gated("relu"), calls(), [gated_site("relu")])
    path = stats.save(tmp_path)
    with pytest.raises(StaleArtifactError, match=r"expected made from FFN weights 000000000000, found"):
        ActivationStats.load(path, model_hash="0" * 64)
    tensors = load_file(path)
    save_file(tensors, path, metadata={"format": "torch_pi2.stats", "version": "9"})
    with pytest.raises(ArtifactError, match=r"expected torch_pi2.stats version 1, found torch_pi2.stats version 9"):
        ActivationStats.load(path)
    stats.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=r"expected a whole safetensors file, found damage"):
        ActivationStats.load(path)
    with pytest.raises(ArtifactError, match=r"found nothing"):
        ActivationStats.load(tmp_path / "none")
    meta = {"format": "torch_pi2.stats", "version": "1", "model_hash": "", "made_by": "{}"}
    meta["layers"] = '[{"key": "", "layer": 0, "threshold": 0.0, "tokens": 1, "batch_sizes": [1]}]'
    save_file({k: v for k, v in tensors.items() if "hist" not in k}, path, metadata=meta)
    with pytest.raises(ArtifactError, match=r"found no score_hist"):
        ActivationStats.load(path)


def test_lookups_refuse_strangers() -> None:
    one = profile(Gated("relu"), calls(), [gated_site("relu")])
    with pytest.raises(ConfigError, match=r"layer in the activation statistics: expected one of , found 'x'"):
        one["x"]
    with pytest.raises(ConfigError, match=r"batch size for the firing frequency of : expected 1 or more, found 0"):
        one[""].frequency(0)
    low, three, high = (float(one[""].frequency(b).sum()) for b in (2, 3, 4))
    assert low < three < high
    assert torch.equal(one[""].frequency(8), 1 - (1 - one[""].frequency(4)) ** 2), "larger batches: as if independent"


# ---- calibration data


class Characters:
    pad_token_id = 7

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % 64 for c in text]}


def test_text_windows_in_one_batch_lie_far_apart() -> None:
    text = "".join(chr(48 + i % 60) for i in range(1000))
    got = list(batches(text, tokenizer=Characters(), batch_size=4, seq_len=100))
    assert [tuple(b.input_ids.shape) for b in got if b.input_ids is not None] == [(4, 100), (3, 100), (3, 100)]
    ids = torch.tensor(Characters()(text)["input_ids"])
    assert torch.equal(got[0].input_ids, torch.stack([ids[s : s + 100] for s in (0, 300, 600, 900)]))
    assert sum(b.n_tokens for b in got) == 1000


@pytest.mark.parametrize(
    "data",
    [
        ["a" * 40, "b" * 30, "c" * 70],
        torch.randint(0, 64, (3, 50)),
        torch.randint(0, 64, (3, 50), dtype=torch.int32),
        torch.randint(0, 64, (200,)),
        [torch.randint(0, 64, (n,)) for n in (30, 50, 40)],
        [[1, 2, 3] * 30],
        [torch.randint(0, 64, (2, 40))],
        [{"input_ids": torch.randint(0, 64, (2, 40)), "labels": torch.zeros(2, 40)}],
        {"input_ids": torch.randint(0, 64, (2, 40)), "attention_mask": torch.ones(2, 40)},
        (t for t in [torch.randint(0, 64, (80,))]),
        (t for t in ["x" * 80]),
        [(torch.randint(0, 64, (2, 40)),)],
    ],
)
def test_every_form_of_data_reaches_the_model(data: object) -> None:
    model = tiny("llama-relu")
    stats = profile(model, data, find_sites(model), tokenizer=Characters(), batch_size=2, seq_len=32)
    assert stats.tokens >= 80
    assert all(s.tokens == stats.tokens for s in stats)


def test_a_map_style_dataset_ends_by_its_length() -> None:
    class Windows(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.arange(10) + 10 * index  # no IndexError

    assert sum(batch.input_ids.numel() for batch in batches(Windows(), batch_size=4, seq_len=10)) == 80


def test_short_texts_are_padded_with_the_tokenizers_token() -> None:
    (batch,) = batches(["a" * 40, "b" * 30], tokenizer=Characters(), batch_size=2)
    assert batch.input_ids is not None
    assert batch.input_ids[1, 30:].tolist() == [7] * 10
    assert batch.n_tokens == 70


class WithBos(Characters):
    """Puts token 1 before every text, and reads ``^`` as that token, as tokenizers read ``<s>``."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, *(1 if c == "^" else 2 + ord(c) % 62 for c in text)]}


@pytest.mark.parametrize("chat", ["", "^"])  # a chat template writes the token as well
def test_every_window_begins_with_the_bos_token(chat: str) -> None:
    documents = [chat + "".join(chr(48 + i % 60) for i in range(n)) for n in (250, 5, 40, 1)]
    got = list(batches(documents, tokenizer=WithBos(), batch_size=20, seq_len=33))
    (rows, mask) = got[0].input_ids, got[0].mask_BT
    assert rows is not None
    assert mask is not None
    assert rows[:, 0].eq(1).all()
    assert sorted(mask.sum(1).tolist()) == sorted([33] * 7 + [27] + [6] + [33, 9] + [2])
    text = torch.cat([row[1:n] for row, n in zip(rows, mask.sum(1))])
    wanted = [WithBos()(document.removeprefix("^"))["input_ids"][1:] for document in documents]
    assert text.tolist() == [i for ids in wanted for i in ids]


def test_the_bos_token_of_ids_opens_every_window_of_them() -> None:
    model = tiny("llama")  # its bos_token_id is 1
    opened = torch.cat((torch.tensor([1]), torch.randint(3, 64, (199,))))
    for data, first in ((opened, {1}), (opened[1:], set(opened[1::32].tolist())), ([opened.tolist()], {1})):
        kept = calibration_batches(model, data, None, Config(seq_len=32))
        assert {int(ids[0]) for batch in kept for ids in batch.input_ids} == first


def test_windows_are_no_longer_than_the_model_has_positions() -> None:
    text, model = torch.randint(3, 64, (2, 300)), tiny("opt")
    torch_pi2.profile(model, text, seq_len=128)
    with pytest.raises(CalibrationError, match=r"at most 64, the positions that the model has .* found 300"):
        torch_pi2.profile(model, [text])


@pytest.mark.parametrize("row", [{"text": "abc " * 30}, {"messages": [{"role": "user", "content": "Hi"}]}, ("Hi",)])
def test_rows_of_text_datasets_are_refused_with_what_to_pass(row: Any) -> None:
    with pytest.raises(CalibrationError, match=r"with text. Pass \[row\['text'\] for .*apply_chat_template"):
        torch_pi2.profile(tiny("llama"), [row] * 12, tokenizer=WithBos())


class OwnNames(nn.Module):
    """A language model of one's own, whose forward knows neither input_ids nor masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.ffn = nn.Embedding(64, H), Gated("relu")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.ffn(self.embed(tokens))


def test_models_with_other_argument_names_are_called_by_position() -> None:
    batch = next(iter(batches(torch.randint(0, 64, (2, 40)))))
    assert batch.call(OwnNames()).shape == (2, 40, H)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", f"calibration data: expected at least {MIN_TOKENS} tokens .* found none. Pass more text"),
        ([], "calibration data: expected at least 64 tokens .* found none"),
        ("too short", "expected at least 64 tokens .* found 9 tokens"),
        (torch.zeros(0, 5, dtype=torch.long), "expected at least 64 tokens .* found none"),
        (torch.randn(4, 50), "calibration ids: expected integer token ids .* found float32"),
        (torch.zeros(2, 3, 4, dtype=torch.long), r"found int64 \(2, 3, 4\)"),
        ([torch.randn(50)], "ids: expected integer token ids"),
        ([{"input_ids": torch.randn(2, 40)}], "input_ids: expected integer token ids"),
        (3.5, "form of the calibration data: expected a str, .* found float"),
        ([object()], "form of the calibration data: .* found object"),
    ],
)
def test_bad_data_is_refused(data: object, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        list(batches(data, tokenizer=Characters()))


def test_text_needs_a_tokenizer_and_settings_sense() -> None:
    with pytest.raises(CalibrationError, match=r"expected a tokenizer to go with it, found tokenizer=None"):
        list(batches("text " * 100))
    with pytest.raises(CalibrationError, match=r"expected batch_size >= 1 and seq_len >= 2, found batch_size=0"):
        list(batches("x", tokenizer=Characters(), batch_size=0))


def test_ids_outside_the_vocabulary_are_refused() -> None:
    model = tiny("llama")
    with pytest.raises(CalibrationError, match=r"calibration token ids: expected 0 to 63 .* found 0 to 900"):
        profile(model, torch.tensor([[0, 900] * 40]), find_sites(model))


# ---- models that cannot be profiled


def test_nan_in_activations_names_the_layer() -> None:
    data = calls(1)
    data[0][0][2, 4, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"activations of  \(layer 0\): .* NaN or infinity for 1 of 45 tokens"):
        profile(Gated("relu"), data, [gated_site("relu")])


def test_nan_in_padding_does_no_harm() -> None:
    (x,) = calls(1)[0]
    x[0, :4] = float("nan")
    mask = torch.ones(5, 9, dtype=torch.bool)
    mask[0, :4] = False
    stats = profile(Gated("relu"), [Batch(None, mask, (x,))] * 2, [gated_site("relu")])
    assert stats.tokens == 2 * 41
    # Groups with a padded row do not count: pairs (0, 1) at 5 positions, (2, 3) at 9; all four rows at 5.
    assert stats[""].batch_groups.tolist() == [82, 28, 10, 0]


def test_nan_weights_meta_and_no_sites_are_refused() -> None:
    model = Gated()
    with torch.no_grad():
        model.up.weight[1, 1] = float("inf")
    with pytest.raises(NonFiniteError, match=r"1 NaN or infinite"):
        profile(model, calls(), [gated_site()])
    with pytest.raises(DeviceError, match=r"expected cpu, found meta"):
        profile(Gated().to("meta"), calls(), [gated_site()])
    with pytest.raises(ConfigError, match=r"FFN sites: expected at least one, found none"):
        profile(Gated(), calls(), [])
    with pytest.raises(ConfigError, match=r"firing thresholds: expected numbers >= 0 for keys of the sites"):
        profile(Gated(), calls(), [gated_site()], thresholds={"other": 1.0})


def test_matmuls_with_other_weights_are_noticed() -> None:
    """Autocast works on copies of the weights: better an error than statistics of nothing."""
    with (
        pytest.raises(UnsupportedModelError, match=r"FFN sites that never ran: .* turn autocast"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        profile(Gated("relu"), calls(), [gated_site("relu")])


class Plain(nn.Module):
    def __init__(self, autocast: bool) -> None:
        super().__init__()
        self.up, self.down, self.autocast = nn.Linear(H, I), nn.Linear(I, H), autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.down(torch.relu(self.up(x))).float()


@pytest.mark.parametrize("autocast", [True, False])
def test_advice_where_matmuls_have_other_weights(autocast: bool) -> None:
    """Autocast within a layer, or a weight of two of them."""
    layers = Plain(autocast), Plain(autocast)
    if not autocast:
        layers[1].up.weight = layers[0].up.weight
    model: Any = nn.Sequential(nn.Embedding(20, H), *layers, nn.Linear(H, 20)).eval()
    ids_BT = torch.arange(100).view(5, 20) % 20
    advice = r"weight their own, and turn autocast .*; or optimise .* method='exact' with fewer than 64 tokens"
    with pytest.raises(UnsupportedModelError, match=advice):
        torch_pi2.optimize(model, ids_BT)
    with torch.no_grad():
        wanted = model(ids_BT)
        torch_pi2.optimize(model, ids_BT[:1], method="exact")
        assert torch.allclose(model(ids_BT), wanted, atol=1e-2 if autocast else 1e-5)
    assert len(model.torch_pi2.plan.layers) == 2


def test_rows_that_do_not_match_the_padded_batch_are_refused() -> None:
    class LastOnly(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[:, -1:])

    mask = torch.ones(5, 9, dtype=torch.bool)
    mask[0, :4] = False
    with pytest.raises(UnsupportedModelError, match=r"rows seen by : expected 45, .* found 5\."):
        profile(LastOnly("relu"), [Batch(None, mask, calls(1)[0])] * 2, [gated_site("relu")])
    stats = profile(LastOnly("relu"), calls(3), [gated_site("relu")])[""]
    assert stats.tokens == 15
    assert stats.batch_groups.tolist()[1:] == [0, 0, 0]


# ---- samples


def test_samples_are_inputs_with_their_firing() -> None:
    model, data = Gated("relu", True), calls(4)
    s = collect_samples(model, data, [gated_site("relu", True)], 100, seed=5)[""]
    assert len(s) == 100
    assert s.x_NH.shape == (100, H)
    assert s.fired_bits.shape == (100, 5)
    with torch.no_grad():
        assert torch.equal(s.fired(), model.scores(s.x_NH) > 0)
    inputs = {tuple(r.tolist()) for (x,) in data for r in x.reshape(-1, H)}
    assert {tuple(r.tolist()) for r in s.x_NH} <= inputs
    assert len({tuple(r.tolist()) for r in s.x_NH}) == 100, "without replacement"
    again = collect_samples(model, data, [gated_site("relu", True)], 100, seed=5)[""]
    assert torch.equal(s.x_NH, again.x_NH)
    a, b = s.split(0.25)
    assert (len(a), len(b)) == (75, 25)
    assert len(collect_samples(model, data, [gated_site("relu", True)], 10_000)[""]) == 180


def test_samples_of_all_layers_are_the_same_tokens() -> None:
    model = tiny("llama-relu")
    sites = find_sites(model)
    ids = torch.randint(0, 64, (4, 30))
    whole, first = collect_samples(model, ids, sites, 50), collect_samples(model, ids, sites[:1], 50)
    assert torch.equal(first[sites[0].key].x_NH, whole[sites[0].key].x_NH)
    with pytest.raises(ConfigError, match=r"n_tokens: expected at least 1, found 0"):
        collect_samples(model, ids, sites, 0)


def test_reservoir_is_uniform() -> None:
    hits = torch.zeros(40)
    for seed in range(200):
        r, kept = Reservoir(8, seed), torch.full((8,), -1)
        for start, n in ((0, 3), (3, 17), (20, 20)):
            rows, slots = r.place(n)
            kept[slots] = rows + start
        assert len(set(kept.tolist())) == 8
        hits[kept] += 1
    assert float((hits / 200 - 0.2).abs().max()) < 5 * (0.2 * 0.8 / 200) ** 0.5


def test_bits_round_trip() -> None:
    fired = torch.rand(11, I) > 0.5
    assert torch.equal(unpack_bits(pack_bits(fired), I), fired)
    assert int(pack_bits(torch.eye(8).bool())[3, 0]) == 1 << 3
