"""What ``bench plan`` runs: a model in which no neuron need be hot, its store, and the same with neurons shuffled.

Plans differ in how many of the first neurons, the most frequent ones, are hot. One that takes random neurons needs
others to be first: in memory the layers' tensors are then taken in another order, and over a store it is another store.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.subject import WORK, bytes_of, check_one, synthetic_store, with_room_for_all
from benchmarks.timed_steps import PROMPT, Steps
from torch_pi2.errors import ConfigError
from torch_pi2.eval.token_source import TEXT_BYTES, Tokens, tokens_of
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.observe.accesses import Accesses, record_accesses
from torch_pi2.observe.watched import watched_stats
from torch_pi2.ops.memory import new_tensor
from torch_pi2.profiling.text import stdlib_text
from torch_pi2.rewrite.skeleton import model_config
from torch_pi2.store.folder import PI2_FOLDER
from torch_pi2.store.parts import Parts
from torch_pi2.store.storefile import STORE_FILE, open_weights, weights_path
from torch_pi2.types.budget import Budget
from torch_pi2.types.config import Config
from torch_pi2.types.method import Method
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import ActivationStats

#: Methods with which a float checkpoint is optimised.
MADE = ("exact", "lowrank")
#: Steps that statistics are of, at each batch size, and that a recording has for each sequence of the largest batch.
STATISTICS, ACCESSES = 64, 64
#: Tensors of a layer with a row for each neuron (of the predictor: if none is hot).
_BY_NEURON = (
    *("neuron_rows", "bias_gate", "bias_up", "order"),
    *(f"predictor_{name}" for name in ("b", "b_scale", "bias", "signs")),
)


def every_cold(plan: Plan, stats: ActivationStats | None = None) -> Plan:
    """``plan`` with no hot neuron, but in layers that are dense.

    With ``stats`` of how often the hot ones fire, ``expected_active`` is right for all; a predictor is taken to find
    them as often.
    """
    layers = []
    for layer in plan.layers:
        active = layer.expected_active
        if stats is not None and layer.n_hot:
            often_I = stats.frequency(layer.site.key)[layer.order.long()]
            active = (active * layer.n_cold + float(often_I[: layer.n_hot].sum())) / layer.site.intermediate
        cold = replace(layer, n_hot=0, expected_active=min(1.0, active))
        layers.append(layer if layer.method == Method.DENSE else cold)
    return Plan(layers, plan.model_hash, plan.made_by)


def find_folder(
    folder: str | Path | None, shape: str | None, method: str | None, *, trust_remote_code: bool = False, seed: int = 0
) -> Path:
    """The optimised model to run, made in ``WORK`` if need be.

    Args:
        folder: with a ``pi2/`` folder; or a float checkpoint, which is optimised once with ``method`` (of ``MADE``).
        shape: without ``folder``, of a synthetic model (default: llama-1b).

    Raises:
        ConfigError: these contradict each other. Pi2Error: what making it raises.
    """
    check_one(folder, shape)
    if folder is None:
        if method is not None:
            raise ConfigError(
                f"--method {method}", expected="a --folder that is to be optimised", found="none", fix="Leave it out."
            )
        return synthetic_store(shape or "llama-1b", seed)
    folder = Path(folder)
    if (folder / PI2_FOLDER).is_dir():
        if method is not None:
            raise ConfigError(
                f"--method {method}",
                expected="a float checkpoint to be optimised",
                found=f"{folder}, which is optimised",
                fix="Leave it out.",
            )
        return folder
    method = method or "lowrank"
    if method not in MADE:
        raise ConfigError("--method", expected=" or ".join(MADE), found=method, fix="Choose one of them.")
    made = WORK / f"{name_of(folder)}-{method}"
    if not (made / PI2_FOLDER).is_dir():
        _optimised(folder, made, method, trust_remote_code)
    return made


def name_of(folder: Path) -> str:
    """For what is made of a folder: its name and a stamp, which another one of that name, or a changed one, has not."""
    files = sorted(path for path in folder.resolve().rglob("*") if path.is_file())
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{folder.resolve().name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"


def _optimised(folder: Path, made: Path, method: str, trust_remote_code: bool) -> None:
    """Optimise a checkpoint with no neuron hot, so that its predictors know all of them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import torch_pi2

    how: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **how).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, **how)
    text = stdlib_text("train", max_bytes=TEXT_BYTES)
    config = Config(method=method, hot_frequency=1.01)
    optimised = torch_pi2.optimize(model, calibration=text, tokenizer=tokenizer, config=config)
    torch_pi2.save(optimised, made, tokenizer=tokenizer)


