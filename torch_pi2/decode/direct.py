"""``Direct``: what ``torch.compile`` made of a step, called without Dynamo in between."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Direct:
    """``forward`` compiled without guards; from the third call on a plain call of the compiled code.

    Each call through Dynamo fetches all inputs of the graph, hundreds of tensors, from the modules that hold them:
    models of a billion parameters and less feel it. Without guards they are the same every time but for the ids. The
    first two calls have to confirm that, and that the code has no other result than what is returned; otherwise Dynamo
    stays in between.

    Args:
        forward: from ids to one tensor.
        backend: what compiles it: a name or a function, as of ``torch.compile``.
        stay: Dynamo stays in any case: hooks may keep what it hands to them.
    """

    def __init__(
        self, forward: Callable[[torch.Tensor], torch.Tensor], backend: str | Callable[..., Any], *, stay: bool = False
    ) -> None:
        self._stay = stay
        #: Code, its inputs and its results, in one call through Dynamo.
        self._calls: list[tuple[Callable[..., Any], Sequence[Any], Any]] = []
        self._seen: list[Any] | None = None  # inputs of the call before, None for the ids
        self._confirmed: Callable[..., Any] | None = None  # code that has had these twice
        compile_step: Any = torch.compile
        self._through_dynamo = compile_step(
            forward,
            fullgraph=True,
            dynamic=False,
            backend=_recording(backend, weakref.ref(self)),
            options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
            # every step's own: with the guards gone, another one's code would fit too
            isolate_recompiles=True,
        )

    def __call__(self, ids_BT: torch.Tensor) -> torch.Tensor:
        if self._confirmed is not None and self._seen is not None:
            result: torch.Tensor = self._confirmed(*(ids_BT if v is None else v for v in self._seen))[0]
            return result
        self._calls.clear()
        result = self._through_dynamo(ids_BT)
        self._look(ids_BT, result)
        return result

    def forget(self) -> None:
        """Two calls have to confirm again that inputs are the same: tensors in other tensors' places are then seen."""
        self._confirmed = self._seen = None

    def _look(self, ids_BT: torch.Tensor, result: torch.Tensor) -> None:
        """Whether the call that has just been made is one of some code with what was given the time before."""
        calls, self._calls = self._calls, []
        if len(calls) != 1:
            return
        code, inputs, results = calls[0]
        found = [None if v is ids_BT else v for v in inputs]
        plain = len(results) == 1 and results[0] is result and found.count(None) == 1
        before, self._seen = self._seen or [], found
        same = len(found) == len(before) and all(a is b for a, b in zip(found, before, strict=True))
        self._confirmed = code if plain and same and not self._stay else None


def _recording(backend: str | Callable[..., Any], of: weakref.ref[Direct]) -> Callable[..., Any]:
    """``backend``, whose code tells a :class:`Direct` of its calls. Dynamo keeps backends and so all that they hold."""

    def compiled(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **settings: Any) -> Callable[..., Any]:
        code = torch._dynamo.lookup_backend(backend)(graph, inputs, **settings)

        def run(*args: Any) -> Any:
            results = code(*args)
            direct = of()
            if direct is not None:
                direct._calls.append((code, args, results))
            return results

        return run

    return compiled
