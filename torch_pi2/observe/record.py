"""Activations of feed-forward layers on a text, as tensors or in files (docs/RESEARCH.md)."""

import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from torch_pi2.base.fields import Field, argument, checked
from torch_pi2.base.files import atomic_write, entries, json_text, read_json, writing
from torch_pi2.base.modules import evaluating, has_sparse_layers
from torch_pi2.base.progress import bar
from torch_pi2.base.tensorfile import Spec, TensorReader, TensorWriter
from torch_pi2.errors import ArtifactError, UnsupportedModelError, check_choice
from torch_pi2.graph.find import find_sites
from torch_pi2.graph.routed import Routed
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import SparseLayer, layers_of, seeing_inputs, sparse_layers
from torch_pi2.layers.prompt import single_steps
from torch_pi2.observe.watch import fired
from torch_pi2.profiling import recorder
from torch_pi2.profiling.data import Batch, calibration_batches
from torch_pi2.rewrite.gpu import refuse_split
from torch_pi2.rewrite.state import get_state, leaves_out
from torch_pi2.types.config import Config
from torch_pi2.types.plan import weights_hash
from torch_pi2.types.site import FFNSite

FORMAT, VERSION, INDEX = "torch_pi2.activations", 1, "activations.json"
#: Values of ``what``; those of dense models alone.
WHAT, _DENSE = ("input", "gate", "up", "product", "selected", "token"), ("gate", "up", "product")


@checked
def record(
    model: nn.Module,
    text: Any,
    what: Sequence[str] | None = None,
    *,
    layers: Sequence[int | str] | None = None,
    tokens: int | None = None,
    out: str | Path | None = None,
    tokenizer: Any = None,
    sites: Sequence[FFNSite] | None = None,
    batch_size: int = 8,
    seq_len: int = 128,
    part_bytes: int = 64 << 20,
    progress: bool = True,
) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """The activations of feed-forward layers (FFNs) while ``model`` reads ``text``: site key -> name -> ``[T, ...]``.

    Rows are tokens in the order in which the model read them, without padding: row t is of one token in all layers.
    Experts have the tokens that the router gave them; those of none are left out. The model is not changed. Names:

    * ``input [T, H]``: what the FFN is given. ``token`` int64 ``[T]``: ids.
    * ``gate``, ``up [T, I]``: what these matmuls made, biases included, before the activation.
    * ``product [T, I]``: the input of down.
    * ``selected`` bool ``[T, I]``, in the model's order of neurons. In a dense model, neurons whose ``act(gate)`` is
      not zero (without gates ``act(up)``; the product if the activation is on both). In an optimised model, those that
      its layers choose for each token as a step of one sequence: hot ones, and those that the predictor or the method
      chooses, or, without one, that fire.

    Numbers have the model's dtype; an expert's are computed from its inputs, its ``product`` in float32. Optimised
    models have ``input``, ``selected`` and ``token`` only: their kernels keep no other results.

    Args:
        text, tokenizer, batch_size, seq_len: as in :func:`~torch_pi2.profile`: a text, ids, batches.
        what: names, which every layer must have; None: all that a layer has.
        layers: keys, patterns of keys (``"model.layers.[0-3].*"``), or numbers (``FFNSite.layer``); None: all.
        tokens: how many to record; None: all of ``text``.
        out: a new or empty folder for safetensors files, written in parts of about ``part_bytes``, which (with one
            batch of a layer) bounds memory. The result is its :class:`~torch_pi2.Activations`.
        sites: FFNs of a dense model, made by hand; None: those of :func:`~torch_pi2.find_sites`.

    Raises:
        ConfigError: unknown names or layers; of an optimised model, ``sites``, other names than its own, neurons on a
            GPU, or ``selected`` where it depends on more than the token: what a cache holds, or the prompt.
            ArtifactError: ``out`` has files, or cannot be written. CalibrationError, NoFFNFoundError,
            UnsupportedModelError: as :func:`~torch_pi2.profile`.
    """
    for name in what or ():
        check_choice("what", name, WHAT, "Choose among them, or leave it out.")
    most = 1 << 40 if tokens is None else argument(tokens, "tokens").whole(1)
    argument(part_bytes, "part_bytes").whole(1)
    config = Config(batch_size=batch_size, seq_len=seq_len, calibration_tokens=max(64, most))
    data = calibration_batches(model, text, tokenizer, config, least=1)
    if sparse := has_sparse_layers(model):
        _check_optimised(model, what, sites)
        sites, model_hash = [layer.site for layer in sparse_layers(model)], get_state(model).plan.model_hash
    else:
        known = hasattr(model, "config") and data[0].input_ids is not None and not data[0].kwargs
        sites = sites or find_sites(model, *(() if known else data[0].arguments(model)), strict=False)
        model_hash = "" if out is None else weights_hash(model, list(sites))
    rows = _Rows(_chosen(sites, layers), what, most, None if out is None else Path(out), part_bytes)
    if sparse:
        with evaluating(model), single_steps(), seeing_inputs(model, rows.see):
            for batch in bar(rows.each(data), "record", progress, unit="batch"):
                batch.call(model, logits=False)
    else:
        how: Any = {"progress": progress, "label": "record", "streams": not {"gate", "up"}.isdisjoint(what or WHAT)}
        recorder.record(model, rows.each(data), rows.sites, rows.add, **how)
    return rows.finish(model_hash)