class Source:
    """An optimised folder, loaded in the forms that are compared.

    Args:
        activations: None: ``int8`` where the weights are quantised.
        seed: of the order of shuffled neurons.

    Attributes:
        folder: as given. own: its plan. plan: the same with no hot neuron. weights, activations: as results say.

    Raises:
        ConfigError: a mixture of experts, of which no neuron can be hot.
    """

    def __init__(
        self, folder: Path, *, activations: str | None = None, trust_remote_code: bool = False, seed: int = 0
    ) -> None:
        self.folder, self.seed, self._trust = folder, seed, trust_remote_code
        with Parts(folder / PI2_FOLDER) as parts:
            self.own = parts.plan()
        if any(layer.site.experts is not None for layer in self.own.layers):
            raise ConfigError(
                f"bench plan of {folder}",
                expected="feed-forward layers with hot and cold neurons",
                found="experts, of which no neuron is hot",
                fix="Use bench offload for mixtures of experts.",
            )
        self.plan = every_cold(self.own)
        self.weights = "float"
        if weights_path(folder / PI2_FOLDER) is not None:
            with open_weights(folder / PI2_FOLDER) as reader:
                self.weights = reader.weights
        self.activations = activations or ("float" if self.weights == "float" else "int8")
        self._stem = folder.resolve().name.removesuffix("-store")
        whole = hashlib.sha256(f"{self.own.model_hash} {self.own.orders_hash}".encode()).hexdigest()
        self._mark = f"{self._stem}-{whole[:8]}"

    def whole(self) -> Any:
        """The model with all neurons in memory."""
        import torch_pi2

        return torch_pi2.load(self.folder, activations=self.activations, plan=self.plan, trust_remote_code=self._trust)

    def over_store(self, budget: int, context: int, offload: OffloadConfig, *, shuffled: bool = False) -> Any:
        """The model with ``budget`` bytes, for keys and values of ``context`` tokens of all sequences together."""
        import torch_pi2

        folder = self.shuffled_store() if shuffled else self.store()
        with Parts(folder / PI2_FOLDER) as parts:
            plan = every_cold(parts.plan())
        return torch_pi2.load(
            folder,
            activations=self.activations,
            plan=plan,
            budget=budget,
            offload=offload,
            context=context,
            trust_remote_code=self._trust,
        )

    def store(self) -> Path:
        """The folder itself if it is one with a store, else one that is packed once."""
        import torch_pi2

        if (self.folder / PI2_FOLDER / STORE_FILE).is_file():
            return self.folder
        made = WORK / f"{self._mark}-store"
        if not (made / PI2_FOLDER / STORE_FILE).is_file():
            torch_pi2.pack(self.folder, made, trust_remote_code=self._trust)
        return made

    def shuffled_store(self) -> Path:
        """A store of the same model with the neurons of each layer in random order."""
        import torch_pi2

        made = WORK / f"{self._mark}-shuffled-{self.seed}-store"
        if not (made / PI2_FOLDER / STORE_FILE).is_file():
            loose = made.with_name(f"{self._mark}-shuffled")
            model = self.whole()
            Shuffled(model, self.seed).put(True)
            layers = sparse_layers(model)
            planned = zip(self.plan.layers, layers, strict=True)
            plan = [replace(layer, order=ffn.order.to(torch.int32)) for layer, ffn in planned]
            made_by = self.plan.made_by | {"shuffled": self.seed}
            model.torch_pi2.plan = Plan(plan, self.plan.model_hash, made_by)
            torch_pi2.save(model, loose)
            del model, layers, planned
            try:
                self._copy_code(loose)
                torch_pi2.pack(loose, made, trust_remote_code=self._trust)
            finally:
                shutil.rmtree(loose, ignore_errors=True)
        return made

    def _copy_code(self, folder: Path) -> None:
        """Modelling code that the checkpoint brings and ``save`` has not written."""
        for path in self.folder.glob("*.py"):
            if not (folder / path.name).exists():
                shutil.copy(path, folder / path.name)

    def budget(self, share: float, context: int, config: OffloadConfig) -> Budget:
        """Bytes for all that must stay in memory and ``share`` of the neurons."""
        with Parts(self.store() / PI2_FOLDER) as parts:
            predictors = parts.predictors(self.plan.model_hash)
        hf = model_config(self.store(), trust_remote_code=self._trust)
        whole = with_room_for_all(self.store(), self.plan, predictors, hf, config, context)
        return whole.with_total(bytes_of(whole, share), self.store())

    def tokens(self, model: Any, split: str, sequences: int, seed: int) -> Tokens:
        """Of ``split`` ``train`` for what plans are made of, ``heldout`` for what is timed: never the same."""
        return tokens_of(model, self.folder, split, sequences, seed, self._trust)

    def statistics(self, model: Any, batches: Sequence[int]) -> tuple[ActivationStats, str]:
        """How often neurons fire at each batch size, measured once and kept in ``WORK``; and what they are of."""
        path = WORK / f"{self._mark}-{self.activations}-{self.seed}.stats.safetensors"
        about = f"{STATISTICS} steps at batch {', '.join(map(str, batches))}"
        if path.is_file():
            stats = ActivationStats.load(path, model_hash=self.own.model_hash)
            if stats.made_by.get("bench plan") == about:
                return stats, about
        ids_BT = self.tokens(model, "train", max(batches), self.seed + 1).draw(1 + STATISTICS)
        stats = watched_stats(model, batches, tokens=STATISTICS, ids=ids_BT)
        stats.made_by["bench plan"] = about
        stats.save(path)
        return stats, about

    def accesses(self, model: Any, batch: int) -> Accesses:
        """What one sequence wants of the store of ``model``, recorded once and kept in ``WORK``.

        Long enough that its parts, side by side, are ``batch`` sequences
        (:class:`torch_pi2.planner.misses.ReplayMisses`).
        """
        tokens = ACCESSES * max(8, batch)
        path = WORK / f"{self._mark}-{self.activations}-{self.seed}-{tokens}.accesses"
        if not path.is_file():
            ids_1T = self.tokens(model, "train", 1, self.seed + 2).draw(PROMPT + tokens)
            steps = Steps(model, 1, ids_1T[:, :PROMPT], tokens)
            with record_accesses(model, path):
                steps.run(ids_1T[:, PROMPT:])
        return Accesses.load(path)


