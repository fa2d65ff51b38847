"""``follow``: a model that runs as its plan says while sequences begin and end.

PowerInfer-2's engine changes its ratio of hot to cold neurons with the number of sequences that are decoded together
(arXiv 2406.06282, section 4.1.2). Here each layer knows its hot neurons for every number of tokens
(``SparseFFN.by_batch``), so that there is nothing to switch in it; what is switched is the cache of a store: how many
neurons of each layer never leave it, and how large it is. What is missing is read in the background.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from torch_pi2.base.arguments import checked
from torch_pi2.base.evaluating import fresh_settings
from torch_pi2.errors import ConfigError, ShapeError
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import homes, sparse_layers
from torch_pi2.layers.offloaded import OffloadedFFN, Store
from torch_pi2.layers.prompt import within_piece
from torch_pi2.rewrite.handle import Handle
from torch_pi2.types.budget import Budget
from torch_pi2.types.machine_plan import Bucket, HardwarePlan
from torch_pi2.types.plan import Plan

_log = logging.getLogger("torch_pi2")

#: Switches whose times are remembered.
_REMEMBERED = 256


@checked
@fresh_settings()
def follow(model: nn.Module, plan: Plan | HardwarePlan) -> Engine:
    """Let an optimised ``model`` run as ``plan`` says for the number of sequences that it decodes at a time.

    Set before anything of it is compiled: graphs keep the hot neurons that they were made with. A model that follows a
    plan already follows this one from then on. Experts, and layers with a threshold, keep their hot neurons.

    Over a store the cache is the plan's, but never larger than the budget that the model has (:func:`torch_pi2.load`,
    :func:`torch_pi2.set_budget`); a plan that was made for a model in memory leaves it alone.

    Lossless without predictors. With one, more hot neurons are fewer that it can miss.

    Raises:
        ConfigError: the model is dense, or the plan has no part for hardware.
        ShapeError: the plan is for other layers.
        ArtifactError: the store has been closed.
    """
    hardware = plan.hardware if isinstance(plan, Plan) else plan
    layers = sparse_layers(model)
    if hardware is None or not layers:
        raise ConfigError(
            f"plan for {type(model).__name__}",
            expected="a model with sparse layers, and a plan with a part for hardware",
            found="a plan without" if layers else "a model without",
            fix="Plan with --hardware (torch-pi2 plan)." if layers else "Call torch_pi2.optimize(model) first.",
        )
    _check(layers, hardware, plan if isinstance(plan, Plan) else None)
    handle, before = Handle.of(model) or Handle(), engine_of(model)
    own = before if before is not None and before._handle() is handle else None  # else: that of what it is a copy of
    settings = [(layer, layer.by_batch, layer.dense_from) for layer in layers if not _is_expert(layer)]
    budget = handle.budget
    with nullcontext() if own is None else own._lock:
        try:
            engine = Engine(model, handle, hardware, layers)
        except BaseException:
            for layer, by_batch, dense_from in settings:
                layer.by_batch, layer.dense_from = by_batch, dense_from
            raise
        if own is not None:
            own._closed = True  # the layers and the store are the new one's
    if before is not None:
        _unhook(model, before)
    handle.engine = engine
    if handle.budget is not None and handle.budget is not budget:  # set_budget by another thread told no engine, or own
        engine.refresh()
    if Handle.of(model) is None:  # one that holds an optimised model
        handle.attach(model)
    return engine


def let_go(model: nn.Module) -> None:
    """``model``, which may be dense by now, follows no plan any more; a store is left as it is."""
    handle, engine = Handle.of(model), engine_of(model)
    if handle is None or engine is None:
        return
    if engine._handle() is handle:
        engine._leave()
    else:  # a copy has that of what it was copied from, which goes on
        _unhook(model, engine)
        handle.engine = None


def engine_of(model: nn.Module) -> Engine | None:
    """What :func:`follow` made last; None if ``model`` follows no plan."""
    handle = Handle.of(model)
    engine = None if handle is None else handle.engine
    assert isinstance(engine, Engine | None)
    return engine


class Engine:
    """Keeps a model with its plan; :func:`follow` makes it.

    It is told how many sequences there are by what decodes (:class:`~torch_pi2.decode.decoder.Decoder`,
    :func:`torch_pi2.generate`), and sees it for itself where nothing is compiled: ``model.generate`` with any number of
    sequences. Thread-safe; of several threads that decode together each counts for itself.

    Attributes:
        plan: that is followed. bucket: its part that is in force.
    """

    def __init__(self, model: nn.Module, handle: Handle, plan: HardwarePlan, layers: Sequence[SparseFFN]) -> None:
        self.plan = plan
        self.bucket = plan.bucket(1)
        self._lock = threading.Lock()
        self._sequences, self._switches, self._total_ms = 1, 0, 0.0
        self._ms: deque[float] = deque(maxlen=_REMEMBERED)
        # weakly: layers that are taken out of the model (torch_pi2.restore) give their memory back
        self._handle = weakref.ref(handle)
        own = [(i, layer) for i, layer in enumerate(layers) if _has_own_hot(layer)]
        self._layers = [weakref.ref(layer) for _, layer in own]
        for i, layer in own:
            layer.by_batch = plan.layer_hot(i)
        self._prompts = [
            (weakref.ref(layer), plan.prompt.dense_from[i]) for i, layer in enumerate(layers) if not _is_expert(layer)
        ]
        beyond_steps = plan.buckets[-1].batch + 1
        for ref, dense_from in self._prompts:
            found = ref()
            assert found is not None
            found.dense_from = dense_from and max(dense_from, beyond_steps)
        self._store = _store_of(handle, plan)
        self._places = [_place(layer) for layer in layers] if self._store else []
        if self._store:
            self._say_what_has_no_room()
        first = homes(model)[0]
        self._closed = False
        self._switch(self.bucket)
        self._hook = first.register_forward_pre_hook(self._see, with_kwargs=True)

    def batch(self, sequences: int) -> None:
        """From the next step on there are so many sequences. What is missing is read in the background.

        Returns at once where the store's cache keeps its size, or there is none; another size waits for the layer that
        is being computed, and takes milliseconds.

        Raises:
            ConfigError: less than 1. ArtifactError: the store has been closed.
        """
        if sequences == self._sequences:
            return
        if sequences < 1:
            raise ConfigError("sequences", expected="1 or more", found=str(sequences), fix="A batch has at least one.")
        with self._lock:
            if self._closed:
                return
            bucket = self.plan.bucket(sequences)
            if bucket is not self.bucket:
                started = time.perf_counter()
                self._switch(bucket)
                self.bucket = bucket
                took = (time.perf_counter() - started) * 1e3
                self._switches, self._total_ms = self._switches + 1, self._total_ms + took
                self._ms.append(took)
            self._sequences = sequences

    def refresh(self) -> None:
        """Arrange the store for the bucket in force once more: :func:`torch_pi2.set_budget` gave it other room.

        Raises:
            ArtifactError: the store has been closed.
        """
        with self._lock:
            if not self._closed:
                self._switch(self.bucket)

    def stats(self) -> dict[str, Any]:
        """``sequences`` now, the batch size of their ``bucket``, ``switches`` so far, ``total_ms`` and last ``ms``."""
        with self._lock:
            return {
                "sequences": self._sequences,
                "bucket": self.bucket.batch,
                "switches": self._switches,
                "total_ms": self._total_ms,
                "ms": list(self._ms),
            }

    def close(self) -> None:
        """Follow no plan any more: layers have their own hot neurons, a store the cache of its budget.

        Raises:
            ArtifactError: the store has been closed.
        """
        budget = self._budget()
        if self._leave() and self._store is not None and budget is not None:
            self._announce(1)
            self._store.arrange(_as_loaded(self._store, budget), budget.cache)
            if self._store.config.preload:
                self._store.preload()

    def _leave(self) -> bool:
        """Let go of the model, but leave its store as it is; whether that was not done before."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
        self._hook.remove()
        for ref in self._layers:
            layer = ref()
            if layer is not None:
                layer.by_batch = ()
        for prompts, _ in self._prompts:
            layer = prompts()
            if layer is not None:
                layer.dense_from = None
        handle = self._handle()
        if handle is not None and handle.engine is self:
            handle.engine = None
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, _memo: Any) -> Engine:
        return self  # a copied model has the same store, and layers that know their hot neurons

    def __reduce__(self) -> Any:
        raise ConfigError(
            "pickling a model that follows a plan",
            expected="one that does not",
            found="an engine, which belongs to this process",
            fix="Close it first (engine.close()), or save the model with torch_pi2.save.",
        )

    # --- what is switched ---

    def _switch(self, bucket: Bucket) -> None:
        budget = self._budget()
        if self._store is None or budget is None:
            return
        cache_bytes = min(bucket.cache_bytes, budget.cache)
        self._store.arrange(self._resident(bucket, cache_bytes), cache_bytes)
        self._announce(bucket.batch)

    def _budget(self) -> Budget | None:
        """Whose cache is never less than what changes with the plan; None: the plan arranges no store."""
        return None if self._store is None else self._store.budget

    def _resident(self, bucket: Bucket, cache_bytes: int) -> list[int]:
        """By layer of the store, neurons that do not leave the cache: fewer than planned where it is smaller."""
        assert self._store is not None
        resident = [0] * len(self._store.layers())
        share = min(1.0, cache_bytes / bucket.cache_bytes) if bucket.cache_bytes else 0.0
        for place, planned in zip(self._places, bucket.resident, strict=True):
            resident[place] = int(planned * share)
        return resident

    def _announce(self, batch: int) -> None:
        """Look-ahead with the hot neurons of this number of sequences."""
        for ref in self._layers:
            layer = ref()
            if isinstance(layer, OffloadedFFN) and layer.announced:
                layer.announce(batch)

    def _say_what_has_no_room(self) -> None:
        budget = self._budget()
        assert budget is not None
        room, planned = budget.cache, self.plan.bucket(1).cache_bytes
        if room < 0.99 * planned:  # else it is how bytes are rounded to slots
            _log.warning(
                "the plan has a cache of %.1f MiB, the model's budget one of %.1f MiB: fewer neurons than planned stay "
                "in memory. Load it with the plan's budget, or plan for this one.",
                planned / 2**20,
                room / 2**20,
            )

    def _see(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The first layer is called: ``x [B, T, H]`` has B sequences, ``[n, H]`` of a small n probably a step of n."""
        if torch.compiler.is_compiling() or within_piece():  # of a prompt that others are decoded beside: was told
            return
        x = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        if x is None or x.dim() < 2:
            return
        sequences = x.shape[0]
        if sequences > 0 and (x.dim() > 2 or sequences <= self.plan.buckets[-1].batch):
            self.batch(sequences)


def _check(layers: Sequence[SparseFFN], plan: HardwarePlan, whole: Plan | None) -> None:
    """Raises ShapeError unless ``plan`` fits ``layers``. What each layer's hot neurons may be it checks itself."""
    columns = {f"hot of batch {b.batch}": b.hot for b in plan.buckets}
    columns |= {f"resident of batch {b.batch}": b.resident for b in plan.buckets}
    columns["dense_from"] = plan.prompt.dense_from
    problem = next((f"{name}: {len(n)}" for name, n in columns.items() if len(n) != len(layers)), "")
    expected, found = f"{len(layers)} layers", problem
    if not problem and whole is not None:
        for layer, planned in zip(layers, whole.layers, strict=True):
            if layer.site.key != planned.site.key:
                expected, found = layer.site.key, planned.site.key
                break
    for i, layer in enumerate(layers if not found else ()):
        least, most = layer.least_hot if _has_own_hot(layer) else 0, layer.site.intermediate
        for bucket in plan.buckets:
            if not least <= bucket.hot[i] <= most:
                expected, found = f"{least} to {most} hot neurons of {layer.site.key}", str(bucket.hot[i])
            elif not 0 <= bucket.resident[i] <= most:
                expected, found = f"0 to {most} resident neurons of {layer.site.key}", str(bucket.resident[i])
        if found:
            break
    if found:
        raise ShapeError(
            "plan for this model", expected=expected, found=found, fix="It is for another: make the plan again."
        )


def _unhook(model: nn.Module, engine: Engine) -> None:
    """``engine`` sees nothing of ``model`` any more; copies have its hook under a handle of their own."""
    for module in model.modules():  # what a stand-in gives way to has its hooks
        for key, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "__self__", None) is engine:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _is_expert(layer: SparseFFN) -> bool:
    return layer.site.experts is not None


def _has_own_hot(layer: SparseFFN) -> bool:
    """Whether the batch may decide how many neurons are hot."""
    return not _is_expert(layer) and layer.method not in ("dense", "threshold")


def _store_of(handle: Handle, plan: HardwarePlan) -> Store | None:
    """The store that the plan arranges, if any."""
    store = handle.store
    return None if plan.budget_bytes is None or store is None or store.config.engine == "mmap" else store


def _as_loaded(store: Store, budget: Budget) -> list[int]:
    """By layer of the store, neurons that do not leave a cache of this size without a plan."""
    share = store.hot_share * budget.cache / budget.neurons if budget.neurons else 0.0
    return [int(neurons * share) for neurons, *_ in store.layers()]


def _place(layer: SparseFFN) -> int:
    """Its number in the store."""
    assert isinstance(layer, OffloadedFFN)
    return layer.store_layer
