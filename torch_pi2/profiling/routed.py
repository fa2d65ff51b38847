"""Records the firing of experts: of each the tokens that the router gave it, and of few tokens some more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from torch_pi2.errors import NonFiniteError
from torch_pi2.graph.routed import Routed, fired_scores, modules_of
from torch_pi2.profiling.data import MIN_TOKENS, Batch
from torch_pi2.profiling.firing import Firing, real_tokens
from torch_pi2.spec.site import FFNSite
from torch_pi2.spec.stats import Reservoir

#: Tokens kept of every module of experts, for those of its experts that get fewer than ``MIN_TOKENS``.
_KEPT = 256


class _Block:
    """One module of experts: how many tokens each has had, and a sample of all its tokens."""

    def __init__(self, name: str, sites: Sequence[FFNSite]) -> None:
        self.name, self.sites = name, sites
        self.calls = 0
        self.reached = dict.fromkeys((site.key for site in sites), 0)
        self._reservoir = Reservoir(_KEPT, 0)
        self._x: torch.Tensor | None = None
        self._index: torch.Tensor | None = None

    def keep(self, routed: Routed) -> None:
        rows, slots = self._reservoir.place(len(routed.x_TH))
        if self._x is None or self._index is None:
            self._x = routed.x_TH.new_zeros((_KEPT, routed.x_TH.shape[-1]))
            self._index = routed.index_TK.new_full((_KEPT, routed.index_TK.shape[-1]), -1)
        self._x[slots], self._index[slots] = routed.x_TH[rows], routed.index_TK[rows]

    def elsewhere(self, site: FFNSite) -> torch.Tensor:
        """``[N, H]`` of the sample, the tokens that did not go to ``site``."""
        assert self._x is not None
        assert self._index is not None
        seen = min(self._reservoir.seen, _KEPT)
        return self._x[:seen][~self._index[:seen].eq(site.up.expert or 0).any(-1)]


class RoutedRecorder:
    """Shows a sink the firing of experts while a model runs inside ``with``. Set :attr:`batch` before each call.

    An expert that has had fewer than ``MIN_TOKENS`` tokens when :meth:`finish` is called is then shown up to ``_KEPT``
    tokens that its module gave to others: its own weights, on inputs of its block. Otherwise nothing could be said of
    it, and text to come may use it.

    Raises (while the model runs):
        NonFiniteError: a module of experts makes NaN or infinity of a real token.
        UnsupportedModelError: the module sees another number of tokens than the batch has, some of which are padding.
    """

    def __init__(self, model: nn.Module, sites: Sequence[FFNSite], sink: Callable[[Firing], None]) -> None:
        self._model, self._sink = model, sink
        self._blocks = [_Block(name, own) for name, own in modules_of(sites).items()]
        self._hooks: list[Any] = []
        self.batch: Batch | None = None

    def __enter__(self) -> RoutedRecorder:
        for block in self._blocks:
            module = self._model.get_submodule(block.name)
            self._hooks.append(module.register_forward_hook(self._watch(block), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def calls(self) -> dict[str, int]:
        """Module of experts -> how often it ran."""
        return {block.name: block.calls for block in self._blocks}

    def _watch(self, block: _Block) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y_TH: torch.Tensor) -> None:
            routed = Routed.of(args, kwargs, len(block.sites))
            real_T, _ = real_tokens(block.name, self.batch, len(routed.x_TH))
            finite_T = torch.isfinite(y_TH).all(-1)
            if not bool(finite_T[real_T].all()):
                raise NonFiniteError(
                    f"output of {block.name}",
                    expected="finite numbers",
                    found=f"NaN or infinity for {int((~finite_T & real_T).sum())} of {int(real_T.sum())} tokens",
                    fix="Check the checkpoint and the dtype (float16 overflows at 65504: try bfloat16).",
                )
            routed = Routed(*(tensor.detach()[real_T] for tensor in routed))
            block.calls += 1
            block.keep(routed)
            for site in block.sites:
                x_NH = routed.x_TH[routed.tokens_of(site)]
                block.reached[site.key] += len(x_NH)
                if len(x_NH):
                    self._show(site, x_NH)

        return hook

    def _show(self, site: FFNSite, x_NH: torch.Tensor, *, borrowed: bool = False) -> None:
        score_NI = fired_scores(site, site.weights(self._model), x_NH)
        self._sink(Firing(site, x_NH, score_NI, torch.ones(len(x_NH), dtype=torch.bool), None, borrowed))

    def finish(self) -> None:
        """After the last batch: further tokens for experts that have had few."""
        for block in self._blocks:
            for site in block.sites if block.calls else ():
                if block.reached[site.key] < MIN_TOKENS and len(x_NH := block.elsewhere(site)):
                    self._show(site, x_NH, borrowed=True)
