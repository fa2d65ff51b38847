"""How a layer's cold neurons are chosen, and the interface of predictors. A ``Method`` equals its text in files."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from torch_pi2.base.fields import Field, optional, shown
from torch_pi2.base.plugins import Plugins
from torch_pi2.errors import ConfigError, DtypeError, ShapeError

if TYPE_CHECKING:
    import torch


class Method(StrEnum):
    DENSE = "dense"  #: every neuron is computed
    EXACT = "exact"  #: the gate is computed, and zeros are skipped
    THRESHOLD = "threshold"  #: the gate is computed, and small values are skipped as well
    LOWRANK = "lowrank"  #: a low-rank predictor says which neurons to compute at all
    SIGNBIT = "signbit"  #: a predictor of the signs of weights and inputs does
    CUSTOM = "custom"  #: a ``torch_pi2.SparseMethod`` does, in Python

    @property
    def predicted(self) -> bool:
        """Whether its layers need a predictor."""
        return self in (Method.LOWRANK, Method.SIGNBIT, Method.CUSTOM)

    @property
    def lossy(self) -> bool:
        """Whether neurons may be left out that are not zero."""
        return self.predicted or self is Method.THRESHOLD


#: In place of a method, of an ``InputMethod``.
INPUTS = "inputs"
# As plain text, which torch.compile compares with.
METHODS = tuple(method.value for method in Method)
PREDICTED = tuple(method.value for method in Method if method.predicted)
LOSSY = tuple(method.value for method in Method if method.lossy)


@dataclass
class PredictorCard:
    """Measured on held-out calibration tokens, never on those used for fitting. ``recall``: share of firing (token,
    neuron) pairs predicted active; ``mass_recall``: weighted by each neuron's contribution to the output (``|h| *
    ||down column||``), or None. ``precision``: share of predicted pairs that fire. ``predicted_active``: mean share of
    neurons predicted active per token. ``bytes``: size in storage. ``cost_share``: multiply-adds of the predictor over
    those of the dense FFN. ``rank``: of a low-rank predictor, else 0.
    """

    recall: float
    precision: float
    predicted_active: float
    bytes: int
    cost_share: float
    rank: int = optional(0)
    mass_recall: float | None = optional(None)

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


class Predictor(Protocol):
    """Scores neurons of one FFN in *original* neuron order."""

    card: PredictorCard | None

    @property
    def threshold(self) -> float: ...

    def at_threshold(self, threshold: float) -> Self:
        """A copy that predicts neurons with scores of ``threshold`` or more."""

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor:
        """``[T, I]`` float32 logits; a neuron is predicted active iff its score >= ``threshold``."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors to store on disk; matrices are int8 or smaller."""


