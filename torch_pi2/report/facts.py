"""What a report says of one model, as plain numbers: gathered by the other modules, drawn by ``figures``, or JSON.

A *row* is a feed-forward layer, or all experts of a block together: a mixture has thousands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_pi2.types.loss_curve import LossCurve


@dataclass(frozen=True)
class Model:
    """Whose report it is.

    Attributes:
        name: of the folder. shape: class and sizes, from config.json; "" if there is none.
        synthetic: what the folder says of random weights; None: a real model. stored: it is a neuron store.
        weights: format of the neurons; "" where they are not in the folder. model_hash: of them.
        bytes: of the files by what they are for.
    """

    name: str
    shape: str
    synthetic: str | None
    stored: bool
    weights: str
    model_hash: str
    bytes: Mapping[str, int]


@dataclass(frozen=True)
class Firing:
    """How one row's neurons fire.

    Attributes:
        key: of the layer. tokens: that were seen. neurons: of it.
        never: neurons that never fired. active_share: of neurons per token.
        cdf: (share of neurons, the most frequent first; share of all firings that are theirs), from (0, 0) to (1, 1).
        by_batch: tokens taken together -> mean share of neurons that fire for at least one of them.
    """

    key: str
    tokens: int
    neurons: int
    never: int
    active_share: float
    cdf: tuple[tuple[float, float], ...]
    by_batch: Mapping[int, float]


@dataclass(frozen=True)
class Predictor:
    """A row's predictors, from their cards: bytes together, the rest on average (None: not measured)."""

    bytes: int
    recall: float
    precision: float
    predicted_active: float
    rank: int


@dataclass(frozen=True)
class Row:
    """The plan of a layer; ``hot``, ``accelerator`` and ``resident`` neurons by bucket.

    Attributes:
        key: of the layer. experts: 1 where it has none. neurons: of it, of all experts. hidden: H.
        method: how cold neurons are chosen. expected_active: mean share of those computed.
        bytes: of the neurons as they lie in the file; None where they are not in the folder.
    """

    key: str
    experts: int
    neurons: int
    hidden: int
    method: str
    expected_active: float
    hot: tuple[int, ...]
    accelerator: tuple[int, ...]
    resident: tuple[int, ...]
    bytes: int | None
    predictor: Predictor | None


@dataclass(frozen=True)
class Bucket:
    """``batch`` sequences at most (0: any number); predicted ms of a step by part, empty if nobody predicted."""

    batch: int
    cache_bytes: int
    ms: Mapping[str, float]


@dataclass(frozen=True)
class Hardware:
    """The machine that the plan is for; ``source`` is ``measured`` or ``published``. Budget None: all in memory."""

    name: str
    source: str
    budget_bytes: int | None
    accelerator_bytes: int
    context: int
    settings: Mapping[str, str]


@dataclass(frozen=True)
class Planned:
    """The plan: ``rows`` in order of execution, ``buckets`` ascending. ``planner``: who made it. ``curve``: of
    thresholds that were chosen by what the loss bears.
    """

    planner: str
    rows: tuple[Row, ...]
    buckets: tuple[Bucket, ...]
    hardware: Hardware | None
    curve: LossCurve | None = None


@dataclass(frozen=True)
class Measured:
    """A run: milliseconds of a step of ``batch`` sequences by part, from a file ``where``.

    ``predicted``: what the cost model says of this very run, which has its own context and cache; empty: nothing.
    """

    where: str
    batch: int
    ms: Mapping[str, float]
    predicted: Mapping[str, float]


@dataclass(frozen=True)
class Rivals:
    """Tokens per second by planner, of which the first is the plan's, in one ``case``; ``measured`` or predicted."""

    case: str
    measured: bool
    tokens_per_s: Mapping[str, float]


@dataclass(frozen=True)
class CacheSize:
    """Hit rate by policy of a cache for ``share`` of the store, of ``bytes``."""

    share: float
    bytes: int
    hit_rate: Mapping[str, float]


@dataclass(frozen=True)
class Cache:
    """Recorded accesses, replayed.

    Attributes:
        where: the file. calls, passes: that were recorded. policy, share, hit_rate: of the run.
        whole: a replay has exactly the run's hits.
        windows: last pass of each stretch of the recording. over_time: hit rate by policy in each stretch, with a
            cache of the run's size. sizes: ascending.
    """

    where: str
    calls: int
    passes: int
    policy: str
    share: float
    hit_rate: float
    whole: bool
    windows: tuple[int, ...]
    over_time: Mapping[str, tuple[float, ...]]
    sizes: tuple[CacheSize, ...]


@dataclass(frozen=True)
class Span:
    """``stage`` on ``lane`` (its place in ``Timeline.lanes``) from ``begin``, for ``ms``; ``note``: its arguments."""

    stage: str
    lane: int
    begin: float
    ms: float
    note: str


@dataclass(frozen=True)
class Timeline:
    """A trace.

    Attributes:
        where: the file. total_ms: from its first event to its last. events, lost: in it, and missing from it.
        lanes: of the spans: compute threads, I/O threads, and rows of reads under way.
        begin_ms, end_ms: the window of which ``spans`` are, every one of them.
        bins: upper end of equal pieces of the whole trace, in ms. busy: stage -> compute threads in it, on average, in
            each piece (``other``: in a layer, and in none of the stages). read_mb_per_s: in each piece.
    """

    where: str
    total_ms: float
    events: int
    lost: int
    lanes: tuple[str, ...]
    begin_ms: float
    end_ms: float
    spans: tuple[Span, ...]
    bins: tuple[float, ...]
    busy: Mapping[str, tuple[float, ...]]
    read_mb_per_s: tuple[float, ...]


@dataclass(frozen=True)
class Missing:
    """A plot that cannot be drawn: ``why``, and ``how`` to get it."""

    plot: str
    why: str
    how: str


@dataclass(frozen=True)
class Report:
    """All of it; what is None or empty is in ``missing``.

    Attributes:
        verdict: on the model, in words; empty: nobody measured. made: the report itself: when, by what, on what.
    """

    model: Model
    firing: tuple[Firing, ...]
    plan: Planned | None
    measured: tuple[Measured, ...]
    rivals: tuple[Rivals, ...]
    cache: Cache | None
    timeline: Timeline | None
    missing: tuple[Missing, ...]
    verdict: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)
