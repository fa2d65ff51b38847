"""``OffloadConfig``: how neurons are read from storage and kept in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch_pi2.base.fields import argument, check_fields, limited
from torch_pi2.machine.device import find_device
from torch_pi2.ops.constants import lists

_MOST_THREADS = 1 << 16


@dataclass(frozen=True)
class OffloadConfig:
    """How neurons come from flash. Every setting is lossless, results have the same bits with all, but for two that
    leave out what is not in memory: ``miss_margin`` and ``drop_experts``.

    Attributes:
        engine: ``io_uring`` (Linux, where it is allowed), ``pread`` (a pool of threads), ``auto`` (the first of them
            that there is) or ``mmap`` (no cache of our own: the system's pages; for comparison. A file that has been
            cut short is refused, but one that is cut short while a layer is computed ends the process).
        policy: what leaves the cache: ``lru`` (what was used longest ago), ``sieve`` (used since a hand passed stays),
            ``s3-fifo`` (what is new must be used again soon), ``lfu`` (what was used least often of late; the default:
            as good as ``lru`` in large caches, better in small ones), ``static`` (nothing) or ``none`` (everything:
            each call reads what it wants). ``torch-pi2 replay`` compares them on what a model really wants.
        io_threads: of ``pread``; for ``io_uring`` reads that may be at the device together.
        direct: read past the page cache (``O_DIRECT``) where a trial read shows that this works.
        verify: check the CRC32C of every neuron read (not with ``mmap``, where the system reads).
        pipeline: compute chunks of a layer while others are read; else wait for all of a layer's reads.
        window: keep of a layer only what its last so many calls before this one used ("LLM in a flash": tokens; of
            a prompt, from 32 tokens on, or 12 where int8 prompts go by tiles, up to 512 are one call); 0: as the policy
            says.
        in_flight: chunks of a layer (of at most 16) whose reads may be under way together.
        run_bytes: neighbouring neurons are read together, up to this.
        gap_bytes: of what lies between two neurons that are read, at most so many bytes in a row are read with them
            rather than left out: what a device transfers in the time that one more read takes.
        hot_share: of the cache, the part for the most frequent neurons, which nothing evicts (with ``preload``). None:
            a quarter, with ``lru`` and ``sieve`` half; 0.9 where the cache holds little more than a token wants
            (``lru``, ``sieve``: less than two tokens): what remains would be evicted before it is wanted again (LRU's
            cliff).
        spin: threads that wait for reads keep their cores for some milliseconds before they sleep: faster where all
            cores compute, at the price of their power.
        preload: fill the cache with the most frequent neurons when the model is loaded.
        lookahead: while a layer is computed for a few tokens, begin to read what the next one's predictor says of the
            same input. Of a mixture of experts the next mixture's router is asked (early routing), where it is one
            linear layer with a top k of its scores (others are named in a warning), and what its experts want begins to
            be read, while at least half of what it said of late was right. Wrong guesses cost reads: it pays where the
            device is not busy all the time and a layer's input is like the one before.
        miss_margin: **lossy** where it is not 0, and results then depend on what was computed before: while decoding, a
            neuron that is not in memory is read only if its low-rank predictor's score is this far above the layer's
            threshold, and is left out otherwise; what is in memory is computed as always. In nats of the odds that it
            fires: 1 asks for 2.7 times the odds. Of calls for fewer than 32 tokens, so of short prompts, too;
            ``stats()["left_out"]`` of the store counts neurons. Models with no low-rank predictor are refused, and
            experts are read as always. After cache-aware masking (DIP, arXiv 2412.01380), which scales scores where
            this one shifts log odds.
        drop_experts: **lossy** where it is not 0, as ``miss_margin`` is, and for mixtures of experts: while decoding,
            an expert with less than this share of its token's weight (of the sum over those that are chosen for it) is
            left out while fewer than half of the slots of the file that it wants are in memory. The other weights stay
            as they are; the expert with most of a token's weight is never left out, and of several tokens together one
            that is wanted by any of them with more. Of calls for fewer than 32 tokens, so of short prompts, too, which
            have at most 64 experts in all; ``stats()["experts_left_out"]`` counts choices. What ``lookahead`` reads is
            in memory then. Models without experts are refused.
        device: reads take as long as this device's: a preset or a JSON file, see
            :func:`torch_pi2.machine.device.find_device`. What is measured is then simulated, and called so; preloading
            is not slowed down. Not with ``mmap``.
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
        if self.engine not in ("auto", "mmap"):  # what there always is takes no library
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
        """Whether something that is not in memory is left out, so that results depend on what is."""
        return self.miss_margin > 0 or self.drop_experts > 0
