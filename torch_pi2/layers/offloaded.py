"""``Store``: a neuron store on flash with its cache; ``OffloadedFFN``: a layer whose neurons are in it."""

import copy
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.fields import checked
from torch_pi2.base.memory import trim
from torch_pi2.base.progress import log
from torch_pi2.errors import ArtifactError, ConfigError, OutOfMemoryError, Pi2Error, parse_core_error
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.gpu import TransferBuffer
from torch_pi2.machine.device import find_device
from torch_pi2.ops import load
from torch_pi2.ops.constants import lists
from torch_pi2.ops.library import unseen_by_modes
from torch_pi2.ops.predictors import NO_PREDICTOR
from torch_pi2.types.offload import Budget, OffloadConfig
from torch_pi2.types.plan import LayerPlan
from torch_pi2.types.site import FFNSite

_NO_MEMORY = "no memory"
#: Names of the numbers of ``torch.ops.pi2.store_stats``, in order.
STATISTICS = (
    "calls", "wanted", "hits", "reads", "bytes_read", "evictions", "uncached",
    "wait_ns", "busy_ns", "io_ns", "resident", "slots", "cache_bytes", "staging_bytes",
    "guessed", "used", "late", "fixed", "arranging", "left_out", "experts_left_out",
)  # fmt: skip
#: After this many tokens, summed over the layers' calls, freed memory is returned to the system.
_TRIM_TOKENS = 512
#: Beginnings of core messages about a store that did not open for reasons outside of the file.
_NOT_OF_THE_FILE = ("engine: no thread", "options: ", "policy: ", "device: ")


#: Number -> store: compiled code passes the number.
open_stores: "weakref.WeakValueDictionary[int, Store]" = weakref.WeakValueDictionary()


