"""``DenseForm``: a layer's matrices as its original had them, out of the neurons' rows and back into them."""

from __future__ import annotations

from dataclasses import replace

import torch

from torch_pi2.errors import ConfigError
from torch_pi2.layers.neuron_rows import permuted, row_of_each
from torch_pi2.layers.standin import StandIn
from torch_pi2.types.site import FFNSite, LinearRef


class DenseForm(StandIn):
    """What stands for an FFN that is in neurons' rows, in the respect in which others want it dense.

    Attributes:
        neuron_rows: ``[I, R, H]`` in plan order (``order``, of which ``inverse`` is the inverse). weights: how they are
            stored. The biases: ``bias_gate``, ``bias_up [I]`` in plan order, ``bias_down [H]``.
    """

    site: FFNSite
    weights: str
    neuron_rows: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor
    bias_gate: torch.Tensor | None
    bias_up: torch.Tensor | None
    bias_down: torch.Tensor | None
    _dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """Of the float parameters that the layer has or stands for."""
        return self.neuron_rows.dtype if self.weights == "float" else self._dtype

    def parts(self) -> list[tuple[LinearRef, str]]:
        """The site's matmuls with their place among a neuron's rows, gate before up."""
        gate = [] if self.site.gate is None else [(self.site.gate, "gate")]
        return [*gate, (self.site.up, "up"), (self.site.down, "down")]

    def projection(self, role: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of ``gate``, ``up`` (``[I, H]``) or ``down`` (``[H, I]``) in original neuron order."""
        rows = self.site.rows_per_neuron
        row = {"gate": 0, "up": rows - 2, "down": rows - 1}[role]
        w_IH = row_of_each(self.neuron_rows, row, self.weights, self.site.hidden, self.dtype).index_select(
            0, self.inverse
        )
        if role == "down":
            return w_IH.T.contiguous(), None if self.bias_down is None else self.bias_down.to(self.dtype)
        bias = permuted(self.bias_gate if role == "gate" else self.bias_up, self.inverse)
        return w_IH, None if bias is None else bias.to(self.dtype)

    def dense_values(self) -> dict[str, torch.Tensor]:
        """Copies of the site's parameters by fully-qualified name.

        Bit-identical to the originals; of a quantised layer the numbers that its rows stand for.
        """
        values: dict[str, torch.Tensor] = {}
        for ref, role in self.parts():
            weight, bias = self.projection(role)
            own = replace(ref, expert=None)  # of which this layer is one
            for name, part, take in ((ref.weight, weight, own.take), (ref.bias, bias, own.take_bias)):
                if name is not None and part is not None:
                    if name not in values:
                        values[name] = torch.empty_like(self.shape_of(name), device=part.device)
                    take(values[name]).copy_(part)
        return values

    def assign(self, name: str, value: torch.Tensor) -> bool:
        """Write parameter ``name`` of the site, in its original shape, into the neurons; whether it was new.

        Raises:
            ConfigError: the neurons are quantised.
        """
        self.check_float(f"other weights for {self.site.key}")
        changed = False
        for ref, role in self.parts():
            if name not in (ref.weight, ref.bias):
                continue
            own = replace(ref, expert=None)
            new = own.take_bias(value) if name == ref.bias else own.take(value)
            target: torch.Tensor | None
            if name == ref.bias:
                target = {"gate": self.bias_gate, "up": self.bias_up, "down": self.bias_down}[role]
                new = new if role == "down" else new[self.order]
            elif role == "down":
                target, new = self.neuron_rows[:, -1], new.T[self.order]
            else:
                target = self.neuron_rows[:, 0 if role == "gate" else self.neuron_rows.shape[1] - 2]
                new = new[self.order]
            assert target is not None
            new = new.to(target.dtype)
            if not torch.equal(target, new):
                changed = True
                with torch.no_grad():
                    target.copy_(new)
        return changed

    def shape_of(self, name: str) -> torch.Tensor:
        """A ``meta`` tensor with shape and dtype of parameter ``name``."""
        parts = [(ref, role) for ref, role in self.parts() if name in (ref.weight, ref.bias)]
        ref, role = parts[0]
        firsts = sum(of != "down" for _, of in parts)  # of tied weights the down matrix is one as well
        rows = self.site.intermediate * firsts or self.site.hidden
        columns = self.site.intermediate if role == "down" else self.site.hidden
        matrix = (columns, rows) if ref.transposed else (rows, columns)
        return torch.empty(matrix if name == ref.weight else (rows,), dtype=self.dtype, device="meta")

    def check_float(self, what: str) -> None:
        """Raise ConfigError if the layer is quantised, which cannot be undone; ``what`` was asked for."""
        if self.weights != "float":
            raise ConfigError(
                what,
                expected="a layer with float weights",
                found=f"{self.weights}, which is lossy: the original numbers are gone",
                fix="Load the checkpoint again (from_pretrained, or torch_pi2.load) instead.",
            )
