"""What servers have done, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from torch_pi2.serve.prefix import PrefixCache
from torch_pi2.serve.served import Served


class _Collector:
    def __init__(self, models: Mapping[str, Served]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        def counter(name: str, about: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"torch_pi2_{name}", about, labels=["model", "kind"])

        tokens = counter("tokens", "Tokens of prompts, of these known from others (prefix), and of answers.")
        seconds = counter("seconds", "Seconds of reading prompts and of steps.")
        ended = counter("sequences", "Sequences that ended, by why.")
        blocks = counter(
            "prefix_blocks",
            "Blocks of prefixes, of 32 tokens: found in memory and on disk (disk), damaged on disk and computed again, "
            "written to disk, and skipped.",
        )
        room = GaugeMetricFamily("torch_pi2_prefix_bytes", "Keys and values of prefixes.", labels=["model", "kind"])
        now = GaugeMetricFamily("torch_pi2_sequences_now", "Sequences by what they do.", labels=["model", "kind"])
        for name, served in self._models.items():
            counts = served.batch.counts
            tokens.add_metric([name, "prompt"], counts.prompt_tokens)
            tokens.add_metric([name, "answer"], counts.answer_tokens)
            tokens.add_metric([name, "prefix"], served.batch.prefixes.tokens_found)
            seconds.add_metric([name, "prompt"], counts.prompt_seconds)
            seconds.add_metric([name, "step"], counts.step_seconds)
            self._add_prefixes(name, served.batch.prefixes, blocks, room)
            for reason, count in list(counts.ended.items()):
                ended.add_metric([name, reason], count)
            for kind, count in served.batch.state().items():
                now.add_metric([name, kind], count)
        yield from (tokens, seconds, ended, blocks, room, now)

    def _add_prefixes(
        self, name: str, prefixes: PrefixCache, blocks: CounterMetricFamily, room: GaugeMetricFamily
    ) -> None:
        blocks.add_metric([name, "memory"], prefixes.hits)
        room.add_metric([name, "memory"], prefixes.bytes)
        if prefixes.folder is not None:
            counts = prefixes.folder.counts
            blocks.add_metric([name, "disk"], counts.read)
            blocks.add_metric([name, "damaged"], counts.damaged)
            blocks.add_metric([name, "written"], counts.written)
            blocks.add_metric([name, "skipped"], counts.skipped)
            room.add_metric([name, "disk"], counts.bytes)


def metrics(models: Mapping[str, Served]) -> str:
    """The text format, version 0.0.4."""
    registry = CollectorRegistry()
    registry.register(_Collector(models))
    text: bytes = generate_latest(registry)
    return text.decode()
