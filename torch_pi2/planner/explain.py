"""What the cost model says of a decoding step beside what a run takes: ``torch-pi2 plan --explain``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ConfigError
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.of_model import homes
from torch_pi2.observe import timings
from torch_pi2.observe.attention import SPARE_TOKENS, milliseconds
from torch_pi2.observe.steps import timed_steps
from torch_pi2.ops import load as load_library
from torch_pi2.planner.cost import Cost, step_cost
from torch_pi2.planner.misses import MissCurve
from torch_pi2.planner.model_shape import ModelShape
from torch_pi2.rewrite.handle import store_of
from torch_pi2.types.plan import Plan

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware
    from torch_pi2.types.stats import ActivationStats

#: What a run can tell apart, and the parts of :data:`torch_pi2.planner.cost.PARTS` that are in it.
MEASURED: dict[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "sdpa": ("sdpa",),
    "predictor": ("predictor",),
    "ffn": ("hot", "cold", "io", "merge"),
    "head": ("head",),
    "glue": ("glue",),
}
#: Tokens of each sequence's prompt.
_PROMPT = 8
#: More than the CPU's caches hold.
_EVICT_BYTES = 1 << 27


@dataclass(frozen=True)
class Row:
    """A part: milliseconds of a step, predicted and measured, and their ratio (None where 0 was measured).

    ``part``: of ``MEASURED``, or several with `` + `` between them that this run could not tell apart.
    """

    part: str
    predicted_ms: float
    measured_ms: float

    @property
    def ratio(self) -> float | None:
        return self.predicted_ms / self.measured_ms if self.measured_ms > 0 else None


@dataclass(frozen=True)
class Explained:
    """See :func:`compare`.

    Attributes:
        rows: by part. predicted: the whole of what the model says. measured_ms: of a step, median over rounds.
        spread_ms: of the rounds, the fastest and the slowest.
        measured_misses: neurons of a step that were not in the cache of a store; None: everything is in memory.
    """

    rows: tuple[Row, ...]
    predicted: Cost
    measured_ms: float
    spread_ms: tuple[float, float]
    measured_misses: float | None
    about: dict[str, Any]

    @property
    def ratio(self) -> float:
        """Predicted over measured tokens per second."""
        return self.measured_ms / self.predicted.total_ms

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, for ``--json`` and reports."""
        return {
            **self.about,
            "parts": [{**asdict(row), "ratio": row.ratio} for row in self.rows],
            "predicted_ms": self.predicted.ms,
            "predicted_total_ms": self.predicted.total_ms,
            "measured_total_ms": self.measured_ms,
            "spread_ms": list(self.spread_ms),
            "predicted_tokens_per_s": self.predicted.tokens_per_s,
            "measured_tokens_per_s": self.predicted.batch * 1e3 / self.measured_ms,
            "ratio": self.ratio,
            "predicted_misses": self.predicted.misses,
            "measured_misses": self.measured_misses,
            "memory": self.predicted.memory,
        }


def compare(
    model: nn.Module,
    plan: Plan,
    hardware: Hardware,
    stats: ActivationStats,
    *,
    batch: int = 1,
    tokens: int = 16,
    rounds: int = 3,
    warm_up: int = 8,
    compiled: bool = True,
    misses: MissCurve | None = None,
    ids_BT: torch.Tensor | None = None,
    seed: int = 0,
) -> Explained:
    """Decode with ``model`` as it is now, and ask the cost model about the same step.

    Hot neurons are those that the layers have for such a batch, the cache is the store's. Steps are fed with given
    tokens, not with what the model says: that repeats itself.

    Args:
        plan: of the model. stats: how often its neurons fire.
        tokens, rounds: steps that are timed, after ``warm_up`` others, which fill caches.
        compiled: with a compiled step (5 to 30 s to compile).
        misses: of the store, for the prediction (default: from frequencies).
        ids_BT: int64, a row for each sequence, at least ``explained_tokens(...)`` of them; None: random.
        seed: of random tokens.

    Raises:
        ConfigError: too few tokens, more than the model has positions for, or as
            :func:`~torch_pi2.planner.cost.step_cost` and :class:`ModelShape` do.
        UnsupportedModelError: as :class:`torch_pi2.Decoder` does.
    """
    load_library()
    needed = explained_tokens(tokens, rounds, warm_up)
    run = _Run(model, batch, needed, compiled)
    if ids_BT is None:
        generator = torch.Generator().manual_seed(seed)
        ids_BT = torch.randint(run.vocabulary, (batch, needed), generator=generator)
    if ids_BT.dim() != 2 or len(ids_BT) != batch or ids_BT.shape[1] < needed:
        raise ConfigError(
            "tokens to explain a plan with",
            expected=f"[{batch}, {needed}] or more",
            found=str(list(ids_BT.shape)),
            fix="Pass more tokens, or fewer rounds.",
        )
    measured = run.measure(ids_BT, tokens, rounds, warm_up)
    shape = ModelShape.of(model, stats, plan, compiled=compiled)
    bucket = None if plan.hardware is None else plan.hardware.bucket(batch)
    hot = [part.hot_for(batch) for part in run.parts]
    follows = bucket is not None and tuple(hot) == bucket.hot
    cost = step_cost(
        shape,
        hardware,
        batch=batch,
        hot=hot,
        resident=bucket.resident if bucket is not None and follows and run.store is not None else None,
        cache_bytes=None if run.store is None else run.store.stats()["cache_bytes"],
        misses=misses,
        context=run.context,
        offload={} if run.store is None else _settings(run.store.config),
    )
    about: dict[str, Any] = {
        "batch": batch,
        "context": run.context,
        "tokens": tokens,
        "rounds": rounds,
        "compiled": compiled,
    }
    about |= {"hardware": hardware.name, "source": hardware.source, "follows_plan": follows}
    return Explained(
        _rows(cost.ms, measured["ms"]),
        cost,
        measured["total_ms"],
        measured["spread_ms"],
        measured["misses"],
        about,
    )


