"""A machine of round numbers and models of made-up frequencies, for tests of the planner: nothing is measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.machine.hardware import StoreCosts
from torch_pi2.planner.model_shape import LayerShape, ModelShape
from torch_pi2.types.machine_plan import Bucket, HardwarePlan, PromptPlan
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import HIST_BINS, ActivationStats, LayerStats

GB = 1e3  # bytes in a microsecond at 1 GB/s


@dataclass(frozen=True)
class FakeAccelerator:
    """100 GB/s alone, 110 together with the CPU, 20 us to start, 5 us to merge."""

    name: str = "fake npu"
    memory_bytes: int = 1 << 32
    launch_us: float = 20.0
    stream_gb_per_s: float = 100.0
    shared_gb_per_s: float = 110.0
    merge_us: float = 5.0
    holds_rest: bool = False

    def ffn_us(self, *, batch: int, neurons: int, hidden: int, rows: int, weight_bits: float) -> float:
        if neurons == 0:
            return 0.0
        values = neurons * rows * hidden
        return self.launch_us + max(values * weight_bits / 8 / (self.stream_gb_per_s * GB), values * batch / 10e6)


@dataclass(frozen=True)
class FakeHardware:
    """As ``torch_pi2.machine.hardware.Hardware``: memory 20 GB/s in runs and 10 gathered, 100 macs a nanosecond.

    Attributes: each is a rate that a test may change. A read of ``block`` bytes takes ``read_at_us`` and its bytes at
    ``drive_gb_per_s``; ``depth`` of them are under way together, of which the drive serves ``lanes`` at once.
    """

    name: str = "fake"
    source: str = "measured"
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    cores: int = 2
    threads: int = 2
    memory_bytes: int = 1 << 62
    run_gb_per_s: float = 20.0
    gather_gb_per_s: float = 10.0
    macs_per_us: float = 100e3
    call_us: float = 2.0
    read_at_us: float = 80.0
    lanes: int = 32
    drive_gb_per_s: float = 1.0
    compute_while_reading: float = 1.1
    read_while_computing: float = 1.25
    accelerator: FakeAccelerator | None = None
    store: StoreCosts = field(default_factory=lambda: StoreCosts(0.0, 0.0))
    hash: str = "fa4e" * 16

    def layer_us(
        self,
        kernel: str,
        *,
        batch: float,
        hot_bytes: float,
        cold_bytes: float,
        macs: float,
        calls: float = 1,
        gate_bytes: float = 0,
        model_bytes: float | None = None,
    ) -> float:
        memory = hot_bytes / (self.run_gb_per_s * GB) + (cold_bytes + gate_bytes) / (self.gather_gb_per_s * GB)
        return self.call_us * calls + max(memory, macs / self.macs_per_us)

    def dense_us(
        self,
        kernel: str,
        *,
        tokens: float,
        nbytes: float,
        macs: float,
        calls: float = 1,
        model_bytes: float | None = None,
    ) -> float:
        rate = self.macs_per_us * (4 if tokens >= 32 else 1)  # as tiles
        return self.call_us * calls + max(nbytes / (self.run_gb_per_s * GB), macs / rate)

    def linear_us(
        self,
        kernel: str,
        *,
        tokens: float,
        nbytes: float,
        macs: float,
        calls: float = 1,
        model_bytes: float | None = None,
    ) -> float:
        return self.dense_us(kernel, tokens=tokens, nbytes=nbytes, macs=macs, calls=calls)

    def predict_us(
        self,
        predictor: str,
        *,
        batch: float,
        nbytes: float,
        macs: float,
        calls: float = 1,
        model_bytes: float | None = None,
    ) -> float:
        return self.call_us * calls + max(nbytes / (self.run_gb_per_s * GB), macs / self.macs_per_us)

    def attention_us(
        self,
        *,
        batch: float,
        kv_bytes: float,
        calls: float = 1,
        dtype: str = "bfloat16",
        model_bytes: float | None = None,
    ) -> float:
        return self.call_us * calls + kv_bytes / (self.run_gb_per_s * GB)

    def glue_us(self, *, batch: float, hidden: int, compiled: bool, model_bytes: float | None = None) -> float:
        return 10.0 if compiled else 100.0

    def read_us(self, reads: float, block_bytes: float, *, range_bytes: float, depth: float) -> float:
        if reads <= 0:
            return 0.0
        at_once = max(1, min(depth, reads, self.lanes))
        return max(reads / at_once * self.read_at_us, reads * block_bytes / (self.drive_gb_per_s * GB))

    def stream_us(self, nbytes: float) -> float:
        return nbytes / (self.drive_gb_per_s * GB)

    def best_depth(self, block_bytes: float, range_bytes: float) -> int:
        return self.lanes


def power_law(neurons: int, active: float, seed: int = 0) -> np.ndarray:
    """Frequencies ``[neurons]``, the largest first, of which the mean is near ``active``."""
    share = (np.arange(neurons) + 0.5) / neurons
    low, high = 0.0, 50.0
    for _ in range(60):  # exp(-k share): steeper, less active
        k = (low + high) / 2
        low, high = (k, high) if np.exp(-k * share).mean() > active else (low, k)
    jitter = np.random.default_rng(seed).uniform(0.9, 1.0, neurons)
    return np.sort(np.exp(-k * share) * jitter)[::-1].copy()


def fake_layer(
    key: str = "layers.0.mlp",
    *,
    hidden: int = 256,
    intermediate: int = 4096,
    active: float = 0.1,
    method: str = "lowrank",
    seed: int = 0,
    **changes: Any,
) -> LayerShape:
    """A gated int4 layer with a low-rank predictor of rank 32; batches of 1 to 16 independent tokens."""
    one = power_law(intermediate, active, seed)
    neuron = 3 * hidden * 18 // 32  # half a byte a value and 2 bytes for 32
    predicted = method in ("lowrank", "signbit")
    given: dict[str, Any] = {
        "key": key,
        "hidden": hidden,
        "intermediate": intermediate,
        "rows": 3,
        "neuron_bytes": neuron,
        "slot_bytes": -(-neuron // 512) * 512,
        "kernel": "int4/int8",
        "method": method,
        "predictor": {"lowrank": "lowrank/int4", "signbit": "signbit"}.get(method),
        "rank": 32 if method == "lowrank" else 0,
        "predictor_bytes": {
            "lowrank": 32 * (hidden + intermediate) * 9 // 16,
            "signbit": intermediate * hidden // 8,
        }.get(method, 0),
        "recall": 0.95 if predicted else 1.0,
        "predicted_active": min(1.0, 1.5 * active) if predicted else float(one.mean()),
        "chosen": 1.0,
        "attention_bytes": 4 * hidden * hidden * 9 // 16,
        "attention_kernel": "int4/int8",
        "kv_bytes": 2 * hidden * 4,
        "base_hot": 0,
        "cluster": 1,
        "frequencies": tuple((b, 1 - (1 - one) ** b) for b in (1, 2, 4, 8, 16)),
    }
    return LayerShape(**(given | changes))


def fake_shape(layers: int = 4, *, compiled: bool = True, **changes: Any) -> ModelShape:
    """So many layers of :func:`fake_layer`, each of other frequencies."""
    made = tuple(fake_layer(f"layers.{i}.mlp", seed=i, **changes) for i in range(layers))
    hidden = made[0].hidden
    return ModelShape(
        layers=made,
        hidden=hidden,
        head_bytes=1000 * hidden * 9 // 16,
        head_kernel="int4/int8",
        fixed_bytes=sum(layer.attention_bytes for layer in made) + 2000 * hidden,
        compiled=compiled,
    )


def fake_stats(
    plan: Plan, active: float = 0.1, *, tokens: int = 1000, batch_sizes: tuple[int, ...] = (1, 2, 4)
) -> ActivationStats:
    """Statistics of a model whose neurons fire by :func:`power_law`, the first in plan order most often."""
    layers = {}
    for number, layer in enumerate(plan.layers):
        size = layer.site.intermediate
        often_I = torch.empty(size, dtype=torch.float64)
        often_I[layer.order.long()] = torch.from_numpy(power_law(size, active, number))
        groups = torch.tensor([tokens // b for b in batch_sizes])
        fired = [((1 - (1 - often_I) ** b) * n).round().long() for b, n in zip(batch_sizes, groups.tolist())]
        layers[layer.site.key] = LayerStats(
            key=layer.site.key,
            layer=layer.site.layer,
            threshold=0.0,
            tokens=tokens,
            fired=(often_I * tokens).round().long(),
            zeros=torch.zeros(size, dtype=torch.int64),
            abs_sum=torch.zeros(size, dtype=torch.float64),
            batch_sizes=batch_sizes,
            batch_groups=groups,
            batch_fired=torch.stack(fired),
            score_hist=torch.zeros(HIST_BINS, dtype=torch.int64),
            cofire_bits=torch.zeros((0, (size + 7) // 8), dtype=torch.uint8),
            experts=layer.site.experts,
        )
    return ActivationStats(layers, plan.model_hash, {"tokens": tokens})


def plan_of(model: nn.Module, hot: dict[int, int], *, dense_from: int = 0, **settings: Any) -> HardwarePlan:
    """For ``model``: the same hot neurons in every layer, by batch."""
    layers = sparse_layers(model)
    resident: dict[int, int] = settings.pop("resident", {})
    cache: dict[int, int] = settings.pop("cache", {})

    def each(number: int) -> tuple[int, ...]:
        return tuple(number for _ in layers)

    buckets = tuple(Bucket(b, each(n), each(0), each(resident.get(b, 0)), cache.get(b, 0)) for b, n in hot.items())
    return HardwarePlan(
        {"hardware": "made up"}, settings.pop("budget", None), 0, 64, buckets, PromptPlan(each(dense_from)), **settings
    )
