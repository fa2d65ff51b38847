"""Profiling: which neurons fire, how often, and together with which others (data flow: ``stats.safetensors``)."""

from torch_pi2.profiling.data import MIN_TOKENS, Batch, batches
from torch_pi2.profiling.recorder import ActivationRecorder
from torch_pi2.profiling.run import profile
from torch_pi2.profiling.samples import Samples, collect_samples
from torch_pi2.types.stats import ActivationStats, LayerStats

__all__ = [
    "MIN_TOKENS",
    "ActivationRecorder",
    "ActivationStats",
    "Batch",
    "LayerStats",
    "Samples",
    "batches",
    "collect_samples",
    "profile",
]