def _check_optimised(model: nn.Module, what: Sequence[str] | None, sites: Sequence[FFNSite] | None) -> None:
    refuse_split(model, "recording", whole=True)
    if sites or not set(what or ()).isdisjoint(_DENSE):
        given = argument(what, f"recording {type(model).__name__}", "Call torch_pi2.restore(model) first.")
        given.wrong(f"a dense model, for sites, {', '.join(_DENSE)}", "an optimised one")
    by_prompt = any(y.custom is not None and y.custom.scope == "prompt" for y in sparse_layers(model))
    if (by_prompt or leaves_out(model)) and "selected" in (what or WHAT):
        given = argument(
            what, "selected", "Record other names, or load the model without miss_margin and drop_experts."
        )
        given.wrong("a choice by the token", "one by the prompt" if by_prompt else "one by what is in the cache")


def _chosen(sites: Sequence[FFNSite], layers: Sequence[int | str] | None) -> list[FFNSite]:
    found = set[str]()
    for given in sites if layers is None else layers:
        meant = {y.key for y in sites if y is given or y.layer == given or fnmatchcase(y.key, str(given))}
        if not meant:
            last = f"{sites[-1].key} ({sites[-1].layer})"
            argument(given, "layers").wrong(f"keys, patterns of keys, or numbers, the last of which is {last}")
        found |= meant
    return [site for site in sites if site.key in found]


def _selected(layer: SparseFFN, x_TH: torch.Tensor) -> torch.Tensor:
    """bool ``[T, I]``, in the model's order: what ``layer`` chooses for each token as a step of one sequence."""
    n_hot, chosen_TI = layer.hot_for(1), torch.zeros((len(x_TH), layer.site.intermediate), dtype=torch.bool)
    if n_hot < layer.site.intermediate and layer.has_predictor:
        chosen_TI[:, layer.least_hot :] = layer.predict(x_TH)
    elif n_hot < layer.site.intermediate:
        chosen_TI = fired(layer, x_TH)
    chosen_TI[:, :n_hot] = True
    return chosen_TI[:, layer.inverse]


