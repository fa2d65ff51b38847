"""``SparseMethod``: how a layer chooses its neurons, as one Python class (docs/RESEARCH.md)."""

from typing import Any, ClassVar, Self

import torch

from torch_pi2.base.fields import checked
from torch_pi2.errors import ConfigError
from torch_pi2.predict.cold import Cold
from torch_pi2.predict.samples import LayerSamples, LinearSamples
from torch_pi2.types.method import INPUTS, Fitted, Method, plugins
from torch_pi2.types.site import FFNSite


class SparseMethod(Fitted):
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
        bias_H: float32 ``[H]`` or None: added to the layer's output for each token that :meth:`select` is asked about
            (or ``cut_I``), as a part of down's bias, which takes no time (SPON, arXiv 2512.12744). With scope
            ``token``, for layers without experts.
        card: what it does on calibration tokens that it was not fitted to, or None.
    """

    cut_I: torch.Tensor | None
    bias_H: torch.Tensor | None = None

    kind: ClassVar[str] = Method.CUSTOM.value
    threshold: ClassVar[float] = 0.5

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

    def selected(self, x: torch.Tensor, intermediate: int) -> torch.Tensor:
        """:meth:`select` for ``x [..., H]``: bool ``[T, I]``. Raises ShapeError, DtypeError: another result."""
        x_TH = x.reshape(-1, x.shape[-1])
        return self.checked(self.select(x_TH), "select", len(x_TH), intermediate)

    def chosen(self, score_I: torch.Tensor) -> torch.Tensor:
        """:meth:`choose`: bool ``[I]``. Raises as :meth:`selected`."""
        return self.checked(self.choose(score_I), "choose", len(score_I))

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

    @staticmethod
    def of_cold(site: FFNSite, cold: torch.Tensor, method: Any, int8_activations: bool) -> Cold:
        """A layer's part: the method itself. Raises ConfigError: there is none."""
        if not isinstance(method, SparseMethod):
            fix = "Pass predictors=torch_pi2.fit(model, text, method=...), or plan without them."
            raise ConfigError(f"predictor of {site.key}", expected="a SparseMethod", found="none", fix=fix)
        return Cold("mask", {}, method=method)


class InputMethod(Fitted):
    """A method of sparsity by input channels: which inputs of a linear layer a token uses (TEAL, arXiv 2408.14690). The
    weights of other channels are not read. Write a subclass::

        class Magnitude(torch_pi2.InputMethod):
            name = "magnitude"

            def __init__(self, share=0.5):
                self.share = share

            def fit(self, linear):
                self.threshold = float(linear.x_TK.abs().flatten().quantile(1 - self.share))

    and pass one to :func:`torch_pi2.optimize` (``method=Magnitude(0.4)``). All linear layers but the output layer get a
    copy, those of attention, too. The model stays in memory.

    Attributes:
        name, recordable, card: as of :class:`SparseMethod`.
        threshold: channels with ``|x_k| > threshold`` are used. scale_K: float32 ``[K]`` or None; with it
            ``|x_k| * scale_k > threshold`` (WINA, arXiv 2505.19427: norms of the columns).
    """

    kind: ClassVar[str] = INPUTS
    threshold: float = 0.0
    scale_K: torch.Tensor | None = None

    def fit(self, linear: LinearSamples) -> None:
        """Set :attr:`threshold` (and :attr:`scale_K`), or what :meth:`select` needs, for this copy's layer."""

    def select(self, x_TK: torch.Tensor) -> torch.Tensor | None:
        """Which channels each token uses: bool ``[T, K]``; None: those above :attr:`threshold`."""
        if self.scale_K is None:
            return None
        return x_TK.abs() * self.scale_K > self.threshold

    def used(self, x: torch.Tensor) -> tuple[torch.Tensor | None, float]:
        """The mask ``[..., K]`` and threshold of ``torch.ops.pi2.sparse_input_linear``."""
        mask_TK = self.select(x.reshape(-1, x.shape[-1]))
        if mask_TK is None:
            return None, self.threshold
        return self.checked(mask_TK, "select", x.numel() // x.shape[-1], x.shape[-1]).view(x.shape), 0.0

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """The channels of ``x [..., K]`` that are used, bool."""
        active, threshold = self.used(x)
        return x.abs() > threshold if active is None else active

    @staticmethod
    def of_cold(site: FFNSite, cold: torch.Tensor, method: Any, int8_activations: bool) -> Cold:
        """Raises ConfigError: it chooses no neurons."""
        fix = "Pass methods of linear layers, as torch_pi2.fit gives them."
        raise ConfigError(f"method of {site.key}", expected="a SparseMethod", found="an InputMethod", fix=fix)


@checked
def register_method(method: type[Fitted]) -> type[Fitted]:
    """Let files and ``--method`` find a subclass of :class:`SparseMethod` or :class:`InputMethod` by its ``name``;
    returns it, as a decorator. A later class of a name replaces an earlier one. Packages name theirs in the entry
    points ``torch_pi2.methods`` instead. Raises ConfigError: another class, no name, or that of a built-in method.
    """
    return plugins.register(method)