class Store:
    """An open ``model.pi2`` and its cache. It closes when the last layer over it is gone.

    Args:
        path: of the file.
        cache_bytes: for cached neurons. ``stats()["staging_bytes"]`` come on top, for neurons that do not fit there.
        token_bytes: bytes that an average token needs, if known.

    Raises:
        ArtifactError: not a store, or damaged. ConfigError: the system cannot read it as ``config`` says.
    """

    def __init__(
        self, path: str | Path, cache_bytes: int, config: OffloadConfig | None = None, *, token_bytes: int = 0
    ) -> None:
        load()
        self.path, self.config = Path(path).absolute(), config or OffloadConfig()  # the current folder may change
        self.token_bytes, self.opened_bytes = token_bytes, cache_bytes
        #: Budget of the models over it (one and its copies), which includes the cache; and whether it is enforced,
        #: which it is not for a shard.
        self.budget: Budget | None = None
        self.limited = False
        self._warned = set[str]()
        self._contexts, self._lock = weakref.WeakKeyDictionary[object, int](), threading.Lock()
        self._since_trim = 0
        #: Argument of the last :meth:`arrange`.
        self.resident: tuple[int, ...] | None = None
        self.hot_share: float = self._hot_share(cache_bytes)
        self.device = None if self.config.device is None else find_device(self.config.device)
        self.number = self._open(cache_bytes)
        open_stores[self.number] = self
        self._sizes = [(int(n), int(h), int(r)) for n, h, r, *_ in torch.ops.pi2.store_layers(self.number).tolist()]
        #: Number of first neurons computed elsewhere, by layer (:meth:`leave_out`).
        self.left_out = [0] * len(self._sizes)
        self._close = weakref.finalize(self, _close, self.number)

    def _hot_share(self, cache_bytes: int) -> float:
        if self.config.hot_share is not None:
            return self.config.hot_share
        by_age = self.config.policy in ("lru", "sieve")
        few_tokens, share = (2.0, 0.5) if by_age else (1.25, 0.25)
        return 0.9 if cache_bytes < few_tokens * self.token_bytes else share

    def _open(self, cache_bytes: int) -> int:
        c, refused = self.config, ""
        for engine in lists().engines if c.engine == "auto" else (c.engine,):
            refused = f"engine: {engine} is not available here: "
            try:
                return torch.ops.pi2.store_open(
                    str(self.path), cache_bytes, engine, c.policy, c.io_threads, c.direct, c.verify, c.pipeline,
                    c.window, c.in_flight, c.run_bytes, c.gap_bytes, self.hot_share, c.spin,
                    self.device.numbers if self.device else (), c.miss_margin, c.drop_experts,
                )  # fmt: skip
            except MemoryError as error:
                raise _no_memory(str(self.path)) from error
            except RuntimeError as error:
                found = str(error).splitlines()[0].rpartition(f"pi2: store {self.path}: ")[2]
                if not found.startswith(refused):
                    raise self._problem(found) from error
        expected, has = "one that this system allows", f"{engine}: {found.removeprefix(refused)}"
        needs = "Linux 5.6 and the right to it (containers may forbid it; kernel.io_uring_disabled)"
        fix = f"Use auto. io_uring takes {needs}."
        raise ConfigError("OffloadConfig.engine", expected=expected, found=has, fix=fix)

    def _problem(self, found: str) -> Pi2Error:
        """The error for a message of the core about the file, or about opening it."""
        if found.startswith(_NO_MEMORY):
            return _no_memory(str(self.path))
        if found.startswith(_NOT_OF_THE_FILE):
            expected = "memory, threads and settings with which it can be read"
            fix = "Give it a smaller budget, fewer io_threads or other settings; nothing is wrong with the store."
            return ConfigError(f"opening {self.path}", expected=expected, found=found, fix=fix)
        fix = "Check it with `torch-pi2 inspect --verify`; copy it again, or pack the model again."
        return ArtifactError(str(self.path), expected="a sound neuron store", found=found, fix=fix)

    def __copy__(self) -> "Store":
        return self

    def __deepcopy__(self, _memo: Any) -> "Store":
        return self  # copies of a model share the store, which stays open as long as any of them

    def __reduce__(self) -> Any:
        found = "an open neuron store, which means nothing to another process"
        fix = "Load the folder there with torch_pi2.load(folder, budget=...)."
        raise ConfigError(f"pickling a model over {self.path}", expected="a model in memory", found=found, fix=fix)

    def leave_out(self, layer: int, first: Sequence[int]) -> None:
        """Leave the ``first[i]`` first neurons of layer ``layer + i`` to another device; :meth:`preload` skips them."""
        self.left_out[layer : layer + len(first)] = first
        with explained(str(self.path)):
            torch.ops.pi2.store_leave_out(self.number, self.left_out)

    def preload(self) -> None:
        """Fill the free part of the cache with the most frequent neurons. Raises ArtifactError."""
        with explained(str(self.path)):
            problem = torch.ops.pi2.store_preload(self.number)
        if problem:
            raise self._problem(problem)

    def resize(self, cache_bytes: int) -> None:
        """Change the size of the cache, at most to the size it was opened with; call it between two calls of its
        layers. Neurons that no longer fit are evicted by the policy, and their memory returns to the system; new space
        is empty until :meth:`preload`. Results keep their bits. Raises ConfigError: an impossible size, or engine
        ``mmap``, which has no cache. ArtifactError: the store has been closed.
        """
        share = self._hot_share(cache_bytes)
        with explained(str(self.path)):
            problem = torch.ops.pi2.store_resize(self.number, cache_bytes, share)
        self._check_cache(problem)
        self.hot_share = share

    def arrange(self, resident: Sequence[int], cache_bytes: int | None = None) -> None:
        """Pin the first ``resident[i]`` neurons of each layer i, the most frequent (after those of :meth:`leave_out`),
        in the cache of ``cache_bytes`` (None: as it is); others may be evicted.

        It returns at once if the cache keeps its size; otherwise it waits for the layer in progress, some milliseconds.
        Missing neurons are read in the background after reads that calls wait for, and on demand if that fails.
        ``stats()["arranging"]`` is 0 when all are there; ``stats()["fixed"]`` counts them. If they do not all fit, the
        most frequent of all layers are pinned. The next call replaces this one; :meth:`preload` fills the rest of the
        cache, and ``hot_share`` no longer applies. Results keep their bits. Any thread may call this at any time.
        Raises as :meth:`resize`; nothing is changed then.
        """
        wanted = tuple(int(n) for n in resident)
        size = -1 if cache_bytes is None else int(cache_bytes)
        if cache_bytes is not None and size < 0:
            self._check_cache(f"cache_bytes: expected 0 or more, found {size}")
        with explained(str(self.path)):
            problem = torch.ops.pi2.store_arrange(self.number, wanted, size)
        self._check_cache(problem)
        self.resident = wanted

    def _check_cache(self, problem: str) -> None:
        """Raises ConfigError for a ``problem`` that the core reports about settings of the cache."""
        if not problem:
            return
        what, expected, found = parse_core_error(problem)
        of_the_plan = what == "resident"
        where = f"cache of {self.path}, {what}" if expected else f"cache of {self.path}"
        fix = "Load the model with the largest budget that it is going to have."
        fix = "Make the plan again, for this model." if of_the_plan else fix
        expected = expected or "a store that this process has opened"
        raise ConfigError(where, expected=expected, found=found or problem, fix=fix)

    def check_tokens(self, tokens: int) -> None:
        """Warn once if a call for ``tokens`` exceeds the budget; returns freed memory every ``_TRIM_TOKENS`` tokens."""
        self._since_trim += tokens
        if self._since_trim >= _TRIM_TOKENS:
            self._since_trim = 0
            trim()
        if self.limited and self.budget is not None and tokens > (most := self.budget.piece_tokens):
            self.warn_once(
                f"a call for {tokens} tokens takes more memory than its budget, which has room for the activations of "
                f"{most}. Load it with a larger context, or read prompts in pieces (torch_pi2.Decoder, "
                f"torch_pi2.generate, model.generate(..., prefill_chunk_size={most})).",
                "activations",
            )

    def check_context(self, holder: object, tokens: int) -> None:
        """Register that ``holder`` has a KV cache for ``tokens`` tokens: warn once if all of them exceed the budget."""
        with self._lock:
            self._contexts[holder] = tokens
            tokens = sum(self._contexts.values())
        if self.limited and self.budget is not None and tokens > self.budget.context:
            self.warn_once(
                f"keys and values of {tokens} tokens, all sequences together, take more memory than its budget, which "
                f"has room for those of {self.budget.context}. Load it with a larger context, or decode fewer "
                "sequences at a time.",
                "keys and values",
            )

    def warn_once(self, message: str, of: str) -> None:
        """Log ``message``, unless one of the kind ``of`` was logged for this store before."""
        if of not in self._warned:
            self._warned.add(of)
            log.warning("%s: %s", self.path.parent.parent, message)

    def prefetch(self, layer: int, active: torch.Tensor, n_hot: int = 0, *, after: int | None = None) -> None:
        """Begin to read neurons that the next call of ``layer`` is likely to need: at once, or (``after``) together
        with the next call of that layer of the store, or of the mixture that begins there, behind its own reads and
        while it is computed; until then a later request for the same layer replaces it. Results keep their bits: what
        is missing is read by the call that needs it. ``stats()`` counts slots that were ``guessed``, and those of them
        ``used``. Engine ``mmap`` reads nothing.

        Args:
            active: bool ``[..., n]``, a row per token, n at least the cold neurons, which are the last columns in plan
                order. The first ``n_hot`` neurons are read in any case.

        Raises ArtifactError: the store has been closed. RuntimeError: sizes that are not those of the layer.
        """
        with explained(str(self.path)):
            torch.ops.pi2.store_prefetch(self.number, layer, n_hot, active, -1 if after is None else after)

    def prioritize(self, layer: int, priority_I: torch.Tensor | None) -> None:
        """See :func:`torch_pi2.prioritize`; ``priority_I``: float32, in plan order; None: of no layer. Raises as
        :meth:`resize`.
        """
        with explained(str(self.path)):
            self._check_cache(torch.ops.pi2.store_prioritise(self.number, layer, priority_I))

    def close(self) -> None:
        """Free memory and threads now; layers over this store raise from then on."""
        self._close()

    def layers(self) -> list[tuple[int, int, int]]:
        """(neurons, hidden size, rows per neuron) of each layer."""
        return list(self._sizes)

    def describe(self) -> str:
        """Engine and mode of reads: ``pread, direct``, or ``simulated ufs-4.0 over pread, direct``."""
        with explained(str(self.path)):
            found = str(torch.ops.pi2.store_describe(self.number))
        return found.replace("simulated device", f"simulated {self.device.name}") if self.device else found

    @checked
    def stats(self, *, reset: bool = False) -> dict[str, int]:
        """Counters since the last reset (calls, neurons wanted and found, reads, bytes, nanoseconds), and cache sizes.

        ``wait_ns`` and ``busy_ns`` are sums over compute threads: waiting for neurons, and in layers at all.
        ``evictions``, ``uncached`` (read into ``staging_bytes``, as the cache was full), ``guessed`` (read before their
        layer ran; also without ``lookahead``, in layers read whole) and ``used`` of these, ``resident``, ``slots``,
        ``fixed`` (never evicted) and ``arranging`` (see :meth:`arrange`) count slots of the file: mostly a neuron each,
        in mixtures with dense experts a run of neurons.
        ``left_out``: predicted neurons that ``OffloadConfig.miss_margin`` dropped. ``experts_left_out``: (token,
        expert) choices that ``OffloadConfig.drop_experts`` dropped.
        """
        with explained(str(self.path)):
            values = torch.ops.pi2.store_stats(self.number, reset).tolist()
        return dict(zip(STATISTICS, map(int, values), strict=True))


