"""``SparseMethod``: how a layer chooses its neurons, as one Python class (docs/RESEARCH.md)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch

from torch_pi2.base.fields import Field, checked, shown
from torch_pi2.errors import ConfigError, DtypeError, ShapeError
from torch_pi2.predict.cold import Cold
from torch_pi2.types.method import Method, PredictorCard, find_method, registered

if TYPE_CHECKING:
    from torch_pi2.fitting.custom import LayerSamples
    from torch_pi2.types.site import FFNSite

_FIX = "Give it only numbers, texts, lists and mappings of them, and tensors; names with _ in front are not saved."


class SparseMethod:
    """A method of sparsity: which neurons of a feed-forward layer a token computes. Write a subclass::

        class Norms(torch_pi2.SparseMethod):
            name = "norms"

            def __init__(self, share=0.5):
                self.share = share

            def fit(self, layer):
                self.norms_I = layer.weights.up.norm(dim=1)

            def select(self, x_TH):
                kept = self.norms_I.topk(int(self.share * len(self.norms_I))).indices
                mask_I = torch.zeros(len(self.norms_I), dtype=torch.bool)
                mask_I[kept] = True
                return mask_I.expand(len(x_TH), -1)

    and pass one to :func:`torch_pi2.optimize` (``method=Norms(0.3)``), :func:`torch_pi2.fit` or
    :func:`torch_pi2.trying`. Each layer gets a copy, which is fitted to the layer's calibration tokens. Attributes that
    are tensors, and others that JSON can hold, are saved with the model; those whose names begin with ``_`` are not.

    Attributes:
        name: of the method, in files and on the command line (:func:`register_method`).
        recordable: whether :meth:`select` consists of PyTorch's operators on ``x_TH`` and the method's own tensors, so
            that a recorded decoding step may repeat them without calling it. Tensors may be written in place; no
            other attribute may change. False: it is called in every step.
        scope: ``token``: :meth:`select` is asked about every token. ``prompt``: a sequence's prompt is computed whole
            and chooses once (:meth:`prompt_scores`, :meth:`choose`), and the tokens after it compute what it has
            chosen (in ``Decoder.add``, which ``serve`` uses, from the prompt's last token on). In memory, for layers
            without experts. ``eval`` takes the first half of its windows for prompts.
        cut_I: in place of :meth:`select`: float32 ``[I]``, thresholds on ``|act(gate)|`` (on ``|act(up)|`` in a layer
            without a gate). The kernels compute the gate of every neuron and skip the rest of those below.
        card: what it does on calibration tokens that it was not fitted to, or None.
    """

    name: ClassVar[str] = ""
    recordable: ClassVar[bool] = False
    scope: ClassVar[str] = "token"
    cut_I: torch.Tensor | None
    card: PredictorCard | None = None

    # What the library reads of every predictor (torch_pi2.predict).
    kind: ClassVar[str] = Method.CUSTOM.value
    #: Those of each object differ.
    tensor_names: ClassVar[tuple[str, ...]] = ()
    layer_tensors: ClassVar[tuple[str, ...]] = ()
    per_neuron: ClassVar[tuple[str, ...]] = ()
    threshold: ClassVar[float] = 0.5
    rank: ClassVar[int] = 0

    def fit(self, layer: LayerSamples) -> None:
        """Set what :meth:`select` needs, from the weights and calibration tokens of this copy's ``layer``."""

    def select(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Which neurons each token computes: bool ``[T, I]``, in the model's order of neurons. ``x_TH``: the layer's
        inputs, in the model's dtype. Neurons that are chosen and turn out to be zero are skipped all the same.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither select nor cut_I")

    def prompt_scores(self, x_TH: torch.Tensor, h_TI: torch.Tensor) -> torch.Tensor:
        """With scope ``prompt``: float32 ``[I]`` of tokens of a prompt, from the layer's inputs and from what ``down``
        is multiplied by (float32). A long prompt comes in pieces, whose scores are added.
        """
        raise NotImplementedError(f"{type(self).__name__} has no prompt_scores")

    def choose(self, score_I: torch.Tensor) -> torch.Tensor:
        """With scope ``prompt``: which neurons the sequence computes after its prompt, bool ``[I]``."""
        raise NotImplementedError(f"{type(self).__name__} has no choose")

    def read_bytes(self) -> int:
        """Bytes that :meth:`select` reads for a token; by default those of all of the method's tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def copy(self) -> Self:
        """A copy of its own, before it is fitted."""
        return copy.deepcopy(self)

    def selected(self, x: torch.Tensor, intermediate: int) -> torch.Tensor:
        """:meth:`select` for ``x [..., H]``: bool ``[T, I]``. Raises ShapeError, DtypeError: another result."""
        x_TH = x.reshape(-1, x.shape[-1])
        return self.checked(self.select(x_TH), "select", len(x_TH), intermediate)

    def chosen(self, score_I: torch.Tensor) -> torch.Tensor:
        """:meth:`choose`: bool ``[I]``. Raises as :meth:`selected`."""
        return self.checked(self.choose(score_I), "choose", len(score_I))

    def checked(self, mask: torch.Tensor, name: str, *shape: int) -> torch.Tensor:
        """``mask``, the result of the method ``name``."""
        if torch.compiler.is_compiling():
            return mask
        what, fix = f"{type(self).__name__}.{name}", "See help(torch_pi2.SparseMethod)."
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            found = str(getattr(mask, "dtype", type(mask).__name__))
            raise DtypeError(what, expected="a bool tensor", found=found, fix=fix)
        if mask.shape != shape:
            wanted = f"{shape}: {'tokens and ' * (len(shape) > 1)}neurons in the model's order"
            raise ShapeError(what, expected=wanted, found=str(tuple(mask.shape)), fix=fix)
        return mask

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor:
        """:meth:`select` as float32 ``[T, I]``, 1 or 0, for what takes predictors."""
        return self.select(x_TH).float()

    def at_threshold(self, threshold: float) -> Self:
        """A copy: it has no threshold to change."""
        return self.copy()

    @property
    def macs(self) -> int:
        """Multiply-adds with the same memory traffic in 16-bit weights."""
        return self.read_bytes() // 2

    def tensors(self) -> dict[str, torch.Tensor]:
        """The attributes that are tensors, by name."""
        return {name: value for name, value in self._saved().items() if isinstance(value, torch.Tensor)}

    def settings(self) -> dict[str, Any]:
        """The other attributes. Raises ConfigError: JSON cannot hold one."""
        found = {name: value for name, value in self._saved().items() if not isinstance(value, torch.Tensor)}
        for name, value in found.items():
            if not _is_plain(value):
                what = f"{name} of method {type(self).__name__}"
                raise ConfigError(what, expected="what JSON can hold, or a tensor", found=shown(value), fix=_FIX)
        return found

    def _saved(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name[0] != "_" and name != "card"}

    def fields(self) -> dict[str, Any]:
        """JSON fields in a file. Raises ConfigError: it has no name, or :meth:`settings`."""
        if registered.get(self.name) is not type(self):
            fix = "Give the class a name, and decorate it with torch_pi2.register_method."
            what = f"saving method {type(self).__name__}"
            raise ConfigError(what, expected="a registered class", found="another", fix=fix)
        return {"name": self.name, "settings": self.settings(), "tensors": sorted(self.tensors())}

    @staticmethod
    def read(
        tensors: Mapping[str, torch.Tensor], entry: Field, threshold: float, card: PredictorCard | None
    ) -> SparseMethod:
        """A method from tensors and fields of a file; its ``__init__`` is not called. Raises ConfigError: not known."""
        kind = find_method(entry.at("name").text())
        made: SparseMethod = object.__new__(kind)
        vars(made).update(entry.at("settings").names(allowed=None), **tensors)
        made.card = card
        return made

    @staticmethod
    def of_cold(site: FFNSite, cold: torch.Tensor, method: Any, int8_activations: bool) -> Cold:
        """A layer's part: the method itself. Raises ConfigError: there is none."""
        if not isinstance(method, SparseMethod):
            fix = "Pass predictors=torch_pi2.fit(model, text, method=...), or plan without them."
            raise ConfigError(f"predictor of {site.key}", expected="a SparseMethod", found="none", fix=fix)
        return Cold("mask", {}, method=method)


Kind = TypeVar("Kind", bound=type[SparseMethod])


@checked
def register_method(cls: Kind) -> Kind:
    """Let files and ``--method`` find the subclass ``cls`` of :class:`SparseMethod` by its ``name``; returns ``cls``.

    A later class of a name replaces an earlier one, as in a notebook. A package can name its methods as entry points
    of the group ``torch_pi2.methods`` instead. Raises ConfigError: no name, or one of a built-in method.
    """
    if not (isinstance(cls, type) and issubclass(cls, SparseMethod)):
        fix = "Derive it from torch_pi2.SparseMethod."
        raise ConfigError("register_method", expected="a subclass of SparseMethod", found=shown(cls), fix=fix)
    taken = {"auto", *(method.value for method in Method)}
    if not cls.name or cls.name in taken:
        expected = f"a text other than {', '.join(sorted(taken))}"
        raise ConfigError(f"{cls.__name__}.name", expected=expected, found=shown(cls.name), fix="Name the method.")
    registered[cls.name] = cls
    return cls


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(held) for key, held in value.items())
    return value is None or isinstance(value, (bool, int, float, str))