def explained_tokens(tokens: int, rounds: int, warm_up: int) -> int:
    """Of each sequence, how many tokens :func:`compare` feeds."""
    return _PROMPT + warm_up + tokens * rounds


def render(run: Mapping[str, Any]) -> str:
    """A table for people, of :meth:`Explained.to_json`."""
    lines = [f"{'part':24} {'predicted ms':>13} {'measured ms':>12} {'ratio':>6}"]

    def line(name: str, predicted: float, measured: float, ratio: float | None, digits: int) -> None:
        shown = "" if ratio is None else f"{ratio:.2f}"
        lines.append(f"{name:24} {predicted:13.{digits}f} {measured:12.{digits}f} {shown:>6}")

    for row in run["parts"]:
        line(row["part"], row["predicted_ms"], row["measured_ms"], row["ratio"], 3)
    line("step", run["predicted_total_ms"], run["measured_total_ms"], 1 / run["ratio"], 3)
    line("tokens/s", run["predicted_tokens_per_s"], run["measured_tokens_per_s"], run["ratio"], 2)
    if (found := run["measured_misses"]) is not None:
        predicted = run["predicted_misses"]
        line("neurons read a step", predicted, found, predicted / found if found else None, 1)
    inside = ", ".join(f"{part} {run['predicted_ms'][part]:.3f}" for part in MEASURED["ffn"])
    return "\n".join([*lines, f"ffn, predicted: {inside}"])


def _settings(config: Any) -> dict[str, Any]:
    """Fields of an ``OffloadConfig``."""
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def _rows(predicted: Mapping[str, float], measured: Mapping[str, float | None]) -> tuple[Row, ...]:
    """What was not measured apart (None) is in the measured ``glue``, and so it is in the predicted one."""
    rows: list[Row] = []
    unseen: list[str] = []
    rest = 0.0
    for name, parts in MEASURED.items():
        ms, found = sum(predicted[part] for part in parts), measured[name]
        if name == "glue":
            rows.append(Row(" + ".join([*unseen, name]), rest + ms, max(0.0, found or 0.0)))
        elif found is None:
            unseen.append(name)
            rest += ms
        else:
            rows.append(Row(name, ms, found))
    return tuple(rows)


class _Run:
    """A model that is decoded and timed."""

    def __init__(self, model: nn.Module, batch: int, tokens: int, compiled: bool) -> None:
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is not None and tokens + SPARE_TOKENS > positions:
            raise ConfigError(
                f"explaining a plan with {tokens} tokens",
                expected=f"at most {positions - SPARE_TOKENS}: the model has {positions} positions",
                found=str(tokens),
                fix="Ask for fewer tokens or rounds.",
            )
        self.model, self.compiled = model, compiled
        self.context = tokens + SPARE_TOKENS
        self.decoder = Decoder(model, max_tokens=self.context, batch=batch, compiled=compiled)
        self.vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        self.store = store_of(model)
        self.parts = [
            part for home in homes(model) for part in (home.experts() if isinstance(home, SparseExperts) else [home])
        ]

    def measure(self, ids_BT: torch.Tensor, tokens: int, rounds: int, warm_up: int) -> dict[str, Any]:
        """Milliseconds of a step by part of ``MEASURED`` (None: not seen apart), and what the store missed."""
        prompt_BT, rest_BT = ids_BT[:, :_PROMPT], ids_BT[:, _PROMPT:]
        self.decoder.prompt(prompt_BT)
        timed_steps(self.decoder, rest_BT[:, :warm_up])
        found = [self._timed(rest_BT[:, warm_up + r * tokens : warm_up + (r + 1) * tokens]) for r in range(rounds)]
        sdpa = self._sdpa(ids_BT[:, -1:])
        median = {name: statistics.median(r[name] for r in found) for name in found[0]}
        ms: dict[str, float | None] = {
            # float layers are torch's own: the core's clock does not see them
            "attention": median["attention"] or None,
            "sdpa": sdpa,
            "predictor": median["predictor"],
            "ffn": median["ffn"],
            "head": median["head"] or None,
        }
        ms["glue"] = median["total"] - sum(filter(None, ms.values()))
        totals = [r["total"] for r in found]
        return {
            "ms": ms,
            "total_ms": median["total"],
            "spread_ms": (min(totals), max(totals)),
            "misses": None if self.store is None else median["misses"],
        }

    def _timed(self, ids_BT: torch.Tensor) -> dict[str, float]:
        found = timed_steps(self.decoder, ids_BT, self.store)
        linears, head = timings.split_head(found.timings, self.vocabulary)
        by_part = {
            "attention": linears,
            "predictor": found.ms(timings.PREDICTOR),
            "ffn": found.ms(timings.FFN),
            "head": head,
            "total": found.seconds * 1e3,
            "misses": found.misses,
        }
        return {name: value / found.steps for name, value in by_part.items()}

    def _sdpa(self, next_B1: torch.Tensor) -> float | None:
        def evict() -> torch.Tensor:
            return torch.ones(_EVICT_BYTES, dtype=torch.uint8).sum()

        return milliseconds(self.model, self.decoder, next_B1, evict)[0]