class _Rows:
    """Gathers what is recorded of ``sites``, for ``left`` tokens; if there is a ``folder``, in parts."""

    def __init__(
        self, sites: list[FFNSite], what: Sequence[str] | None, left: int, folder: Path | None, part_bytes: int
    ) -> None:
        self.sites, self._what, self._left, self._folder, self._part_bytes = sites, what, left, folder, part_bytes
        self._batch, self._nbytes, self._parts, self._recording = Batch(None, None), 0, 0, uuid.uuid4().hex
        self._rows, self._tokens = defaultdict[str, list[torch.Tensor]](list), Counter[str]()
        if folder is not None:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                if found := entries(folder):
                    expected, fix = "a new or empty folder", "Name another, or remove it."
                    raise ArtifactError(str(folder), expected=expected, found=found[0].name, fix=fix)

    def each(self, data: Sequence[Batch]) -> Iterator[Batch]:
        for self._batch in data:
            yield self._batch
            self._left -= self._batch.n_tokens

    def add(self, f: recorder.Firing) -> None:
        """The sink of a dense model."""
        if not f.borrowed:  # rows of tokens that the router gave to others
            values: dict[str, Any] = {"input": lambda: f.x_TH}
            values |= {role: lambda role=role: f.streams()[role] for role in f.site.refs if role != "down"}
            values |= {"product": f.h, "selected": lambda: f.score_TI > 0}
            self._put(f.site, torch.nonzero(f.real_T).flatten(), f.tokens, values)

    def see(self, home: SparseLayer, x_TH: torch.Tensor, routing: Sequence[torch.Tensor]) -> None:
        """The same of an optimised model: before a call of a layer, or of a module of experts."""
        real_T, _ = recorder.real_tokens(home.site.key, self._batch, len(x_TH))
        x_TH, routing = x_TH[real_T], [y[real_T] for y in routing]
        for layer in layers_of(home):
            tokens = Routed(x_TH, *routing).tokens_of(layer.site) if routing else torch.arange(len(x_TH))
            if layer.site in self.sites and len(tokens):
                x_NH = x_TH[tokens]
                values = {"input": lambda x=x_NH: x, "selected": partial(_selected, layer, x_NH)}
                self._put(layer.site, torch.arange(len(tokens)), tokens, values)

    def _put(self, site: FFNSite, rows: torch.Tensor, tokens: torch.Tensor | None, values: dict[str, Any]) -> None:
        """Rows of a call of ``site``, and the numbers of their tokens among the real ones of the batch (None: all)."""
        ids, mask = self._batch.input_ids, self._batch.mask_BT
        tokens = torch.arange(len(rows)) if tokens is None else tokens
        if mask is not None:
            rows, tokens = rows[tokens < self._left], tokens[tokens < self._left]
        known = {} if ids is None or mask is None else {"token": ids[mask][tokens]}
        for name in self._what or (*values, *known):
            if name not in known and name not in values:
                fix = "Leave it out, or choose other layers."
                argument(name, f"what of {site.key}", fix).wrong(" or ".join((*values, *known)))
            value = known[name] if name in known else values[name]()[rows]
            self._rows[f"{site.key}.{name}"].append(value)
            self._nbytes += value.nbytes
        self._tokens[site.key] += len(rows)
        if self._folder is not None and self._nbytes >= self._part_bytes:
            self._write(self._folder)

    def _write(self, folder: Path) -> None:
        made = {n: Spec((sum(map(len, rows)), *rows[0].shape[1:]), rows[0].dtype) for n, rows in self._rows.items()}
        about = {"format": FORMAT, "version": str(VERSION), "recording": f"{self._recording} {self._parts}"}
        with TensorWriter(_part(folder, self._parts), made, about) as file:
            for name, rows in self._rows.items():
                file.write(name, torch.cat(rows))
        self._parts, self._nbytes = self._parts + 1, 0
        self._rows.clear()

    def finish(self, model_hash: str) -> Mapping[str, Mapping[str, torch.Tensor]]:
        if silent := [site.key for site in self.sites if site.experts is None and not self._tokens[site.key]]:
            expected, fix = "layers that the model calls", "Record a model that is not compiled, and layers that run."
            raise UnsupportedModelError("recorded layers", expected=expected, found=f"no call of {silent[0]}", fix=fix)
        layers = {site.key: self._tokens[site.key] for site in self.sites if self._tokens[site.key]}
        if self._folder is None:
            by_key: dict[str, dict[str, torch.Tensor]] = {key: {} for key in layers}
            for name, rows in self._rows.items():
                key, _, what = name.rpartition(".")
                by_key[key][what] = torch.cat(rows)
            return by_key
        if self._rows:
            self._write(self._folder)
        index = {"recording": self._recording, "model_hash": model_hash, "parts": self._parts, "layers": layers}
        atomic_write(self._folder / INDEX, json_text(FORMAT, VERSION, index))
        return Activations(self._folder)


class Activations(Mapping[str, dict[str, torch.Tensor]]):
    """A folder of :func:`record`: site key -> name -> tensor. A layer is read when it is asked for; :meth:`parts` reads
    everything in bounded memory. ``model_hash``: of the model's FFN weights. Raises ArtifactError, as reading does: the
    recording did not end, or damage.
    """

    @checked
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / INDEX
        if self.folder.is_dir() and not path.exists():
            self._other(self.folder, f"no {INDEX}: the recording did not end")
        index = Field(read_json(path, FORMAT, VERSION), str(path), "Record it again.")
        self._recording, self.model_hash = index.at("recording").text(), index.at("model_hash").text()
        self._parts = index.at("parts").whole()
        self._tokens = {key: count.whole(1) for key, count in index.at("layers").each().items()}

    def __getitem__(self, key: str) -> dict[str, torch.Tensor]:
        count, found = self._tokens[key], defaultdict[str, list[torch.Tensor]](list)
        for part in self.parts([f"{key}.{name}" for name in WHAT]):
            for name, rows in part.items():
                found[name.rpartition(".")[2]].append(rows)
        for name, pieces in found.items():
            alike = len({(rows.shape[1:], rows.dtype) for rows in pieces}) == 1
            if not alike or not pieces[0].dim() or sum(map(len, pieces)) != count:
                self._other(self.folder, f"other {name} of {key}")
        return {name: torch.cat(pieces) for name, pieces in found.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def parts(self, names: Sequence[str] | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """The rows of each file as they were recorded: ``KEY.NAME`` -> rows; ``names``: of these only."""
        for number in range(self._parts):
            with TensorReader(_part(self.folder, number)) as part:
                if part.metadata.get("recording") != f"{self._recording} {number}":
                    self._other(part.path, "another part, or one of another")
                yield {name: part.read(name) for name in part.specs if names is None or name in names}

    def _other(self, path: Path, found: str) -> NoReturn:
        raise ArtifactError(str(path), expected="a whole recording", found=found, fix="Record it again.")


def _part(folder: Path, number: int) -> Path:
    return folder / f"activations-{number:05d}.safetensors"