def _close(number: int) -> bool:
    with unseen_by_modes():
        return bool(torch.ops.pi2.store_close(number))


def check_store_layer(store: Store, layer: int, site: FFNSite) -> None:
    """Raises ArtifactError unless ``layer`` of ``store`` has the sizes of ``site``."""
    wanted = (site.intermediate, site.hidden, site.rows_per_neuron)
    found = store.layers()[layer]
    if found != wanted:
        what, has = f"{store.path}, layer {layer}", f"{found[0]} neurons of {found[2]} rows of {found[1]}"
        expected = f"{wanted[0]} neurons of {wanted[2]} rows of {wanted[1]}, as {site.key} has"
        raise ArtifactError(what, expected=expected, found=has, fix="The store is of another model; pack it again.")


def _no_memory(where: str) -> OutOfMemoryError:
    fix = "Give the process more, or load the model with a smaller budget."
    return OutOfMemoryError(where, expected="memory for what is computed over it", found="none", fix=fix)


def unreadable(error: RuntimeError | MemoryError, where: str) -> ArtifactError | OutOfMemoryError | None:
    """The error to raise for an operator's ``error`` on the store ``where``; None if it is not about reading."""
    if isinstance(error, MemoryError):
        return _no_memory(where)
    first = str(error).splitlines()[0]
    reading = first.partition("reading the neuron store: ")[2]
    if reading.startswith(_NO_MEMORY):
        return _no_memory(where)
    if not reading and "pi2: store: expected an open one" not in first:
        return None
    expected = "the neurons that were packed" if reading else "an open store"
    fix = "Check it with `torch-pi2 inspect --verify`, and load the model again."
    return ArtifactError(where, expected=expected, found=reading or "a store that has been closed", fix=fix)


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Context that turns an operator's error into that of :func:`unreadable`, if it has one."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        found = unreadable(error, where)
        if found is None:
            raise
        raise found from error


