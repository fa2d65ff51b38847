"""The plan of a model for one machine: for every batch size what is hot, where it is, and how the rest is read.

``solve`` minimises the predicted time of a step (:mod:`torch_pi2.planner.cost`) under budgets that hold in every case:

* In memory layers are independent, and every hot count of every layer is looked at: the optimum, but for counts whose
  time differs by less than 1 %, of which the fewest hot are taken; and for the most frequent neurons being hot, as in
  the first plan, if that takes less than 2 % longer: predictions are not that exact.
* With an accelerator of limited memory, shared by all batch sizes, counts of all layers are chosen together by an
  integer program over the same times (:func:`torch_pi2.planner.accelerator.choose`), beside the most frequent ones.
* Over a store layers share the cache. Candidates come from prices of a read and of a slot of the cache, the same
  whatever the budget, and from the simple plans (:mod:`torch_pi2.planner.baselines`); each is predicted as a whole, and
  the best is taken. So it is never slower than the simple plans, nor than with a smaller budget, in the model's own
  estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch_pi2.base.progress import bar
from torch_pi2.errors import ConfigError
from torch_pi2.planner.accelerator import caps
from torch_pi2.planner.baselines import KINDS, simple_choice
from torch_pi2.planner.choices import Choice, Price, Space, prices
from torch_pi2.planner.drive import read_ms, stream_ms
from torch_pi2.planner.layer_cost import without_rest
from torch_pi2.planner.misses import MissCurve
from torch_pi2.planner.model_shape import ModelShape
from torch_pi2.planner.passes import pass_steps
from torch_pi2.planner.prompt_cost import prompt_plan
from torch_pi2.planner.request import BATCHES, Task, assemble, check
from torch_pi2.types.machine_plan import Bucket, HardwarePlan

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware

#: Of the cache, what never leaves it: tried where misses can tell them apart; else the first, as measured for ``lfu``
#: (:class:`torch_pi2.OffloadConfig`).
_RESIDENT_SHARES = (0.25, 0.0, 0.5, 0.75, 0.9)
#: Shares of layers, evenly spaced, that are all hot in candidates where the others are not: what a cache lacks of them
#: comes in one read.
_MIXED = tuple(n / 8 for n in range(1, 8))
#: By less than this share of a step nothing unusual is chosen.
_NEAR = 0.02
#: Candidates that recorded accesses are replayed with, beside simple plans.
_REPLAYED = 3


def solve(
    shape: ModelShape,
    hardware: Hardware,
    *,
    budget_bytes: int | None = None,
    accelerator_bytes: int = 0,
    batches: Sequence[int] = BATCHES,
    context: int = 1024,
    misses: MissCurve | Mapping[str, MissCurve] | None = None,
    min_recall: float | None = None,
    one_boundary: bool = False,
    clusters: Sequence[int] | None = None,
    weights: Mapping[int, float] | None = None,
    progress: bool = False,
) -> HardwarePlan:
    """The plan with the least predicted time. The same arguments give the same plan.

    Args:
        budget_bytes: of memory, for everything of a model over a store; hard at every batch size. None: in memory.
        accelerator_bytes: of an accelerator's memory, for hot neurons; hard, and the same neurons at all batch sizes.
        batches: sizes to plan for: a bucket each.
        context: tokens of each sequence whose keys and values have room.
        misses: of the cache: one curve, or a curve for each policy of the cache, of which the best is chosen (by the
            smallest batch). None: from frequencies, which cannot tell policies apart.
        min_recall: of what fires, the share that must be computed at every batch size, in the whole model: hot neurons
            count whole, others as their predictors find them.
        one_boundary: the same hot neurons at all batch sizes, so that results do not depend on the batch even where
            predictors miss some.
        clusters: neurons in a slot of a store, to choose from. The plan is then for a store that is packed so. None:
            as it is.
        weights: batch size -> weight of a token's time there (default 1).
        progress: a line on standard error, on terminals only, after two seconds.

    Raises:
        ConfigError: a budget that cannot be met, with the smallest that can; a recall that cannot be reached, with the
            highest that can; or settings that make no sense. UnsupportedModelError: an accelerator for neurons of two
            formats.
    """
    best: tuple[float, Task, HardwarePlan] | None = None
    for cluster in clusters or (shape.layers[0].cluster,):
        same = all(layer.cluster == cluster for layer in shape.layers)
        task = Task(
            shape if same else shape.with_cluster(cluster),
            hardware,
            budget_bytes,
            accelerator_bytes,
            batches,
            context,
            None if clusters else misses,
            min_recall,
            one_boundary,
            {} if weights is None else weights,
            progress=progress,
        )
        check(task)
        found, total = _Search(task).plan()
        if best is None or total < best[0]:
            best = total, task, found
    assert best is not None
    _, task, plan = best
    prompt = prompt_plan(task.shape, without_rest(hardware), plan.buckets[-1], task.stored)
    return replace(plan, prompt=prompt, passes=pass_steps(task, plan.buckets[0]))


class _Search:
    """Looks for the best choice of each batch size."""

    def __init__(self, task: Task) -> None:
        self.task = task
        accelerated = task.accelerator_bytes > 0
        self.space = Space(task.shape, task.used, task.batches, accelerated=accelerated, ticks=self._ticks("layers"))
        self._check_recall()

    def _ticks(self, what: str) -> Any:
        return lambda steps: bar(steps, f"plan, {what}", self.task.progress, delay=2)

    def _check_recall(self) -> None:
        for batch, floor in self.task.floors():
            most = self.space.most_recall(batch)
            if most < floor:
                raise ConfigError(
                    f"recall at batch {batch}",
                    expected=f"at most {int(most * 1e4) / 1e4:.4f}, with every neuron hot that may be",
                    found=f"{self.task.min_recall:g}",
                    fix="Ask for less, or fit predictors with a higher target_recall.",
                )

    def plan(self) -> tuple[HardwarePlan, float]:
        """The plan but for its prompt part, and its objective."""
        task = self.task
        self._choose_policy()
        best: tuple[float, dict[int, Choice]] | None = None
        plans = [
            self._together(most) if task.one_boundary else self._apart(most)
            for most in caps(task, self.space, self._prices())
        ]
        if task.accelerator_bytes:  # filled otherwise than within any of these
            plans += [dict.fromkeys(task.batches, choice) for choice in self._simple() if self._good(choice)]
        for chosen in plans:
            total = task.objective({batch: task.cost(batch, choice).total_ms for batch, choice in chosen.items()})
            if best is None or total < best[0]:
                best = total, chosen
        assert best is not None
        buckets = [self._bucket(batch, choice) for batch, choice in best[1].items()]
        made = assemble(task, buckets, "optimum")
        return made, task.objective({bucket.batch: bucket.total_ms for bucket in buckets})

    def _bucket(self, batch: int, choice: Choice) -> Bucket:
        task = self.task
        shares = _RESIDENT_SHARES if task.misses else _RESIDENT_SHARES[:1]
        residents = list(dict.fromkeys([task.resident(batch, choice, share) for share in shares]))
        usual = residents[0]
        resident = min(residents, key=lambda counts: task.cost(batch, choice, counts).total_ms)
        if task.cost(batch, choice, usual).total_ms <= (1 + _NEAR) * task.cost(batch, choice, resident).total_ms:
            resident = usual
        if not task.misses and task.cost(batch, choice).total_ms < task.cost(batch, choice, resident).total_ms:
            resident = (0,) * len(resident)
        ms = task.cost(batch, choice, resident).ms
        return Bucket(batch, choice.hot, choice.accelerator, resident, task.cache_bytes(batch), ms)

    def _choose_policy(self) -> None:
        """Of the policies whose misses are known, the one that is best at the smallest batch, with nothing hot."""
        task = self.task
        if len(task.misses) < 2:
            return
        batch = task.batches[0]
        choice = self.space.best(self.space.cost(batch, prices(1e3, 1e3)[1]))  # reads dear: little hot

        def ms(policy: str) -> float:
            task.offload["policy"] = policy
            return task.cost(batch, choice, task.resident(batch, choice, _RESIDENT_SHARES[0])).total_ms

        task.offload["policy"] = min(task.misses, key=ms)

    # --- choices ---

    def _prices(self) -> tuple[Price, ...]:
        shape, hardware = self.task.shape, self.task.hardware
        return prices(read_ms(shape, hardware), stream_ms(shape, hardware)) if self.task.stored else (Price(),)

    def _simple(self, most: Sequence[int] | None = None, other: Choice | None = None) -> list[Choice]:
        """Those of simple plans, and over a store mixtures by layer, with at most ``most`` on an accelerator."""
        made = {kind: simple_choice(self.task, kind) for kind in KINDS}
        choices = list(made.values())
        if self.task.stored:
            rest = (made["all-cold"], *([] if other is None else [other]))
            choices += [_mixed(made["all-hot"], base, share) for base in rest for share in _MIXED]
        if most is None:
            return choices
        if self.space.fixed:
            return [Choice(tuple(map(max, c.hot, most)), tuple(most)) for c in choices]
        return [Choice(c.hot, tuple(map(min, c.accelerator, most))) for c in choices]

    def _apart(self, most: Sequence[int] | None) -> dict[int, Choice]:
        return {batch: self._best(batch, most) for batch in self._ticks("batch sizes")(self.task.batches)}

    def _best(self, batch: int, most: Sequence[int] | None) -> Choice:
        floors = [(b, floor) for b, floor in self.task.floors() if b == batch]
        costs = (self.space.capped(self.space.cost(batch, price), most) for price in self._prices())
        made = [self.space.best_with(cost, floors) for cost in costs]
        made += [choice for choice in self._simple(most, made[0]) if self._good(choice, batch)]
        return self._first_best(made, lambda choice: self.task.cost(batch, choice).total_ms)

    def _together(self, most: Sequence[int] | None) -> dict[int, Choice]:
        task, floors = self.task, self.task.floors()
        made = []
        for price in self._prices():
            costs = [task.weight(b) * self.space.cost(b, price) for b in task.batches]
            made.append(self.space.best_with(self.space.capped(sum(costs[1:], costs[0]), most), floors))
        made += [choice for choice in self._simple(most, made[0]) if self._good(choice)]
        best = self._first_best(
            made, lambda choice: task.objective({b: task.cost(b, choice).total_ms for b in task.batches})
        )
        return dict.fromkeys(task.batches, best)

    def _first_best(self, made: Sequence[Choice], ms: Any) -> Choice:
        """The fastest. With recorded accesses, slow to replay, of simple plans and the best by frequencies."""
        task = self.task
        different = list(dict.fromkeys(made))
        if task.misses:
            known, task.misses = task.misses, {}
            costs, task._costs = task._costs, {}
            try:
                likely = sorted(different, key=ms)[:_REPLAYED]
            finally:
                task.misses, task._costs = known, costs
            simple = {simple_choice(task, kind).hot for kind in ("greedy", "all-hot", "all-cold")}
            different = [choice for choice in different if choice in likely or choice.hot in simple]
        best = min(different, key=ms)
        # Less is won than predictions are off. (From frequencies a larger budget must never be slower: no ties there.)
        usual = simple_choice(task, "greedy")
        loose = task.misses or not (task.stored or task.accelerator_bytes)
        return usual if loose and usual in different and ms(usual) <= (1 + _NEAR) * ms(best) else best

    def _good(self, choice: Choice, only: int | None = None) -> bool:
        """Whether the floors of quality are met, at all batch sizes or ``only`` at one."""
        floors = [(batch, floor) for batch, floor in self.task.floors() if only in (None, batch)]
        return all(self.space.recall(batch, choice) >= floor for batch, floor in floors)


def _mixed(some: Choice, others: Choice, share: float) -> Choice:
    """Every so manieth layer of ``some``, the rest of ``others``."""
    takes = [int((i + 1) * share) > int(i * share) for i in range(len(some.hot))]
    hot = tuple(a if take else b for take, a, b in zip(takes, some.hot, others.hot, strict=True))
    return Choice(hot, tuple(map(min, hot, others.accelerator)))
