"""``model.torch_pi2``: the library's state of a model, in one attribute."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from torch_pi2.base.fields import argument
from torch_pi2.distributed.group import Group
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import SparseLayer, homes, is_changed
from torch_pi2.layers.offloaded import Store
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.store.parts import Parts
from torch_pi2.types.method import INPUTS, LOSSY, Method
from torch_pi2.types.offload import Budget
from torch_pi2.types.plan import Plan, lossy_methods
from torch_pi2.types.stats import ActivationStats

_ATTRIBUTE = "torch_pi2"


@dataclass(kw_only=True, eq=False)
class ModelState:
    """State of a model besides parameters; a copied model has a copy, over the same ``store`` (None: it is in memory).
    ``group``: the processes that each have a shard, or None. ``controller``: applies the followed plan.
    """

    store: Store | None = None
    controller: Any = None
    group: Group | None = None

    @property
    def budget(self) -> Budget | None:
        return None if self.store is None else self.store.budget

    @property
    def leaves_out(self) -> bool:
        """Whether decoding may skip neurons that are not in memory (``OffloadConfig.lossy``)."""
        return self.store is not None and self.store.config.lossy

    @staticmethod
    def of(model: nn.Module) -> "ModelState | None":
        """The state of ``model`` (or of ``torch.compile(model)``), or None."""
        found = getattr(model, _ATTRIBUTE, None)
        return found if isinstance(found, ModelState) else None

    def attach(self, model: nn.Module) -> None:
        """Attach to ``model`` as a plain attribute, invisible to state_dict and parameters()."""
        object.__setattr__(model, _ATTRIBUTE, self)

    @staticmethod
    def detach(model: nn.Module) -> "ModelState | None":
        found = ModelState.of(model)
        if isinstance(found, SparseState):
            found._homes = []  # they hold the weights
        return None if found is None else model.__dict__.pop(_ATTRIBUTE, None)


@dataclass(eq=False)
class SparseState(ModelState):
    """State of an optimised model. ``weights``: format, ``float`` if not quantised; ``quantization``: linear layer or
    FFN -> its error.
    """

    plan: Plan
    predictors: FittedPredictors
    stats: ActivationStats | None
    quantization: dict[str, float] = field(default_factory=dict)
    weights: str = "float"
    _homes: list[SparseLayer] = field(default_factory=list)

    def attach(self, model: nn.Module) -> None:
        super().attach(model)
        self._homes = homes(model)

    @property
    def changed(self) -> list[str]:
        """Layers that were changed after the rewrite: methods of theirs or of their class, or thresholds."""
        gated = {y.site.key for y in self.plan.layers if y.method in LOSSY}
        cut = {y.site.key for y in self._homes if isinstance(y, SparseFFN) and y.threshold > 0} - gated
        return [home.site.key for home in self._homes if is_changed(home) or home.site.key in cut]

    @property
    def left(self) -> dict[str, str]:
        """Feed-forward layers that stay dense: name -> reason."""
        chosen = {y.site.key: "choosing neurons would not pay" for y in self.plan.layers if y.method == Method.DENSE}
        return chosen | dict(self.plan.made_by.get("left", {}))

    @property
    def lossy(self) -> bool:
        """Whether results differ from those of the original dense model."""
        methods = lossy_methods(self.plan) or self.inputs
        return self.weights != "float" or bool(methods) or self.leaves_out or bool(self.changed)

    @property
    def inputs(self) -> list[str]:
        """Linear layers that use the input channels that an ``InputMethod`` chooses."""
        return [name for name, predictor in self.predictors.items() if predictor.kind == INPUTS]

    @property
    def loss_change(self) -> float | None:
        """Relative increase of the loss on held-out calibration data against the dense model; 0.01 is 1 %.

        0 if nothing is lossy; None if not measured: thresholds without ``max_loss``, quantised weights,
        ``OffloadConfig.lossy``, and layers that were :attr:`changed`.
        """
        if not self.lossy:
            return 0.0
        other = self.leaves_out or self.weights != "float" or self.changed
        return None if other else self.plan.made_by.get("loss_change")


if TYPE_CHECKING:

    class LoadedModel(nn.Module):
        """Result of :func:`torch_pi2.load` for type checkers: nn.Module declares every attribute a tensor."""

        torch_pi2: SparseState
        config: Any

        def generate(self, *args: Any, **kwargs: Any) -> Any: ...


def get_state(model: nn.Module) -> SparseState:
    """The state of an optimised model. Raises ConfigError if it is dense."""
    parts = ModelState.of(model)
    if not isinstance(parts, SparseState):
        what = argument(model, type(model).__name__, "Call torch_pi2.optimize(model, ...) first.")
        what.wrong("a model that torch_pi2.optimize has rewritten", "a dense model")
    return parts


def store_of(model: nn.Module) -> Store | None:
    """The store that a model was loaded over, or None."""
    handle = ModelState.of(model)
    return None if handle is None else handle.store


def leaves_out(model: nn.Module) -> bool:
    """See :attr:`ModelState.leaves_out`."""
    handle = ModelState.of(model)
    return handle is not None and handle.leaves_out


def store_and_budget(model: nn.Module) -> tuple[Store, Budget]:
    """Store and budget of a model loaded with a budget. Raises ConfigError if it has none."""
    handle = ModelState.of(model)
    if handle is None or handle.store is None or handle.budget is None:
        fix = "Load a packed folder with torch_pi2.load(folder, budget=...)."
        argument(model, type(model).__name__, fix).wrong("a model over a neuron store", "one in memory")
    return handle.store, handle.budget


def stored_stats(model: nn.Module) -> ActivationStats | None:
    """Statistics in the folder of a model over a store, which loading leaves there to save memory."""
    store = store_of(model)
    if store is None:
        return None
    with Parts(store.path.parent) as parts:
        return parts.stats(get_state(model).plan.model_hash)