class Shuffled:
    """The tensors of a model's layers in another order of neurons, beside their own.

    Results change in their last bits: sums are taken in another order. It takes as much memory as the neurons do.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._layers = sparse_layers(model)
        self._own = [{name: layer._buffers.get(name) for name in (*_BY_NEURON, "inverse")} for layer in self._layers]
        self._other = [self._taken(own, seed + i) for i, own in enumerate(self._own)]
        self.on = False

    @staticmethod
    def _taken(own: Mapping[str, torch.Tensor | None], seed: int) -> dict[str, torch.Tensor | None]:
        order = own["order"]
        assert order is not None
        neurons = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))
        taken: dict[str, torch.Tensor | None] = {}
        for name in _BY_NEURON:
            tensor = own[name]
            if tensor is not None and len(tensor) == len(neurons):
                tensor = torch.index_select(tensor, 0, neurons, out=new_tensor(tensor.shape, tensor.dtype))
            taken[name] = tensor
        shuffled = taken["order"]
        assert shuffled is not None
        return taken | {"inverse": torch.argsort(shuffled)}

    def put(self, on: bool) -> None:
        """Let layers have the shuffled tensors, or their own."""
        for layer, tensors in zip(self._layers, self._other if on else self._own, strict=True):
            layer._buffers.update({name: tensor for name, tensor in tensors.items() if name in layer._buffers})
        self.on = on
