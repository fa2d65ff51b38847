"""``model.torch_pi2``: what the library keeps on a model, all of it in one attribute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from torch_pi2.distributed.group import Group
from torch_pi2.errors import ConfigError
from torch_pi2.layers.offloaded import Store
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.rewrite.linears import LayerError
from torch_pi2.store.parts import Parts
from torch_pi2.types.method import Method
from torch_pi2.types.offload import Budget
from torch_pi2.types.plan import Plan, lossy_methods
from torch_pi2.types.stats import ActivationStats

_ATTRIBUTE = "torch_pi2"


@dataclass(kw_only=True, eq=False)
class ModelState:
    """The state of a model that is nobody's parameter; a copied model has a copy, over the same store.

    Attributes:
        store: that the model reads its neurons from; None: it is in memory. budget: of the store.
        group: of the processes that each have a shard of it; None: this one has all.
        controller: what keeps the model with its plan (:class:`torch_pi2.decode.plan_controller.PlanController`).
    """

    store: Store | None = None
    controller: Any = None
    group: Group | None = None

    @property
    def budget(self) -> Budget | None:
        return None if self.store is None else self.store.budget

    @staticmethod
    def of(model: nn.Module) -> ModelState | None:
        """That of ``model``, if it has one; of ``torch.compile(model)``, too."""
        found = getattr(model, _ATTRIBUTE, None)
        return found if isinstance(found, ModelState) else None

    def attach(self, model: nn.Module) -> None:
        """Make it the state of ``model``: a plain attribute, which state_dict and parameters() do not see."""
        object.__setattr__(model, _ATTRIBUTE, self)

    @staticmethod
    def detach(model: nn.Module) -> ModelState | None:
        """Take it from ``model``, and give it back, if it had one."""
        found = ModelState.of(model)
        return None if found is None else model.__dict__.pop(_ATTRIBUTE, None)


@dataclass(eq=False)
class SparseState(ModelState):
    """What an optimised model was made with.

    ``quantization``: name of a linear layer or key of an FFN -> what quantising did to it; empty for float weights.
    ``weights``: "float", or the kind of the quantised ones.
    """

    plan: Plan
    predictors: FittedPredictors
    stats: ActivationStats | None
    quantization: dict[str, LayerError] = field(default_factory=dict)
    weights: str = "float"

    @property
    def left(self) -> dict[str, str]:
        """Layers that look feed-forward and stay dense: name -> reason."""
        chosen = {y.site.key: "choosing neurons would not pay" for y in self.plan.layers if y.method == Method.DENSE}
        return chosen | dict(self.plan.made_by.get("left", {}))

    @property
    def lossy(self) -> bool:
        """Whether other numbers come out than those of the dense model with the weights it was made from."""
        return self.weights != "float" or bool(lossy_methods(self.plan)) or _leaves_out(self.store)

    @property
    def loss_change(self) -> float | None:
        """How much larger the loss was than that of the dense model on held-out calibration data, 0.01: 1 %.

        0 if nothing is lossy; None: not measured, as of thresholds, of quantised weights and of what is left out while
        it is not in memory (``OffloadConfig.lossy``).
        """
        if not self.lossy:
            return 0.0
        return None if _leaves_out(self.store) or self.weights != "float" else self.plan.made_by.get("loss_change")


if TYPE_CHECKING:

    class LoadedModel(nn.Module):
        """What :func:`torch_pi2.load` gives, for type checkers: nn.Module alone says of each attribute "a tensor"."""

        torch_pi2: SparseState
        config: Any

        def generate(self, *args: Any, **kwargs: Any) -> Any: ...


def get_state(model: nn.Module) -> SparseState:
    """Plan, predictors and statistics of an optimised model. Raises ConfigError if it is not one."""
    parts = ModelState.of(model)
    if not isinstance(parts, SparseState):
        raise ConfigError(
            type(model).__name__,
            expected="a model that torch_pi2.optimize has rewritten",
            found="a dense model",
            fix="Call torch_pi2.optimize(model, ...) first.",
        )
    return parts


def store_of(model: nn.Module) -> Store | None:
    """That over which a model was loaded; None: it is in memory."""
    handle = ModelState.of(model)
    return None if handle is None else handle.store


def _leaves_out(store: Store | None) -> bool:
    return store is not None and store.config.lossy


def leaves_out(model: nn.Module) -> bool:
    """Whether decoding leaves out something that is not in memory (``OffloadConfig.lossy``)."""
    return _leaves_out(store_of(model))


def store_and_budget(model: nn.Module) -> tuple[Store, Budget]:
    """Of a model that was loaded with a budget. Raises ConfigError: it has no store."""
    handle = ModelState.of(model)
    if handle is None or handle.store is None or handle.budget is None:
        raise ConfigError(
            type(model).__name__,
            expected="a model over a neuron store",
            found="one in memory",
            fix="Load a packed folder with torch_pi2.load(folder, budget=...).",
        )
    return handle.store, handle.budget


def stored_stats(model: nn.Module) -> ActivationStats | None:
    """Those of the folder of a model over a store, which it was loaded without: no budget has room for them."""
    store = store_of(model)
    if store is None:
        return None
    with Parts(store.path.parent) as parts:
        return parts.stats(get_state(model).plan.model_hash)
