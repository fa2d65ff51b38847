"""``OffloadConfig``: how neurons are read from storage and kept in memory; ``Budget``: how memory is divided."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch_pi2.base.fields import argument, check_fields, limited
from torch_pi2.base.units import mebibytes
from torch_pi2.machine.device import find_device
from torch_pi2.ops.constants import lists

_MOST_THREADS = 1 << 16


@dataclass(frozen=True)
class OffloadConfig:
    """How neurons are read from flash and cached. All settings are lossless (the same bits) except ``miss_margin`` and
    ``drop_experts``, which leave out neurons that are not in memory.

    Attributes:
        engine: how the store is read. ``io_uring`` (Linux, where permitted), ``pread`` (a thread pool), ``auto`` (the
            first of these that works) or ``mmap`` (only the system's page cache, for comparison; truncated files are
            refused, and truncating a file during computation kills the process).
        policy: which neurons are evicted. ``lru`` (least recently used), ``sieve`` (SIEVE), ``s3-fifo`` (S3-FIFO: new
            neurons must be used again soon), ``lfu`` (least frequently used of late; the default: as good as ``lru`` in
            large caches, better in small ones), ``static`` (none) or ``none`` (all: nothing is cached). ``torch-pi2
            replay`` compares them on the accesses of a real run.
        io_threads: threads of ``pread``; for ``io_uring`` the queue depth.
        direct: bypass the page cache (``O_DIRECT``) where a trial read shows that this works.
        verify: check the CRC32C of every neuron read (not with ``mmap``, where the system reads).
        pipeline: compute chunks of a layer while others are read; otherwise wait for all of a layer's reads.
        window: keep only the neurons of a layer that its last ``window`` calls used ("LLM in a flash": tokens. A prompt
            of 32 tokens or more, or 12 where int8 prompts are computed by tiles, counts as one call per 512 tokens); 0:
            the policy decides.
        in_flight: how many chunks of a layer (of at most 16) may be read at the same time.
        run_bytes: largest request for adjacent neurons.
        gap_bytes: largest gap between two neurons that is read rather than skipped: what a device transfers in the time
            of one more read.
        hot_share: share of the cache for the most frequent neurons, which are never evicted (with ``preload``). None: a
            quarter, with ``lru`` and ``sieve`` half; 0.9 where the cache holds little more than one token needs
            (``lru``, ``sieve``: less than two tokens), since the rest would be evicted before it is used again.
        spin: threads that wait for reads spin for some milliseconds before they sleep: faster where all cores compute,
            at the price of power.
        preload: fill the cache with the most frequent neurons when the model is loaded.
        lookahead: while a layer is computed for a few tokens, start reading the neurons that the next layer's predictor
            selects for the same input. For a mixture of experts, the next mixture's router is evaluated early (where it
            is one linear layer with a top k of its scores; others are named in a warning), and its experts are read
            ahead while at least half of the recent guesses were right. Wrong guesses cost reads, so this pays where the
            device is not saturated and the inputs of successive layers are similar.
        miss_margin: **lossy** unless 0, and results then depend on earlier calls. While decoding, a neuron that is not
            in memory is read only if its low-rank predictor's score exceeds the layer's threshold by this margin;
            otherwise it is left out. The unit is nats of the odds that the neuron fires: 1 requires 2.7 times the odds.
            Applies to calls of fewer than 32 tokens, including short prompts; ``stats()["left_out"]`` of the store
            counts neurons. Models without a low-rank predictor are refused, and experts are always read. After
            cache-aware masking (DIP, arXiv 2412.01380), which scales scores where this shifts log odds.
        drop_experts: **lossy** unless 0, as ``miss_margin``, for mixtures of experts. While decoding, an expert with
            less than this share of its token's total routing weight is left out if fewer than half of its needed slots
            are in memory. Other weights are unchanged. The top expert is never left out, and in a batch, neither is one
            to which any token gives more. Applies to calls of fewer than 32 tokens, including short prompts, with at
            most 64 experts in all; ``stats()["experts_left_out"]`` counts choices. Slots read by ``lookahead`` count as
            in memory. Models without experts are refused.
        device: simulate a storage device: a preset or a JSON file, see :func:`torch_pi2.machine.device.find_device`.
            Reads take as long as on it, and measurements are labelled as simulated; preloading is not slowed down. Not
            with ``mmap``.
    """

    engine: str = "auto"
    policy: str = "lfu"
    io_threads: int = limited(1, _MOST_THREADS, default=64)
    direct: bool = True
    verify: bool = True
    pipeline: bool = True
    window: int = limited(default=0)
    in_flight: int = limited(1, default=8)
    run_bytes: int = limited(512, default=1 << 18)
    gap_bytes: int = limited(default=1 << 14)
    hot_share: float | None = limited(0, 1, default=None)
    preload: bool = True
    lookahead: bool = False
    spin: bool = True
    miss_margin: float = limited(default=0.0)
    drop_experts: float = limited(0, 1, default=0.0)
    device: str | Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.engine not in ("auto", "mmap"):  # these need no library
            argument(self.engine, "OffloadConfig.engine").text(("auto", *lists().engines, "mmap"))
        if self.policy != "lfu":
            argument(self.policy, "OffloadConfig.policy").text(lists().policies)
        if self.device is not None:
            find_device(self.device)  # raises
            if self.engine == "mmap":
                fix = "Choose another engine, or measure mmap without a device."
                field = argument(self.device, "OffloadConfig.device", fix)
                field.wrong("engine pread or io_uring", "mmap, whose reads are the system's")

    @property
    def lossy(self) -> bool:
        """Whether neurons that are not in memory may be left out, so that results depend on the cache."""
        return self.miss_margin > 0 or self.drop_experts > 0


#: Bookkeeping per slot of the cache, in bytes.
SLOT_BYTES = 40
#: Largest chunk of a prompt, in tokens.
PIECE_TOKENS = 1024


@dataclass(frozen=True)
class Budget:
    """Bytes of a model over a store, by part.

    Attributes:
        total: the whole budget. fixed: attention, embeddings, head, norms and biases.
        predictors: of all layers. neuron_tables: bookkeeping. staging: for neurons that a full cache cannot take.
        gates: gate rows that stay in memory (docs/STORE.md), of as many layers as there is room for.
        kv: KV cache for ``context`` tokens, of all sequences together.
        activations: of a prompt of ``context`` tokens in chunks of ``piece_tokens`` (:class:`torch_pi2.Decoder`), with
            buffers of operators and some MiB for objects and threads.
        cache: the rest, for neurons (without 40 bytes per slot). neurons: all neurons. token: neurons of an average
            token. slot: a neuron (or a cluster) in the cache.
        context, piece_tokens: numbers of tokens, as above.
    """

    total: int
    fixed: int
    predictors: int
    neuron_tables: int
    kv: int
    staging: int
    activations: int
    cache: int
    neurons: int
    token: int
    slot: int
    context: int
    piece_tokens: int = PIECE_TOKENS
    gates: int = 0

    @property
    def smallest(self) -> int:
        """The smallest budget: everything but neurons, which are then all read from flash."""
        parts = self.fixed, self.predictors, self.gates, self.kv, self.staging, self.activations, self.neuron_tables
        return sum(parts)

    @property
    def whole(self) -> int:
        """The budget for all neurons in memory."""
        return self.smallest + self.in_slots(self.neurons)

    @property
    def cliff(self) -> int:
        """The budget below which one token's neurons do not fit: an LRU cache then hits almost nothing."""
        return self.smallest + self.in_slots(self.token)

    def with_total(self, total: int, folder: Path) -> "Budget":
        """The same parts, with the rest of ``total`` as the cache. Raises ConfigError: they do not fit."""
        left = total - self.smallest
        if left < 0:
            expected = f"at least {mebibytes(self.smallest, up=True)}, for all but neurons"
            argument(total, f"budget for {folder}", "Give it more.").wrong(expected, mebibytes(total))
        slots = min(self.neurons // self.slot, left // (self.slot + SLOT_BYTES))
        return replace(self, total=total, cache=slots * self.slot)

    def in_slots(self, size: int) -> int:
        """Memory of the cache for neurons of ``size`` bytes, with bookkeeping."""
        return -(-size // self.slot) * (self.slot + SLOT_BYTES)
