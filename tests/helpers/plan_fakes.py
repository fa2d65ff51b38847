"""Machines of round numbers and models of made-up frequencies, for tests of the planner: nothing is measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.machine.hardware import KERNELS, Accelerator, Hardware, Kernel, Line
from torch_pi2.machine.reads import ReadRate, Reads
from torch_pi2.planner.model_shape import LayerShape, ModelShape
from torch_pi2.types.plan import Bucket, HardwarePlan, Plan, PromptPlan
from torch_pi2.types.stats import HIST_BINS, ActivationStats, LayerStats

GB = 1e3  # bytes in a microsecond at 1 GB/s
#: 100 GB/s alone, 110 together with the CPU, 20 us to start, 5 us to merge.
NPU = Accelerator("fake npu", 1 << 32, 20.0, 100.0, 110.0, 10_000.0, 5.0)
#: 2000 GB/s, a hundred times as fast as the CPU, 5 us a call.
GPU = Accelerator("gpu", 1 << 32, 5.0, 2000.0, 1.0, 10_000.0, 5.0, holds_rest=True)


def fake_hardware(
    *,
    run: float = 20.0,
    gather: float = 10.0,
    macs_per_us: float = 100e3,
    dense_macs_per_us: float = 400e3,
    call_us: float = 2.0,
    read_us: float = 80.0,
    lanes: int = 32,
    drive: float = 1.0,
    **changes: Any,
) -> Hardware:
    """A machine that reads memory at ``run`` GB/s in runs and at ``gather`` gathered, and a drive.

    A read takes ``read_us``, of which the drive serves ``lanes`` at once, or its bytes at ``drive`` GB/s. FFN calls
    pay for bytes and multiplications (dense ones of 32 tokens and more multiply at ``dense_macs_per_us``), linears for
    bytes.
    """

    def line(tokens: int, us_per_million_macs: float = 0.0) -> Line:
        return Line(tokens, call_us, 1e3 / run, 1e3 / gather, 1e3 / gather, us_per_million_macs, 0.0)

    slow, fast = 1e6 / macs_per_us, 1e6 / dense_macs_per_us
    ffn = Kernel((line(1, slow),), (line(1, slow), line(31, slow), line(32, fast)), (line(1),))
    rates = [
        ReadRate(block, 1 << 30, depth, min(min(depth, lanes) / read_us * 1e6, drive * 1e9 / block))
        for block in (512, 4096, 16384, 65536, 262144, 1048576)
        for depth in (1, 2, 4, 8, 16, 32)
    ]
    fields: dict[str, Any] = {
        "name": "fake",
        "source": "measured",
        "machine": {},
        "versions": {},
        "notes": {},
        "cores": 2,
        "threads": 2,
        "memory_bytes": 1 << 49,
        "memory_gb_per_s": run,
        "kernels": dict.fromkeys(KERNELS, ffn),
        "reads": Reads("pread", True, True, 1 << 30, drive, 6.0, tuple(rates)),
    }
    return Hardware(**fields | changes)


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
        "predictor": {"lowrank": "int4/float", "signbit": "int4/int8"}.get(method),
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


def fake_shape(layers: int = 4, **changes: Any) -> ModelShape:
    """So many layers of :func:`fake_layer`, each of other frequencies."""
    made = tuple(fake_layer(f"layers.{i}.mlp", seed=i, **changes) for i in range(layers))
    hidden = made[0].hidden
    return ModelShape(
        layers=made,
        hidden=hidden,
        head_bytes=1000 * hidden * 9 // 16,
        head_kernel="int4/int8",
        fixed_bytes=sum(layer.attention_bytes for layer in made) + 2000 * hidden,
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
