"""Counters of a server in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from torch_pi2.serve.model import ServedModel


class _Collector:
    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        def counter(name: str, about: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"torch_pi2_{name}", about, labels=["model", "kind"])

        tokens = counter("tokens", "Tokens of prompts, of these found in the prefix cache, and of answers.")
        seconds = counter("seconds", "Seconds of prefill and of decoding steps.")
        ended = counter("sequences", "Sequences that ended, by reason.")
        blocks = counter("prefix_blocks", "Blocks of 32 tokens found in the prefix cache.")
        prefix = GaugeMetricFamily("torch_pi2_prefix_bytes", "Bytes of the prefix cache.", labels=["model", "kind"])
        now = GaugeMetricFamily(
            "torch_pi2_sequences_now", "Sequences decoded (live) and waiting.", labels=["model", "kind"]
        )
        for name, served in self._models.items():
            counts = served.batch.counts
            tokens.add_metric([name, "prompt"], counts.prompt_tokens)
            tokens.add_metric([name, "answer"], counts.answer_tokens)
            tokens.add_metric([name, "prefix"], served.batch.prefixes.tokens_found)
            seconds.add_metric([name, "prompt"], counts.prompt_seconds)
            seconds.add_metric([name, "step"], counts.step_seconds)
            blocks.add_metric([name, "memory"], served.batch.prefixes.hits)
            prefix.add_metric([name, "memory"], served.batch.prefixes.bytes)
            for reason, count in list(counts.ended.items()):
                ended.add_metric([name, reason], count)
            for kind, count in served.batch.state().items():
                now.add_metric([name, kind], count)
        yield from (tokens, seconds, ended, blocks, prefix, now)


def metrics(models: Mapping[str, ServedModel]) -> str:
    """The text format, version 0.0.4."""
    registry = CollectorRegistry()
    registry.register(_Collector(models))
    text: bytes = generate_latest(registry)
    return text.decode()
