"""Layers that look like an FFN but have no known form: they stay dense, and are reported with a reason.

This is looser than :mod:`.match`, whose walks it uses: weights may be computed (weight norm, tied by transposing), and
parameters, buffers and anything that does not mix tokens may stand between the projections.
"""

import re
from collections.abc import Iterable, Sequence, Set

from torch import fx, nn

from torch_pi2.graph.match import Match, Projection, Seen, Walk
from torch_pi2.graph.operations import CASTS, ELEMENTWISE, RESHAPES, op_name

#: Operations of a norm, and those around it that do not make a layer feed-forward.
_NORMS = re.compile(r"\w*norm|normalize|mean|sum|(var|std)(_mean)?")
_IN_NORMS = CASTS | RESHAPES | {"contiguous", "clone", "chunk", "split", "getitem", "narrow", "pow", "square", "sqrt"}
_IN_NORMS |= {"rsqrt", "reciprocal", "add", "sub", "mul", "multiply", "div", "truediv", "true_divide"}
#: Reason for an FFN with an adapter.
_MORE = "more matmuls than gate, up and down"


def skipped_layers(matches: Sequence[Match], seen: Seen) -> list[tuple[list[Projection], str]]:
    """Layers that look feed-forward, apart from those of matches and ``seen``; as ``seen.left``."""
    taken = {n for m in matches for n in (*m.inside, *m.down.nodes)}
    taken |= {n for projections, _ in (*seen.unknown, *seen.left) for p in projections for n in p.nodes}
    skipped: list[tuple[list[Projection], str]] = []
    for walk in seen.walks.values():
        if walk is None or walk.down.node in taken or not walk.region:
            continue
        if len(walk.sources) == 1 and _is_norm(walk.region):  # low rank with a norm, as in DeepSeek's queries
            continue
        latest = max(seen.order[source.x] for source in walk.sources)
        behind: list[
            Projection
        ] = []  # the latest sources: an adapter is two matmuls in a row, and a layer may have three
        for source in walk.sources:
            before = seen.walks[source.node] if seen.order[source.x] == latest else None
            behind += [source] if before is None else before.sources
        firsts = next((list(dict.fromkeys(some)) for some in (walk.sources, behind) if _begin(some, walk.down)), [])
        between = [source for source in walk.sources if source not in firsts]
        if firsts and taken.isdisjoint(s.node for s in (*firsts, *between)):
            reason = _reason(walk) or (_MORE if between or len(firsts) > 3 else "")
            if reason:
                skipped.append(([*firsts, *between, walk.down], reason))
    return skipped


def _begin(firsts: list[Projection], down: Projection) -> bool:
    """Whether these can be the first matmuls of a layer, which share one input."""
    hidden, intermediate = down.sizes
    fits = len({first.x for first in firsts}) == 1 and all(first.sizes[1] == hidden for first in firsts)
    return fits and any(first.sizes[0] >= intermediate for first in firsts)


def not_reached(model: nn.Module, reached: Set[int], apart: Iterable[str]) -> dict[str, str]:
    """Name -> reason of modules with an FFN's linears, none of which a graph ``reached``; without those ``apart``."""
    found: dict[str, str] = {}
    known = tuple(f"{name}." for name in apart)
    for name, module in model.named_modules():
        weights = [part.weight for part in module.children() if isinstance(part, nn.Linear)]
        shapes = {tuple(weight.shape) for weight in weights}
        is_ffn = len(weights) in (2, 3) and len(shapes) == 2 and {(h, i) for i, h in shapes} == shapes
        is_ffn = is_ffn and min(weights[0].shape) * 8 > max(weights[0].shape)  # an adapter is narrower
        own = [id(p) for part in module.children() if isinstance(part, nn.Linear) for p in part.parameters()]
        if is_ffn and reached.isdisjoint(own) and not f"{name}.".startswith(known):
            found[name] = "the example inputs do not reach it, or it is kept from torch.compile"
    return found


def _is_norm(region: list[fx.Node]) -> bool:
    names = {op_name(node.target) for node in region}
    norms = {name for name in names if _NORMS.fullmatch(name)}
    return bool(norms) and names - norms <= _IN_NORMS


def _reason(walk: Walk) -> str:
    linears = [*walk.sources, walk.down]
    if len({n for p in linears for n in p.own}) < sum(len(p.own) for p in linears):
        return "its matmuls share weights"
    if any(p.own != (p.weight,) for p in linears):
        return "weights that are computed from parameters"
    names = list(dict.fromkeys(op_name(n.target) for n in walk.region))
    other = [name for name in names if name not in ELEMENTWISE]
    if other and all(map(_NORMS.fullmatch, other)):
        return "a norm over all its neurons stands before the last matmul"
    if any(node.op == "placeholder" for node in walk.own):
        return "an activation with parameters of its own between its matmuls"
    if other:
        return f"{', '.join(other)} between its matmuls"
    return "numbers of its own between its matmuls" if walk.own else ""