class Gates:
    """Gate rows of a layer, which copies of its model share, as they share store and budget: the operators' tensors for
    kind ``gate``, or none.
    """

    tensors: tuple[torch.Tensor, ...] = ()

    def __deepcopy__(self, _memo: Any) -> "Gates":
        return self


class InStore:
    """Mixin of modules over a :class:`Store`; it comes before the module's own class among the bases."""

    site: FFNSite
    _store: tuple[Store, ...]  # a tuple: not a module
    _gates: Gates
    _buffers: dict[str, torch.Tensor | None]

    @property
    def store(self) -> Store:
        return self._store[0]

    @property
    def gate_rows(self) -> torch.Tensor | None:
        """Gate rows (up rows where there are no gates), if they stay in memory: few tokens read only what fires."""
        return self._gates.tensors[0] if self._gates.tensors else None

    def keep_gates(self, layers: Sequence[int], store: Any) -> None:
        """Keep the gate rows of these layers of ``store``, which are this module's, in memory, and no others."""
        raise NotImplementedError

    def read(self, operator: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """``operator(x, *arguments)``, which reads the store. Raises ArtifactError or OutOfMemoryError if it cannot."""
        if torch.compiler.is_compiling():
            return operator(x, *arguments)
        self.store.check_tokens(x.numel() // self.site.hidden)
        with explained(f"{self.store.path}, read for {self.site.key}"):
            return operator(x, *arguments)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """``model.to(...)`` leaves the neurons on ``meta``."""
        neuron_rows = self._buffers["neuron_rows"]
        assert neuron_rows is not None
        self._buffers["neuron_rows"] = torch.empty(0, dtype=neuron_rows.dtype)
        try:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            self._buffers["neuron_rows"] = neuron_rows

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, in {self.store.path.name}"  # type: ignore[misc]


class OffloadedFFN(InStore, SparseFFN):
    """A ``SparseFFN`` whose neurons are in a :class:`Store`, with the same results bit for bit.

    ``neuron_rows`` is on ``meta``; ``state_dict`` and whatever else needs all numbers raises ConfigError. A failed read
    raises ArtifactError; the next call may work. Under ``torch.compile`` this needs ``backend="torch_pi2"``: Inductor
    alone passes on the operator's RuntimeError.
    """

    in_memory = False
    store_layer: int
    #: Whether :meth:`announce` has been called.
    announced = False
    #: Number of first neurons in plan order that are computed elsewhere.
    first = 0

    @classmethod
    def over(
        cls, store: Store, store_layer: int, site: FFNSite, layer_plan: LayerPlan, kind: str, **settings: Any
    ) -> "OffloadedFFN":
        """As :meth:`SparseFFN.empty` (``settings``: its arguments), with the neurons of a layer of ``store``."""
        layer = cls.empty(site, layer_plan, kind, **settings)
        if layer.custom is not None and layer.custom.scope == "prompt":
            expected, fix = "scope 'token': every product of a prompt would be needed", "Load it without a budget."
            raise ConfigError(f"method of {site.key}, over a store", expected=expected, found="scope 'prompt'", fix=fix)
        assert isinstance(layer, OffloadedFFN)
        layer._store, layer.store_layer = (store,), store_layer  # a tuple: not a module
        layer._gates = Gates()
        check_store_layer(store, store_layer, site)
        return layer

    def keep_gates(self, layers: Sequence[int], store: Any) -> None:
        if bool(layers) != bool(self._gates.tensors):
            self._gates.tensors = tuple(store.first_rows(layer) for layer in layers)

    def split_off(self, n_gpu: int, link: TransferBuffer, neuron_rows: torch.Tensor | None = None) -> None:
        """See the base class. The cache then serves the other neurons; :meth:`Store.preload` fills it."""
        super().split_off(n_gpu, link, neuron_rows)
        self.store.leave_out(self.store_layer, [n_gpu])

    def end_split(self) -> None:
        super().end_split()
        with suppress(ArtifactError):  # the store may be closed
            self.store.leave_out(self.store_layer, [0])

    def part(self, first: int, last: int, neuron_rows: torch.Tensor | None = None) -> SparseFFN:
        """See the base class: the first neurons in memory (``neuron_rows``), or the others in the store."""
        if neuron_rows is None:
            others = copy.copy(self)
            others.split, others.first, others.span = None, first, (0, last)
            return others
        part = super().part(first, last, neuron_rows)
        part.__class__ = SparseFFN
        return part

    def announce(self, batch: int = 1) -> None:
        """Let the layer before this one in the store read ahead for it (``OffloadConfig.lookahead``), without effect if
        that has another hidden size (a vision tower). ``batch``: tokens of the coming calls, which decide how many
        neurons are hot.
        """
        self.announced = True
        sizes = self.store.layers()[max(0, self.store_layer - 1) : self.store_layer]
        if self.has_predictor and self.custom is None and [hidden for _, hidden, _ in sizes] == [self.site.hidden]:
            n_hot = self.hot_for(batch)
            torch.ops.pi2.store_lookahead(self.store.number, self.store_layer, *self.asked(), n_hot)

    def _predicted(self, x: torch.Tensor, n_hot: int) -> torch.Tensor:
        return self._stored(x, self.asked(x, n_hot), n_hot, self.threshold)

    def _compute(self, x: torch.Tensor, n_hot: int, threshold: float) -> torch.Tensor:
        rows = self._gates.tensors  # another thread may take them away
        if not rows or n_hot == self.site.intermediate:
            return self._stored(x, ([], NO_PREDICTOR, 0.0, "", False), n_hot, threshold)
        return self._stored(x, ([*rows], "gate", 0.0, "", False), n_hot, threshold)

    def _stored(self, x: torch.Tensor, asked: tuple[Any, ...], n_hot: int, threshold: float) -> torch.Tensor:
        return self._call(x, asked, n_hot, threshold, self.bias_out(threshold > 0 or asked[1] == "mask"), 0)

    def _call(
        self,
        x: torch.Tensor,
        asked: tuple[Any, ...],
        n_hot: int,
        threshold: float,
        bias_down: torch.Tensor | None,
        parts: int,
    ) -> torch.Tensor:
        neurons = self.store.number, self.store_layer, self.bias_gate, self.bias_up, bias_down
        form = self.site.activation, self.site.activation_on_up
        settings = n_hot, threshold, self.int8_activations, self.first, self.thresholds, parts
        return self.read(torch.ops.pi2.stored_ffn, x, *neurons, *asked, *form, *settings)

    def projection(self, role: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise self._not_in_memory(f"the weights of {self.site.key}")

    def check_float(self, what: str) -> None:
        raise self._not_in_memory(what)

    def _not_in_memory(self, what: str) -> ConfigError:
        fix = "Load the whole model without a budget, or read the store (torch_pi2.store.storefile)."
        return ConfigError(what, expected="a layer in memory", found=f"one in {self.store.path.name}", fix=fix)
