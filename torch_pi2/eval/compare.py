"""``compare``: methods of sparsity beside the dense model, on the same held-out text."""

import copy
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2 import api
from torch_pi2.base.dtypes import format_name
from torch_pi2.base.fields import argument, checked, to_json
from torch_pi2.base.modules import evaluating
from torch_pi2.checkpoint.gguf.importing import import_gguf
from torch_pi2.checkpoint.pack import pack
from torch_pi2.checkpoint.save_load import load, save
from torch_pi2.decode.budget import set_budget, stats
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ConfigError, Pi2Error
from torch_pi2.eval.loss import logits_of
from torch_pi2.eval.timing import time_decode
from torch_pi2.eval.work import work
from torch_pi2.fitting.fit import fit_methods
from torch_pi2.formats import formats_of, row_bytes
from torch_pi2.graph.find import find_sites
from torch_pi2.layers.inputs import InputSparseLinear
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.planner.hot_neurons import greedy_plan
from torch_pi2.predict.file import PREDICTORS_FILE, FittedPredictors, load_predictors, save_predictors
from torch_pi2.predict.method import InputMethod, SparseMethod
from torch_pi2.profiling.data import Batch, calibration_batches, digest
from torch_pi2.profiling.samples import Samples, collect_samples
from torch_pi2.rewrite.state import SparseState, get_state
from torch_pi2.types.config import Config, described
from torch_pi2.types.method import PREDICTED, Fitted
from torch_pi2.types.plan import Plan
from torch_pi2.types.site import FFNSite
from torch_pi2.types.stats import ActivationStats

Row = dict[str, Any]
#: Most memory for what the dense model says of all windows; if it takes more, it is asked again for each method.
_KEPT_BYTES = 4 << 30
_DECODED = 32
#: Calibration tokens that methods are fitted to, at most.
_FIT_TOKENS = 8192


@dataclass
class Beside:
    """Sums over tokens of a model beside the dense one. ``windows``: losses of both, in nats."""

    windows: list[tuple[float, float]] = field(default_factory=list)
    divergence: float = 0.0
    same: int = 0
    tokens: int = 0

    def add(self, dense_TV: torch.Tensor, logits_TV: torch.Tensor, next_T: torch.Tensor) -> None:
        """A window. ``dense_TV``: the logarithms of the dense model's probabilities, float32; ``next_T``: the ids."""
        found_TV = F.log_softmax(logits_TV.float(), -1)
        dense, nats = (-float(y_TV.gather(-1, next_T[:, None]).sum()) for y_TV in (dense_TV, found_TV))
        self.windows.append((dense, nats))
        self.divergence += float((dense_TV.exp() * (dense_TV - found_TV)).sum())
        self.same += int((dense_TV.argmax(-1) == found_TV.argmax(-1)).sum())
        self.tokens += len(next_T)

    def to_json(self) -> Row:
        """``loss``: relative increase, a ratio of sums over windows; ``loss_error``: half of its 95 % confidence
        interval, by Student's t (None of one window); ``kl``: nats a token; ``agreement``: share of tokens.
        """
        dense, n = sum(before for before, _ in self.windows), len(self.windows)
        loss = sum(nats for _, nats in self.windows) / dense - 1
        squares = sum((nats - (1 + loss) * before) ** 2 for before, nats in self.windows)
        t = 1.96 + 2.37 / (n - 1) + 2.82 / (n - 1) ** 2 if n > 1 else 0.0  # Cornish and Fisher's expansion
        error = t * math.sqrt(squares * n / (n - 1)) / dense if n > 1 else None
        shares = {"kl": self.divergence / self.tokens, "agreement": self.same / self.tokens}
        return {"tokens": self.tokens, "loss": loss, "loss_error": error, **shares}


