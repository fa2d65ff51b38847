"""Records the firing of experts: of each the tokens that the router gave it, and of few tokens some more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from torch_pi2.distributed.ranks import Ranks
from torch_pi2.errors import NonFiniteError
from torch_pi2.graph.routed import Routed, fired_scores, modules_of
from torch_pi2.profiling.data import MIN_TOKENS, Batch
from torch_pi2.profiling.firing import Firing, real_tokens
from torch_pi2.types.site import FFNSite
from torch_pi2.types.stats import Reservoir

#: Tokens kept of every module of experts, for those of its experts that get fewer than ``MIN_TOKENS``.
_KEPT = 256
#: Part of the stream that borrowed tokens are: after all batches.
_BORROWED = 1 << 62


class _Block:
    """One module of experts: how many tokens each has had, and a sample of all its tokens."""

    def __init__(self, name: str, sites: Sequence[FFNSite]) -> None:
        self.name, self.sites = name, sites
        self.calls = 0
        self.reached = dict.fromkeys((site.key for site in sites), 0)
        self._reservoir = Reservoir(_KEPT, 0)
        self._x: torch.Tensor | None = None  # [N, H], as soon as there is a token
        self._index: torch.Tensor | None = None

    def keep(self, routed: Routed, part: int) -> None:
        rows, slots = self._reservoir.place(len(routed.x_TH), part)
        if self._x is None or self._index is None:
            self._x = routed.x_TH.new_zeros((_KEPT, routed.x_TH.shape[-1]))
            self._index = routed.index_TK.new_full((_KEPT, routed.index_TK.shape[-1]), -1)
        self._x[slots], self._index[slots] = routed.x_TH[rows], routed.index_TK[rows]

    def finish(self, ranks: Ranks) -> None:
        """Counts and sample are those of all processes from now on."""
        self.calls = sum(ranks.each(self.calls))
        reached = ranks.each(self.reached)
        self.reached = {key: sum(one[key] for one in reached) for key in self.reached}
        order = self._reservoir.order()
        own = None if self._x is None or self._index is None else (self._x[order], self._index[order])
        found = [sample for sample in ranks.each((self._reservoir.keys_S[order], own)) if sample[1] is not None]
        if found:
            first = torch.argsort(torch.cat([torch.from_numpy(keys) for keys, _ in found]))[:_KEPT]
            self._x, self._index = (torch.cat(parts)[first] for parts in zip(*(own for _, own in found)))

    def elsewhere(self, site: FFNSite) -> torch.Tensor:
        """``[N, H]`` of the sample, the tokens that did not go to ``site``."""
        assert self._x is not None
        assert self._index is not None
        return self._x[~self._index.eq(site.up.expert or 0).any(-1)]


class RoutedRecorder:
    """Shows a sink the firing of experts while a model runs inside ``with``.

    Set :attr:`batch`, and :attr:`part`, its number, before each call.

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
        self.part = 0

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
            block.keep(routed, self.part)
            for site in block.sites:
                x_NH = routed.x_TH[routed.tokens_of(site)]
                block.reached[site.key] += len(x_NH)
                if len(x_NH):
                    self._show(site, x_NH, self.part)

        return hook

    def _show(self, site: FFNSite, x_NH: torch.Tensor, part: int, *, borrowed: bool = False) -> None:
        score_NI = fired_scores(site, site.weights(self._model), x_NH)
        self._sink(Firing(site, x_NH, score_NI, torch.ones(len(x_NH), dtype=torch.bool), None, borrowed, part))

    def finish(self, ranks: Ranks) -> None:
        """After the last batch: further tokens for experts that have had few, each shown by one of the processes."""
        for block in self._blocks:
            block.finish(ranks)
            for i, site in enumerate(block.sites if block.calls else ()):
                few = block.reached[site.key] < MIN_TOKENS
                if few and i % ranks.size == ranks.rank and len(x_NH := block.elsewhere(site)):
                    self._show(site, x_NH, _BORROWED, borrowed=True)