class Fitted:
    """A method in Python that is fitted to layers: copies, and attributes that are saved. ``name``, ``recordable``: see
    ``torch_pi2.SparseMethod``.
    """

    name: ClassVar[str] = ""
    recordable: ClassVar[bool] = False
    scope: ClassVar[str] = "token"
    card: PredictorCard | None = None

    # What the library reads of every predictor (torch_pi2.predict); tensors of each object differ.
    kind: ClassVar[str]
    tensor_names: ClassVar[tuple[str, ...]] = ()
    layer_tensors: ClassVar[tuple[str, ...]] = ()
    per_neuron: ClassVar[tuple[str, ...]] = ()
    rank: ClassVar[int] = 0

    def prepare(self, model: Any) -> None:
        """Change the dense ``model`` in place, and return None. :func:`torch_pi2.optimize` calls it first, once."""

    @property
    def changes_model(self) -> bool:
        """Whether it has a :meth:`prepare` of its own."""
        return type(self).prepare is not Fitted.prepare

    def allocate(self, layers: Mapping[str, Any]) -> None:
        """Called once with what :meth:`fit` of each layer will be given, by the layers' names, to divide a share among
        them: attributes that are set here are those of every copy. Each value is made when it is looked up; keep none.
        """

    def copy(self) -> Self:
        """A copy of its own, before it is fitted."""
        return copy.deepcopy(self)

    def checked(self, mask: torch.Tensor, name: str, *shape: int) -> torch.Tensor:
        """``mask``, the result of the method ``name``."""
        import torch  # here: the command line reads this file before it needs torch

        if torch.compiler.is_compiling():
            return mask
        what, fix = f"{type(self).__name__}.{name}", "See help(torch_pi2.SparseMethod)."
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            found = str(mask.dtype) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise DtypeError(what, expected="a bool tensor", found=found, fix=fix)
        if mask.shape != shape:
            wanted = f"{shape}: {'tokens and ' * (len(shape) > 1)}neurons in the model's order (or channels)"
            raise ShapeError(what, expected=wanted, found=str(tuple(mask.shape)), fix=fix)
        return mask

    @classmethod
    def taken(cls, attributes: Mapping[str, Any]) -> str | None:
        """The first of ``attributes`` with the name of one of the class's methods, which it would hide; or None."""
        return next((name for name in attributes if callable(getattr(cls, name, None))), None)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The attributes that are tensors, by name."""
        return {name: value for name, value in self._saved().items() if _is_tensor(value)}

    def settings(self) -> dict[str, Any]:
        """The other attributes. Raises ConfigError: JSON cannot hold one."""
        found = {name: value for name, value in self._saved().items() if not _is_tensor(value)}
        for name, value in found.items():
            if not _is_plain(value):
                what = f"{name} of method {type(self).__name__}"
                fix = "Keep it under a name with _ in front, which is not saved."
                raise ConfigError(what, expected="what JSON can hold, or a tensor", found=shown(value), fix=fix)
        return found

    def check_registered(self) -> None:
        """Raises ConfigError: files cannot name the class, so that nothing could open them."""
        if plugins.find(self.name, files=False) is not type(self):
            fix = "Give the class a name, and decorate it with torch_pi2.register_method."
            what = f"saving method {type(self).__name__}"
            raise ConfigError(what, expected="a registered class", found="another", fix=fix)

    def fields(self) -> dict[str, Any]:
        """JSON fields in a file. Raises ConfigError: as :meth:`check_registered` and :meth:`settings`."""
        self.check_registered()
        return {"name": self.name, "settings": self.settings(), "tensors": sorted(self.tensors())}

    @classmethod
    def read(cls, tensors: Mapping[str, Any], entry: Field, threshold: float, card: PredictorCard | None) -> Self:
        """A method from tensors and fields of a file; its ``__init__`` is not called. Raises ConfigError: not known."""
        kind, settings = find_method(entry.at("name").text(), files=False), entry.at("settings")
        if not issubclass(kind, cls):
            entry.at("name").wrong(f"the name of a {cls.__name__}")
        if missing := [name for one in entry.at("tensors").items() if (name := one.text()) not in tensors]:
            entry.at("tensors").wrong("tensors of the file", missing[0])
        if taken := kind.taken({**settings.names(allowed=None), **tensors}):
            settings.wrong("names that the class does not use", taken)
        settings.at("scope", kind.scope).text(("token", "prompt"))
        made: Self = object.__new__(kind)
        vars(made).update(settings.value, **tensors)
        made.card = card
        return made

    def _saved(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name[0] != "_" and name != "card"}


def prepare(method: Fitted, model: Any) -> None:
    """``method.prepare(model)``. Raises ConfigError: it returned something, which nothing would use."""
    found: Any = method.prepare(model)  # type: ignore[func-returns-value]
    if found is not None:
        what, fix = f"{type(method).__name__}.prepare", "Exchange its modules: model.set_submodule(name, module)."
        expected = "None: it changes the model that it is given"
        raise ConfigError(what, expected=expected, found=f"a {type(found).__name__}", fix=fix)


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(held) for key, held in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


plugins = Plugins(Fitted, "torch_pi2.methods", lambda: ("auto", *Method), "SparseMethod or InputMethod")


def find_method(name: str, files: bool = True) -> type[Any]:
    """The class of this name (:func:`torch_pi2.register_method`), or with ``files`` ``FILE.py:CLASS``. Raises
    ConfigError: none.
    """
    found = plugins.find(name, files)
    if found is None:
        built_in = (method.value for method in Method if method is not Method.CUSTOM)
        expected = ", ".join(("auto", *built_in, *plugins.names()))
        fix = f"Choose one of these{', FILE.py:CLASS' * files}, or import the module that registers it"
        fix += " (torch_pi2.register_method)."
        raise ConfigError("method", expected=expected, found=repr(name), fix=fix)
    return found