class Comparison(list[Row]):
    """Rows of :func:`compare`; prints as a table."""

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for row in self for name in row))
        shown = [[f"{y:.4g}" if isinstance(y, float) else str(y) for y in map(row.get, names)] for row in self]
        widths = [max(map(len, column)) for column in zip(names, *shown, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in (names, *shown))


@checked
def compare(
    model: Any,
    methods: Any,
    text: Any,
    *,
    calibration: Any,
    tokenizer: Any = None,
    tokens: int = 8192,
    window: int = 256,
    rounds: int = 5,
    store: bool = False,
    each: Callable[[dict[str, Any]], Any] | None = None,
    file: Path | None = None,
    keep: Path | None = None,
    scored: bool = True,
    progress: bool = False,
    **fields: Annotated[Any, Config],
) -> Comparison:
    """Methods of sparsity beside the dense model, a row each; the first row is of ``method="dense"``.

    Each method becomes part of a copy of the model, which computes held-out text as it would decode it. Second halves
    of windows are scored: the first ones are prompts of methods with that scope.

    Args:
        model: a dense causal language model on the CPU, or a function without arguments that makes one.
        methods: names, or instances of :class:`SparseMethod` or :class:`InputMethod`; or a mapping from names in rows
            to these, to fields of :class:`Config` (``{"cats": {"method": "threshold", "sparsity": 0.4}}``), or to a
            function that optimises the copy it is given.
        text: as ``data`` in :func:`profile`; a mapping from names to texts gives a row for each method and text.
        tokens: that are read of each text. window: tokens that are computed together.
        rounds: of decoding 32 tokens after half a window, in turn with dense (:class:`Decoder`); 0: none.
        store: also decode over a store in a temporary folder, with a budget for half of the neurons.
        each: called with each row when it is there.
        file: the GGUF file of which ``model`` has the dequantised weights: models are made of its rows, for methods
            that are registered. An ``InputMethod`` and methods that change the model first, which need others, have
            weights in int8.
        scored: False: only decoding is timed, and rows have no text.
        keep: a folder for what registered methods are fitted to, by settings and calibration data: another call takes
            it from there. Changes of a method's code are not seen.
        fields: of :class:`Config`, for all methods (``weights="int4"``).

    Returns:
        Dicts: ``loss`` (relative increase) and ``loss_error`` (half of its 95 % confidence interval), ``kl`` (nats a
        token), ``agreement`` (share of likeliest tokens); ``neurons`` (share used); ``ffn_bytes`` (share of the FFNs'
        weight bytes that a token reads, and what the method reads besides; with an ``InputMethod`` of all linear layers
        that it replaced); ``fit_s`` (seconds to fit and to convert weights, after profiling); ``size_bytes`` (of the
        method); ``tokens_per_s``, ``dense_tokens_per_s``, ``speed`` (medians, and of their ratio, ``speed_low`` to
        ``speed_high``); ``flash_bytes`` (a token), ``hits`` (share); or ``refused``, the error that ended it.

    Raises:
        ConfigError, CalibrationError: arguments that no method could take.
    """
    argument(rounds, "compare(rounds=...)").whole(0)
    plain = model if isinstance(model, nn.Module) else model()
    given = methods if isinstance(methods, Mapping) else {_name(method): method for method in methods}
    configs: dict[str, Any] = {"dense": Config(**{**fields, "method": "dense"})}
    if "dense" in given:
        raise ConfigError(
            "compare(methods)", expected="other names than that of the first row", found="'dense'", fix="Rename it."
        )
    for name, y in given.items():
        configs[name] = y if callable(y) else Config(**{**fields, **(y if isinstance(y, dict) else {"method": y})})
    if file is not None and (changed := fields.keys() & {"weights", "activations", "quantization"}):
        what, fix = f"compare(file=..., {', '.join(sorted(changed))}=...)", "Leave it out."
        raise ConfigError(what, expected="the weights of the file", found="others", fix=fix)
    named = text if isinstance(text, Mapping) else {"": text}
    texts = {name: _windows(plain, y, tokenizer, tokens, window) for name, y in named.items()}
    prompt_1T = next(iter(texts.values()))[0][:, : window // 2]
    texts = texts if scored else {}
    decoders, rows = list[Decoder](), Comparison()
    maker = _Maker(model, plain, file, keep, (calibration, {"tokenizer": tokenizer, "progress": progress}))

    def says(ids_1T: torch.Tensor) -> torch.Tensor:
        with evaluating(plain):
            return F.log_softmax(_second_half(plain, ids_1T).float(), -1)

    dense = lru_cache(_KEPT_BYTES // (2 * says(prompt_1T).nbytes))(says)
    dense_bytes = width = 0.0
    for name, config in configs.items():
        made, found, row = None, dict[str, Row](), Row()
        del decoders[1:]  # no more than one copy beside the dense one
        try:
            made = maker.make(name, config, row)
            if name == "dense":
                dense_bytes, width = _ffn_bytes(made, find_sites(plain)), maker.width
            found = {of: _beside(plain, made, dense, windows, dense_bytes, width) for of, windows in texts.items()}
            if rounds:
                decoders.append(Decoder(made, max_tokens=prompt_1T.shape[1] + _DECODED + 1))
                row |= _speed(decoders, prompt_1T, rounds)
            row |= _over_store(made, prompt_1T) if store and sparse_layers(made) else {}
        except Pi2Error as error:
            if name == "dense":
                raise
            row["refused"] = str(error)
        for of in texts or [""]:
            rows.append({"method": name} | ({"text": of} if of else {}) | found.get(of, {}) | row)
            if each is not None:
                each(rows[-1])
    return rows


class _Maker:
    """Makes the models of a comparison; methods of neurons share statistics and samples. Arguments as there;
    ``given``: calibration data, and keywords of :func:`optimize`.
    """

    def __init__(self, model: Any, plain: nn.Module, file: Path | None, keep: Path | None, given: Any) -> None:
        self._model, self._plain, self._file, self._keep = model, plain, file, keep
        self._calibration, self._how = given
        self._stats: dict[str, ActivationStats] = {}
        self._samples: dict[str, Mapping[str, Samples]] = {}
        self._sites: list[FFNSite] = []

    @property
    def width(self) -> float:
        """Bytes of a weight of linear layers with sparse inputs, as dense."""
        return row_bytes("int8", 32) / 32 if self._file else next(self._plain.parameters()).element_size()

    def make(self, name: str, config: Any, row: Row) -> nn.Module:
        """The model of a row, which gets the seconds it took."""
        if self._file is not None and name == "dense":
            row["fit_s"] = 0.0
            return self._dense_of_file(self._file)
        if callable(config) or name == "dense" or any(map(_alone, config._custom.values())):
            started, made = time.perf_counter(), self._copy()
            if callable(config):
                config(made)
            else:
                config = replace(config, weights="int8") if self._file is not None else config
                api.optimize(made, self._calibration, config, **self._how)
            row["fit_s"] = time.perf_counter() - started
            return made
        kept = self._keep and self._keep / digest([str(described(config)), *self._data(config)])
        ready = kept is not None and (kept / PREDICTORS_FILE).is_file()
        stats = None if ready and self._file else self._measure(config, samples=not ready)
        started = time.perf_counter()
        if kept is not None and ready:
            parts = SparseState(Plan.load(kept), load_predictors(kept), stats)
        else:
            assert stats is not None
            parts = self._fit(config, stats, kept)
        if self._file is None:
            made = self._copy()
            known: Any = {"stats": parts.stats, "predictors": parts.predictors}
            api.optimize(made, self._calibration, config, **known, **self._how)
        row["fit_s"] = time.perf_counter() - started
        if self._file is not None:
            with tempfile.TemporaryDirectory() as folder:
                import_gguf(self._file, Path(folder) / "sparse", parts=parts)
                made = load(Path(folder) / "sparse")
        return made

    def _dense_of_file(self, file: Path) -> nn.Module:
        """Raises ConfigError: it is another model."""
        dense: Any = load(file)
        plain: Any = self._plain
        of_file, own = (y.get_input_embeddings()(torch.arange(16)).float() for y in (dense, plain))
        if of_file.shape != own.shape or float((of_file - own).norm()) > 0.02 * float(own.norm()):
            fix = "Pass torch_pi2.load_dense of the folder that it was imported to."
            raise ConfigError("compare(file=...)", expected="the file of the model", found=str(file), fix=fix)
        made: nn.Module = dense
        return made

    def _copy(self) -> nn.Module:
        made: nn.Module = copy.deepcopy(self._model) if self._plain is self._model else self._model()
        return made

    def _data(self, config: Config) -> list[Batch]:
        return calibration_batches(self._plain, self._calibration, self._how["tokenizer"], config)

    def _measure(self, config: Config, samples: bool) -> ActivationStats:
        """Statistics, and ``samples`` for methods of one's own."""
        key = str(to_json(config))
        if key not in self._stats:
            self._stats[key] = api.profile(self._plain, self._calibration, config=config, **self._how)
            self._sites = self._sites or find_sites(self._plain)
        if samples and config._custom and key not in self._samples:
            data = self._data(config)
            cuts = {site.key: self._stats[key][site.key].cut for site in self._sites}
            self._samples[key] = collect_samples(self._plain, data, self._sites, _FIT_TOKENS, thresholds=cuts)
        return self._stats[key]

    def _fit(self, config: Config, stats: ActivationStats, kept: Path | None) -> SparseState:
        """What ``config`` is fitted to, also written to the folder ``kept``."""
        fitted = FittedPredictors()
        if config._custom:
            fitted.update(fit_methods(self._plain, self._sites, config, self._samples[str(to_json(config))]))
        elif config.method in PREDICTED:
            fitted = api.fit(self._plain, self._calibration, stats=stats, config=config, **self._how)
        fitted.model_hash = stats.model_hash
        sites = [api._read_as(site, stats[site.key]) for site in self._sites]
        made = SparseState(greedy_plan(sites, stats, fitted, config, 2.0), fitted, stats)
        if kept is not None:
            kept.mkdir(parents=True, exist_ok=True)
            made.plan.save(kept)
            save_predictors(kept, fitted, stats.model_hash)
        return made


def _alone(method: Any) -> bool:
    """Whether the statistics of the model's neurons are not of use to ``method``."""
    return isinstance(method, InputMethod) or method.changes_model


def _name(method: Any) -> str:
    if not isinstance(method, Fitted):
        return str(method)
    said = ", ".join(f"{name}={value}" for name, value in method.settings().items())
    return f"{method.name or type(method).__name__}({said})"


def _windows(model: nn.Module, text: Any, tokenizer: Any, tokens: int, window: int) -> list[torch.Tensor]:
    """Ids ``[1, T]`` of one length, without padding."""
    config = Config(batch_size=1, seq_len=window, calibration_tokens=max(64, tokens))
    found = [batch.input_ids for batch in calibration_batches(model, text, tokenizer, config)]
    longest = max(0 if ids_1T is None else ids_1T.shape[1] for ids_1T in found)
    argument(longest, "tokens of the longest window", "Pass a text, or ids [N, T].").whole(4)
    return [ids_1T for ids_1T in found if ids_1T is not None and ids_1T.shape[1] == longest]


def _second_half(model: nn.Module, ids_1T: torch.Tensor) -> torch.Tensor:
    """``[N, V]`` logits of the tokens after the half that a method of scope ``prompt`` takes for one."""
    return logits_of(model, ids_1T[:, :-1])[0, ids_1T.shape[1] // 2 :]


def _row_bytes(layer: Any, kind: str) -> int:
    return row_bytes(kind, layer.site.hidden)


def _ffn_bytes(model: nn.Module, sites: list[FFNSite]) -> float:
    """Bytes of the dense FFNs, as neurons or as linear layers."""
    if layers := sparse_layers(model):
        return float(sum(y.neuron_rows.nbytes for y in layers))
    names = [ref.weight.removesuffix(".weight") for site in sites for ref in site.refs.values()]
    linears: Any = [model.get_submodule(name) for name in names]
    return float(sum(getattr(y, "rows", y.weight).nbytes for y in linears))


def _beside(
    plain: nn.Module,
    model: nn.Module,
    dense: Callable[[Any], Any],
    windows: list[torch.Tensor],
    dense_bytes: float,
    width: float,
) -> Row:
    """``dense_bytes``: of the dense model's FFNs. ``width``: bytes of a weight of layers with sparse inputs."""
    inputs = [module for module in model.modules() if isinstance(module, InputSparseLinear)]
    for module in inputs:
        module.used = module.seen = 0
    found = Beside()
    with evaluating(model), work() as done:
        for ids_1T in windows:
            found.add(dense(ids_1T), _second_half(model, ids_1T), ids_1T[0, ids_1T.shape[1] // 2 + 1 :])
    own: list[Any]
    sizes: list[float]
    if inputs:
        own, kinds = [module.custom for module in inputs], (nn.Linear, QuantLinear)
        names = {name for name, y in plain.named_modules() if isinstance(y, nn.Linear)}
        still = {name for name, y in model.named_modules() if name in names and isinstance(y, kinds)}
        beside = [y for name, y in model.named_modules() if name not in names and isinstance(y, kinds)]
        sizes = [width * plain.get_parameter(f"{name}.weight").numel() for name in names - still]
        used = [(1.0, y) for y in beside] + [(y.used / y.seen, y) for y in inputs]
        share = sum(part * width * y.in_features * y.out_features for part, y in used) / sum(sizes)
    elif layers := sparse_layers(model):
        plans, methods = get_state(model).plan.layers, get_state(model).predictors
        own = [m for y in plans if (m := methods.get(y.site.key)) and (y.method in PREDICTED or hasattr(m, "cut_I"))]
        first, down = (
            fmean(_row_bytes(y, formats_of(format_name(y.weights, y.neuron_rows.dtype))[i]) for y in layers)
            for i in range(2)
        )
        tokens = done.neurons / sum(y.site.intermediate for y in layers)
        sizes = [dense_bytes]
        share = ((done.gate_rows + done.up_rows) * first + done.down_rows * down) / tokens / dense_bytes
    else:
        own, sizes, share = [], [1], 1.0
    read = sum(y.read_bytes() if isinstance(y, SparseMethod) else _size(y) for y in own)
    more = {"neurons": done.neurons_used, "ffn_bytes": share + read / sum(sizes), "size_bytes": sum(map(_size, own))}
    return found.to_json() | more


def _size(method: Any) -> int:
    return sum(tensor.nbytes for tensor in method.tensors().values())


def _speed(decoders: list[Decoder], prompt_1T: torch.Tensor, rounds: int) -> Row:
    """Of the last of ``decoders``, beside the first."""
    dense, own = (timing.rounds for timing in time_decode([decoders[0], decoders[-1]], prompt_1T, rounds=rounds))
    ratios = [before / ms for before, ms in zip(dense, own, strict=True)]
    speed = {"speed": median(ratios), "speed_low": min(ratios), "speed_high": max(ratios)}
    return {"tokens_per_s": 1e3 / median(own), "dense_tokens_per_s": 1e3 / median(dense), **speed}


def _over_store(model: nn.Module, prompt_1T: torch.Tensor) -> Row:
    with tempfile.TemporaryDirectory() as name:
        save(model, Path(name) / "saved")
        pack(Path(name) / "saved", Path(name) / "store")
        over = load(Path(name) / "store", budget=1 << 60)
        whole = stats(over)["budget"]
        set_budget(over, whole.smallest - whole.gates // 2 + whole.in_slots(whole.neurons // 2))
        decoder = Decoder(over, max_tokens=prompt_1T.shape[1] + _DECODED + 1)
        next_11 = decoder.prompt(prompt_1T)
        stats(over, reset=True)
        for _ in range(_DECODED):
            next_11 = decoder.step(next_11)
        found = stats(over)
    return {"flash_bytes": found["bytes_read"] / _DECODED, "hits": found["hit_rate"]}
