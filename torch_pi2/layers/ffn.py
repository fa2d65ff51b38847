"""``SparseFFN``: one feed-forward layer stored by neuron, hot neurons first."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torch_pi2.base.memory import new_tensor
from torch_pi2.errors import ConfigError
from torch_pi2.formats import FLOAT, PAIRS, neuron_shape
from torch_pi2.layers.checks import check_ffn_input, check_method, result_dtype
from torch_pi2.layers.choices import by_prompt
from torch_pi2.layers.gpu import HybridFFN, TransferBuffer, check_gpu_has_kernels, check_together, stays, stays_as_it_is
from torch_pi2.layers.prompt import call_mode, has_tiles, prompt_ffn, skips_predictor, takes_prompt_path
from torch_pi2.layers.rows import DenseForm, convert, make_quantized_rows, make_rows, permuted
from torch_pi2.layers.sequence import FusedOutput, only_input
from torch_pi2.ops import load
from torch_pi2.ops.constants import wants_blocks
from torch_pi2.ops.ffn import predicted
from torch_pi2.ops.linear import IN_BLOCKS, ROWS, from_blocks, to_blocks
from torch_pi2.ops.predictors import NO_PREDICTOR
from torch_pi2.ops.quantized import check_kind
from torch_pi2.predict import LAYER_TENSORS, PREDICTORS, tensors_among
from torch_pi2.predict.cold import Cold
from torch_pi2.types.method import PREDICTED, Method
from torch_pi2.types.plan import LayerPlan
from torch_pi2.types.site import FFNSite, FFNWeights, check_weights


class SparseFFN(DenseForm):
    """An FFN computed as its plan says: ``[..., H] -> [..., H]``.

    Args:
        site: the FFN.
        weights: its tensors, which are copied.
        layer_plan: neuron order, number of hot neurons and method.
        lowrank: for method ``custom``, a ``SparseMethod``; for method ``signbit``, the tensors of a ``SignBit``; for
            method ``lowrank``, the predictor in the
            model's neuron order: ``a [r, H]`` int8, ``a_scale [r]``, ``b [I, r]`` int8, ``b_scale [I]`` and optionally
            ``bias [I]`` float32; or quantised rows ``a [r, row_bytes(H)]``, ``b [I, row_bytes(r)]`` uint8.
        threshold: for method ``lowrank``, cut on the predictor's logit.
        kind: storage of the neurons: ``float``, ``int4`` or ``int8`` (lossy).
        int8_activations: with quantised neurons, gate and up read ``x`` rounded to int8 (lossy, faster).
        given: ``gate``, ``up`` or ``down`` -> quantised rows of all neurons in the model's order, used as they are.

    Raises:
        DeviceError, DtypeError, NonFiniteError: the kernels cannot use the weights.
        ShapeError: weights, order or predictor do not fit the site.
        ConfigError: unknown method, hot neurons out of range, or no predictor.

    Buffers (none in ``state_dict``), in plan order: ``neuron_rows [I, R, H]``, contiguous or :meth:`arranged`;
    ``bias_gate``, ``bias_up [I]``; ``bias_down [H]``; ``thresholds [I]`` float32 or None; and the predictor's rows of
    cold neurons, in blocks where the kernels prefer them (:mod:`torch_pi2.ops.linear`).
    Quantised: ``neuron_rows [I, R, row_bytes(H)]`` uint8 (two formats: ``[I, bytes]``) and float32 biases. Rounding is
    final, so the original is not restored, ``state_dict`` has the dequantised numbers, and no other weights can be
    loaded.

    Attributes:
        weights: the ``kind``. dtype: of the float parameters. error: relative quantisation error (Frobenius
            norm) of the weights.
        split: the neurons on a GPU, if some are there: inputs and results are then on that GPU.
        by_batch: (tokens, hot neurons), ascending by tokens; empty: always ``n_hot``. A call uses the first entry with
            at least as many tokens, else the last. There are at least ``least_hot`` hot neurons; when all are hot, no
            predictor runs. Without a predictor the setting changes no bits. Graphs compiled before do not see a change.
        dense_from: number of tokens in a call from which every neuron is computed; 0: never; None: the default of
            :mod:`torch_pi2.layers.prompt`. Calls within the range of :attr:`by_batch` are never prompts.
    """

    #: Whether the dense layer has dropout, which this layer does not compute.
    only_in_eval = False
    #: Name of the first argument of the dense layer's forward.
    keyword = "x"
    error: float
    split: HybridFFN | None = None
    #: Whether up rows are in blocks (:meth:`arranged`).
    up_in_blocks = False
    #: Of a part of a layer: first and last neuron in the whole layer.
    span: tuple[int, int] = (0, 0)
    predictor_a: torch.Tensor | None
    #: ``bias_H`` of a ``SparseMethod``, or None.
    bias_skipped: torch.Tensor | None

    def __init__(
        self,
        site: FFNSite,
        weights: FFNWeights,
        layer_plan: LayerPlan,
        lowrank: Mapping[str, torch.Tensor] | None = None,
        threshold: float = 0.0,
        *,
        kind: str = "float",
        int8_activations: bool = False,
        given: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        load()
        if kind != FLOAT:
            check_kind(kind)
        check_weights(site, weights)
        self._set_up(site, layer_plan, lowrank, threshold, kind, int8_activations)
        self._dtype = weights.up.dtype
        if kind == "float":
            rows, self.error = make_rows(weights, self.order), 0.0
        else:
            rows, self.error = make_quantized_rows(site, weights, self.order, kind, given)
        down = None if weights.bias_down is None else weights.bias_down.detach().clone()
        gate, up = (permuted(bias, self.order) for bias in (weights.bias_gate, weights.bias_up))
        self._hold(self.arranged(rows), gate, up, down)

    @classmethod
    def empty(
        cls,
        site: FFNSite,
        layer_plan: LayerPlan,
        kind: str,
        lowrank: Mapping[str, torch.Tensor] | None = None,
        threshold: float = 0.0,
        *,
        int8_activations: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> "SparseFFN":
        """A layer with its neurons on ``meta``, for loading: assign ``neuron_rows`` and biases afterwards.

        Args: as the class. kind: may also be one of ``PAIRS`` (:mod:`torch_pi2.formats`), neurons of two formats
        ``[I, bytes]``, as files have them. dtype: of the float parameters, or of those that quantised rows replace.
        """
        load()
        if kind not in (FLOAT, *PAIRS):
            check_kind(kind)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._set_up(site, layer_plan, lowrank, threshold, kind, int8_activations)
        layer._dtype, layer.error = dtype, 0.0
        quantised = kind != "float"
        rows = site.rows_per_neuron
        shape = neuron_shape(kind, rows, site.hidden) if quantised else (rows, site.hidden)
        neuron_rows = torch.empty((site.intermediate, *shape), dtype=torch.uint8 if quantised else dtype, device="meta")
        sizes = ((site.gate, site.intermediate), (site.up, site.intermediate), (site.down, site.hidden))
        with_bias = [(ref is not None and ref.bias is not None, size) for ref, size in sizes]
        biases = [torch.empty(size, dtype=dtype, device="meta") if has else None for has, size in with_bias]
        layer._hold(neuron_rows, *biases)
        return layer.eval()

    def __setattr__(self, name: str, value: Any) -> None:
        method = name[:2] != "__" and callable(getattr(type(self), name, None))
        if method and "_hf_hook" not in self.__dict__:  # accelerate's, around ours
            expected = "the layer's own: compiled kernels and recorded steps do not call another"
            fix = "Try a predictor of your own with torch_pi2.NeuronClusterMode, on the dense model."
            raise ConfigError(f"{name} of {self.site.key}", expected=expected, found="an assignment", fix=fix)
        super().__setattr__(name, value)

    def _hold(self, neuron_rows: torch.Tensor, *biases: torch.Tensor | None) -> None:
        self.register_buffer("neuron_rows", neuron_rows, persistent=False)
        for name, bias in zip(("bias_gate", "bias_up", "bias_down"), biases, strict=True):
            quantised = bias is not None and self.weights != "float"
            self.register_buffer(name, bias.float() if quantised and bias is not None else bias, persistent=False)
        if self.bias_skipped is not None:  # in the dtype that the kernels add
            dtype = neuron_rows.dtype if self.weights == FLOAT else torch.float32
            self.bias_skipped = self.bias_skipped.detach().to(dtype)

    def _set_up(
        self, site: FFNSite, layer_plan: LayerPlan, lowrank: Mapping | None, threshold: float, kind: str, int8: bool
    ) -> None:
        """Everything but the weights."""
        check_method(site, layer_plan)
        self.weights, self.int8_activations = kind, int8 and kind != "float"
        self.has_tiles = has_tiles()  # here, not in forward: a compiled graph could not ask
        self.site = site
        self.method = layer_plan.method
        # A dense layer is one whose neurons are all hot.
        self.n_hot = site.intermediate if self.method == Method.DENSE else layer_plan.n_hot
        self.threshold = layer_plan.threshold if self.method == Method.THRESHOLD else 0.0
        cold_share = layer_plan.expected_active * layer_plan.n_cold / max(1, site.intermediate)
        self.expected_share = min(1.0, layer_plan.n_hot / max(1, site.intermediate) + cold_share)
        order = layer_plan.order.to(torch.int64)
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("inverse", torch.argsort(order), persistent=False)
        own = layer_plan.thresholds if self.threshold > 0 else None
        self.register_buffer("thresholds", None if own is None else own.float()[order], persistent=False)
        self.register_buffer("bias_skipped", getattr(lowrank, "bias_H", None), persistent=False)
        predictor, cold = PREDICTORS.get(self.method), Cold(NO_PREDICTOR, {})
        if predictor is not None and self.n_hot < site.intermediate:
            cold = predictor.of_cold(site, order[self.n_hot :], lowrank, self.int8_activations)
        for name in LAYER_TENSORS:
            self.register_buffer(f"predictor_{name}", cold.tensors.get(name), persistent=False)
        self.predictor_kind, self.custom = cold.kind, cold.method
        self.predictor_threshold = threshold if cold.cut is None else cold.cut
        self.predictor_weights, self.predictor_in_blocks = cold.weights, cold.in_blocks

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``x [..., H]`` in float32, bfloat16 or float16; the result has its shape and dtype.

        ``x`` may be passed by its name in the dense forward. Under ``torch.autocast`` the computation has ``x``'s dtype
        and the result autocast's. Raises ShapeError: the last dimension is not H. GradientError: a gradient would be
        needed. ConfigError: other arguments; or training mode of a layer with dropout.
        """
        return self.whole(only_input(self.keyword, self.site.key, args, kwargs))

    def forward_fused(self, *args: Any, **kwargs: Any) -> FusedOutput:
        """``forward`` of the first module of a sequence (:mod:`torch_pi2.layers.sequence`)."""
        return FusedOutput(self.forward(*args, **kwargs), self.site)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        self.check_input(x)
        if self.training and self.only_in_eval:
            expected = "evaluation mode: in training mode the original drops neurons at random, and this would not"
            fix = "Call model.eval(), or torch_pi2.restore(model) to have dropout."
            raise ConfigError(f"mode of {self.site.key}", expected=expected, found="training mode", fix=fix)
        if self.split is not None:
            y = self.split(self, x)
        elif self.custom is not None and self.custom.scope == "prompt":
            y = by_prompt(self, x)
        elif takes_prompt_path(self, x):
            y = prompt_ffn(self, x)
        else:
            n_hot = self.hot_for(1 if call_mode.single_steps else x.numel() // self.site.hidden)
            if not self.has_predictor or n_hot == self.site.intermediate or skips_predictor(self, x):
                y = self._compute(x, n_hot, self.threshold)
            else:
                y = self._predicted(x, n_hot)
        return y.to(result_dtype(x))

    @property
    def least_hot(self) -> int:
        """The fewest hot neurons: those without predictor rows, if the layer has a predictor."""
        return self.n_hot if self.method in PREDICTED else 0

    def hot_for(self, tokens: int) -> int:
        """Hot neurons of a call with ``tokens`` tokens; see :attr:`by_batch`."""
        if not self.by_batch:
            return self.n_hot
        for batch, hot in self.by_batch:
            if tokens <= batch:
                return hot
        return self.by_batch[-1][1]

    def _predicted(self, x: torch.Tensor, n_hot: int) -> torch.Tensor:
        settings = self.settings(n_hot, self.threshold)
        if self.custom is not None:
            return torch.ops.pi2.sparse_ffn(x, *self.tensors(), *self.asked(x, n_hot)[0], *settings)
        return torch.ops.pi2.predicted_ffn(x, *self.tensors(), *self.asked(), *settings)

    def asked(
        self, x: torch.Tensor | None = None, n_hot: int | None = None
    ) -> tuple[list[torch.Tensor], str, float, str, bool]:
        """Arguments of ``torch.ops.pi2.predicted_ffn`` after :meth:`tensors`: the predictor and its settings. ``x``:
        the input, which a ``SparseMethod`` is asked about, for all but the first ``n_hot`` neurons (None: as planned).
        """
        if self.custom is not None:
            if x is None:
                expected, fix = "a predictor that kernels know", "Use another method there (docs/RESEARCH.md)."
                raise ConfigError(f"method of {self.site.key}", expected=expected, found=self.custom.name, fix=fix)
            mask_TI = self.custom.selected(x, self.site.intermediate)[
                :, self.order[self.n_hot if n_hot is None else n_hot :]
            ]
            return [mask_TI.view(*x.shape[:-1], -1)], self.predictor_kind, 0.0, "", False
        int8 = self.int8_activations and bool(self.predictor_weights)
        return self.predictor(), self.predictor_kind, self.predictor_threshold, self.predictor_format, int8

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Cold neurons predicted to fire, bool ``[..., cold]``."""
        return predicted(x, *self.asked(x), ops=torch.ops.pi2)

    @property
    def predictor_format(self) -> str:
        """The operators' name for the format of a low-rank predictor in quantised rows: ``int4``, ``int4_blocks``."""
        return self.predictor_weights + (IN_BLOCKS if self.predictor_in_blocks else "")

    def predictor(self) -> list[torch.Tensor]:
        """The predictor's tensors for cold neurons in plan order, in the operators' order."""
        return [*tensors_among(self._buffers).values()]

    def predictor_rows(self) -> dict[str, torch.Tensor]:
        """The predictor's tensors by name (``a``) with rows in plain order, for files and experts."""
        found = tensors_among(self._buffers)
        if self.predictor_in_blocks:
            rank, cold = len(found["a"]), len(found["bias"])
            found["a"] = from_blocks(found["a"], self.predictor_weights, self.site.hidden)
            found["b"] = from_blocks(found["b"], self.predictor_weights, rank)[-cold:]
        return found

    def arranged(self, neuron_rows: torch.Tensor) -> torch.Tensor:
        """Neurons without gates and predictor as a view ``[I, 2, ...]`` of all up rows, in blocks where kernels want
        them (:mod:`torch_pi2.ops.linear`), and then all down rows; others as they are.
        """
        plain = self.site.gated or self.has_predictor
        if plain or neuron_rows.dim() != 3 or not neuron_rows.is_cpu:
            return neuron_rows
        intermediate, rows, width = neuron_rows.shape
        size = intermediate, self.site.hidden
        self.up_in_blocks = self.weights != FLOAT and wants_blocks(self.weights, *size, self.int8_activations)
        apart, (up, down) = new_tensor((rows, intermediate, width), neuron_rows.dtype), neuron_rows.unbind(1)
        apart[0] = to_blocks(up.contiguous(), self.weights, size[1]) if self.up_in_blocks else up
        apart[1] = down
        return apart.transpose(0, 1)

    def in_row_order(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Neurons ``first`` to ``last`` (None: all) as in files, contiguous: a copy if they were :meth:`arranged`."""
        if not self.up_in_blocks:
            return self.neuron_rows[first:last].contiguous()
        last, start = self.site.intermediate if last is None else last, first - first % ROWS
        blocks = self.neuron_rows[start : last + -last % ROWS, 0]
        up = from_blocks(blocks, self.weights, self.site.hidden)[first - start : last - start]
        return torch.stack((up, self.neuron_rows[first:last, 1]), 1)

    def leave_blocks(self) -> None:
        """Store the neurons, and the predictor's rows, as in files from now on."""
        if self.neuron_rows.is_cpu:
            self.neuron_rows, self.up_in_blocks = self.in_row_order(), False
        for name, tensor in self.predictor_rows().items():
            setattr(self, f"predictor_{name}", tensor)
        self.predictor_in_blocks = False

    def _compute(self, x: torch.Tensor, n_hot: int, threshold: float) -> torch.Tensor:
        return torch.ops.pi2.sparse_ffn(x, *self.tensors(threshold > 0), None, *self.settings(n_hot, threshold))

    def tensors(self, skips: bool = True) -> tuple[torch.Tensor | None, ...]:
        """Arguments of ``torch.ops.pi2.sparse_ffn`` after its input: neurons and biases (:meth:`bias_out`)."""
        return self.neuron_rows, self.bias_gate, self.bias_up, self.bias_out(skips)

    def bias_out(self, skips: bool) -> torch.Tensor | None:
        """Down's bias, for tokens that skip neurons with what their method adds for these."""
        if not skips or self.bias_skipped is None:
            return self.bias_down
        return self.bias_skipped if self.bias_down is None else self.bias_down + self.bias_skipped

    def settings(self, n_hot: int, threshold: float) -> tuple[Any, ...]:
        """Arguments of ``torch.ops.pi2.sparse_ffn`` after the mask of cold neurons."""
        site = self.site
        form = site.activation, site.activation_on_up
        weights = self.weights + IN_BLOCKS * self.up_in_blocks
        return *form, n_hot, threshold, weights, self.int8_activations, self.thresholds

    def split_off(self, n_gpu: int, link: TransferBuffer, neuron_rows: torch.Tensor | None = None) -> None:
        """Compute the first ``n_gpu`` neurons on the GPU of ``link``, which inputs and results are then on.

        ``neuron_rows``: those neurons, if the layer is not in memory. Raises as :meth:`check_gpu_has_kernels`.
        """
        self.check_gpu_has_kernels()
        if not self.site.gated:
            self.leave_blocks()
        self.split = HybridFFN(self, n_gpu, link, neuron_rows)

    def check_gpu_has_kernels(self) -> None:
        """Raises DeviceError or UnsupportedModelError if no GPU kernel computes this layer."""
        check_gpu_has_kernels(self.site, self.weights, self.predictor_kind)
        if self.thresholds is not None:
            raise stays(f"{self.site.key}, whose neurons have thresholds of their own")

    def part(self, first: int, last: int, neuron_rows: torch.Tensor | None = None) -> "SparseFFN":
        """A layer of the neurons ``first`` to ``last`` in plan order, over views of these tensors.

        The part with the last neuron keeps the down bias and the predictor. Other parts have no predictor: all their
        neurons are hot or decided by the gate. ``neuron_rows``: used in place of the view.
        """
        part = copy.copy(self)
        part.split, part.span = None, (first, last)
        part._buffers = buffers = dict(self._buffers)
        for name in ("neuron_rows", "bias_gate", "bias_up", "order", "thresholds"):
            tensor = buffers[name]
            if tensor is not None:
                buffers[name] = tensor[first:last]
        if neuron_rows is not None:
            buffers["neuron_rows"] = neuron_rows
        buffers["inverse"] = None  # for dense values, which the whole gives
        part.site = replace(self.site, intermediate=last - first)
        part.n_hot = max(0, min(self.n_hot, last) - first)
        if last < self.site.intermediate:
            buffers["bias_down"] = buffers["bias_skipped"] = None
            part.predictor_in_blocks, part.predictor_kind = False, NO_PREDICTOR
            buffers |= {name: None for name in buffers if name.startswith("predictor_")}
        part.follow_whole(self)
        return part

    def follow_whole(self, whole: "SparseFFN") -> None:
        """Copy mode and plan settings of ``whole``, the layer that this is a part of."""
        first, last = self.span
        self.dense_from, self.training = whole.dense_from, whole.training
        self.by_batch = tuple((batch, max(0, min(hot, last) - first)) for batch, hot in whole.by_batch)

    def check_input(self, x: torch.Tensor) -> None:
        """Checks ``x`` as :func:`check_ffn_input`, and that it is on the neurons' device."""
        check_ffn_input(self.site, self.training, x, self.dtype, self.lookups)
        if self.in_memory and self.split is None:
            check_together(self.site.key, x, self.neuron_rows)

    def _apply(self, fn: Any, recurse: bool = True) -> "SparseFFN":
        """``model.to(dtype)``: converts neurons, and biases with them, in memory only, and no scales of predictors."""
        if stays_as_it_is(self, fn):
            return self
        names = [*(f"predictor_{name}" for name in ("a_scale", "b_scale", "bias")), "thresholds"]
        if self.weights != "float" or not self.in_memory:
            names += ["bias_gate", "bias_up", "bias_down", "bias_skipped"]
            self._dtype = fn(torch.empty(0, dtype=self._dtype, device=self.neuron_rows.device)).dtype
        convert(self, fn, recurse, names)
        return self

    def extra_repr(self) -> str:
        s = self.site
        stored = "" if self.weights == "float" else f", {self.weights}{' x int8' if self.int8_activations else ''}"
        form = s.form.replace(")*", ") * ")
        return f"{s.hidden} -> {s.intermediate} -> {s.hidden}, {form}, {self.method}, {self.n_hot} hot{stored}"
