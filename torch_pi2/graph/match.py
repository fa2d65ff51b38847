"""Find feed-forward layers in an FX graph by structure alone.

From every matmul with a parameter (the candidate *down*), walk back through elementwise operations to the matmuls they
start from (*gate* and *up*), which must share their input. The region between is recognised by :mod:`.activation`.
Attention never matches: operations that mix tokens, and products of activations, stop the walk. A walk that meets other
operations is no match, but goes on: :mod:`.skipped` says why the layer stays dense. Used on captured graphs of eager
models, and by the compile backend on Dynamo graphs.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from torch_pi2.graph.activation import identify
from torch_pi2.graph.operations import CASTS, ELEMENTWISE, RESHAPES, is_in_place, op_name, uncast
from torch_pi2.ops.activations import Shaped, exact_zeros
from torch_pi2.types.site import FFNSite, Formula, LinearRef

Tensors = Mapping[fx.Node, torch.Tensor]

#: Larger regions are no FFNs; walking the whole residual stream of a norm-free model would take time.
_MAX_REGION, _MAX_WALK = 64, 256
#: Operations that mix tokens or activations, which no feed-forward layer has inside.
_MIXES = re.compile(
    "conv|attention|matmul|mm$|bmm|einsum|dot|embedding|fft|scan|lstm|gru|rnn|interpolate|pool|roll|shift|index_add"
    "|transpose|permute|stack|solve|autograd_function|wrap"
)
#: Operations that make constants.
_CONSTANTS = frozenset(["tensor", "broadcast_tensors"])
#: Statistics over all neurons of a token, allowed in known formulas only.
_STATISTICS = frozenset(["mean", "std"])
#: Probe elements above which a region with literal sizes is left alone (1 GiB of float64).
_MAX_PROBE = 1 << 27


@dataclass(frozen=True)
class Projection:
    """``x @ weight.T + bias`` in a graph, however spelled; ``nodes`` compute it, the last is its result.

    ``transposed``: the weight is ``[in, out]``, as in ``x @ weight + bias``. ``own``: the parameters it is computed
    from, only itself unless there is weight norm or the like.
    """

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    nodes: tuple[fx.Node, ...]
    transposed: bool
    own: tuple[fx.Node, ...]

    @property
    def node(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        n_out, n_in = (size_hint(size) for size in self.weight.meta["example_value"].shape)
        return (n_in, n_out) if self.transposed else (n_out, n_in)

    def is_plain(self, tensors: Tensors) -> bool:
        """Whether weight and bias are parameters themselves."""
        return self.weight in tensors and (self.bias is None or _is_parameter(self.bias, tensors, 1))


@dataclass(frozen=True)
class Stream:
    """Output rows of a projection that make the gate or the up; ``rows`` None means all."""

    projection: Projection
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Match:
    """One FFN in a graph; ``inside`` lists projections and region in graph order, without ``down``'s nodes. ``scaled``:
    the only use of its result, if that is a product with a number; and the number.
    """

    x: fx.Node
    gate: Stream | None
    up: Stream
    down: Projection
    activation: str
    activation_on_up: bool
    hidden: int
    intermediate: int
    inside: tuple[fx.Node, ...]
    region: tuple[fx.Node, ...]
    scaled: tuple[fx.Node, float] | None = None

    @property
    def projections(self) -> list[Projection]:
        """Gate, if there is one, up and down."""
        gate = [self.gate.projection] if self.gate else []
        return [*gate, self.up.projection, self.down]

    def site(self, name_of: Callable[[fx.Node], str], **where: Any) -> FFNSite:
        """The site of this FFN. ``name_of``: names of parameters; ``where``: fields that a graph does not give."""

        def ref(stream: Stream) -> LinearRef:
            p = stream.projection
            bias = None if p.bias is None else name_of(p.bias)
            return LinearRef(name_of(p.weight), bias, stream.rows, transposed=p.transposed)

        return FFNSite(
            activation=self.activation,
            activation_on_up=self.activation_on_up,
            gate=None if self.gate is None else ref(self.gate),
            up=ref(self.up),
            down=ref(Stream(self.down)),
            hidden=self.hidden,
            intermediate=self.intermediate,
            **where,
        )


@dataclass
class Walk:
    """The computation of the input of ``down``: projections (``sources``) and the operations between (``region``), in
    graph order; ``own``: parameters, buffers and constants among their operands. ``blocked``: the first operation that
    no matching FFN has, or empty.
    """

    down: Projection
    sources: list[Projection]
    region: list[fx.Node]
    own: list[fx.Node]
    blocked: str


@dataclass
class Seen:
    """Observations of a search, for messages: linears, what blocked each walk, and FFNs that cannot be made sparse.

    ``unknown``: FFNs with an unknown formula (its operations); ``left``: others with a reason; both with their
    projections, down last. ``walks``: by the node of down.
    """

    order: dict[fx.Node, int]
    linears: int = 0
    blocked_by: list[str] = field(default_factory=list)
    unknown: list[tuple[list[Projection], str]] = field(default_factory=list)
    left: list[tuple[list[Projection], str]] = field(default_factory=list)
    walks: dict[fx.Node, Walk | None] = field(default_factory=dict)


def match_ffns(gm: fx.GraphModule, tensors: Tensors, buffers: Tensors | None = None) -> tuple[list[Match], Seen]:
    """All FFNs of ``gm``, at Dynamo level, in order of execution; ``tensors``, ``buffers``: placeholder -> its
    parameter or buffer.
    """
    seen = Seen({node: index for index, node in enumerate(gm.graph.nodes)})
    held = {**(buffers or {}), **tensors}
    projections: dict[fx.Node, Projection] = {}
    for node in gm.graph.nodes:
        projection = _as_matmul(node, held) or _as_bias_add(node, projections, held)
        if projection is not None:
            projections[node] = projection
    inner = {node for p in projections.values() for node in p.nodes[:-1]}
    seen.linears = len(projections) - len(inner & projections.keys())
    matches: list[Match] = []
    taken: set[fx.Node] = set()
    for node, down in projections.items():
        if node in inner:
            continue
        walk = seen.walks[node] = _walk_back(down, projections, held, seen)
        match = None if walk is None else _match_down(gm, walk, tensors, taken, seen)
        if match is not None:
            matches.append(match)
            taken.update(match.inside, down.nodes)
    return matches, seen


def _is_parameter(node: Any, tensors: Tensors, dims: int) -> bool:
    return isinstance(node, fx.Node) and node in tensors and tensors[node].dim() == dims


def _as_matmul(node: fx.Node, tensors: Tensors) -> Projection | None:
    if node.op not in ("call_function", "call_method"):
        return None
    name = op_name(node.target)
    bias = None
    if name == "linear":
        bound = dict(zip(("input", "weight", "bias"), node.args)) | node.kwargs
        x, weight, bias = bound.get("input"), bound.get("weight"), bound.get("bias")
        transposed = False
    elif name in ("matmul", "mm") and len(node.args) == 2:  # FalconLinear: x @ weight.T
        (x, weight), transposed = node.args, True
    elif name == "addmm" and len(node.args) == 3 and not node.kwargs:  # Conv1D: bias + x @ weight
        (bias, x, weight), transposed = node.args, True
    elif name == "einsum" and len(node.args) == 3 and not node.kwargs and (layout := _einsum_layout(node)):
        (_, x, weight), transposed = node.args, layout == "in, out"
    else:
        return None
    if (stored := _turned(weight)) is not None:
        weight, transposed = stored, not transposed
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    own = _made_of(weight, tensors)
    if not own or len(getattr(weight.meta.get("example_value"), "shape", ())) != 2:
        return None
    return Projection(x, weight, bias, (node,), transposed, own)  # type: ignore[arg-type]


def _made_of(weight: fx.Node, tensors: Tensors) -> tuple[fx.Node, ...]:
    """The parameters that a weight is computed from; empty if it depends on anything else."""
    todo, seen = [weight], dict[fx.Node, None]()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen[node] = None
            if node.op in ("call_function", "call_method") and len(seen) < 64:
                todo.extend(node.all_input_nodes)
            elif node not in tensors and node.op != "get_attr":
                return ()
    return tuple(node for node in seen if node in tensors)


def _einsum_layout(node: fx.Node) -> str:
    """``in, out`` or ``out, in``: layout of the matrix of an einsum that is a linear layer; empty if it is not."""
    dims = getattr(getattr(node.args[1], "meta", {}).get("example_value"), "dim", lambda: 0)()
    generator = torch.Generator().manual_seed(dims)
    x, w = torch.randn((*range(4, 3 + dims), 3), generator=generator), torch.randn(3, 2, generator=generator)
    wanted = x @ w
    for layout, weight in (("in, out", w), ("out, in", w.T)):
        try:
            found = torch.einsum(str(node.args[0]), x, weight)
        except RuntimeError:  # sizes that do not fit
            continue
        if found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-5):
            return layout
    return ""


def _turned(node: Any) -> fx.Node | None:
    """The matrix that ``node`` transposes, if it does."""
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    name, rest = op_name(node.target), list(node.args[1:])
    if len(rest) == 1 and isinstance(rest[0], (tuple, list)):
        rest = list(rest[0])
    swaps = name in ("transpose", "swapaxes", "permute") and {d % 2 for d in rest if isinstance(d, int)} == {0, 1}
    swaps = swaps and (name != "permute" or rest[0] in (1, -1))
    if name in ("t", "numpy_T", "adjoint") or swaps or (name == "getattr" and rest in (["T"], ["mT"])):
        return node.args[0]
    return None


def _as_bias_add(node: fx.Node, found: Mapping[fx.Node, Projection], tensors: Tensors) -> Projection | None:
    if node.op not in ("call_function", "call_method") or op_name(node.target) != "add":
        return None
    if len(node.args) != 2 or node.kwargs:
        return None
    for base, bias in (node.args, node.args[::-1]):
        projection = found.get(base) if isinstance(base, fx.Node) else None
        if projection is None or projection.bias is not None or len(projection.node.users) != 1:
            continue
        if _is_parameter(bias, tensors, 1) and tensors[bias].shape[0] == projection.sizes[0]:  # type: ignore[index]
            return replace(projection, bias=bias, nodes=(*projection.nodes, node))  # type: ignore[arg-type]
    return None


def _match_down(gm: fx.GraphModule, walk: Walk, tensors: Tensors, taken: set[fx.Node], seen: Seen) -> Match | None:
    down, sources, region, order = walk.down, walk.sources, walk.region, seen.order
    if walk.blocked or not all(p.is_plain(tensors) for p in (*sources, down)):
        return None
    hidden, intermediate = down.sizes
    inputs = {p.x for p in sources}
    if len(inputs) != 1 or any(p.sizes[1] != hidden for p in sources):
        return None
    inside = sorted({n for p in sources for n in p.nodes} | set(region), key=order.__getitem__)
    if taken.intersection(inside) or taken.intersection(down.nodes):
        return None
    shapes = _probe_shapes(sources, region)
    if shapes is None:
        return None
    norm = _norm_before(gm, walk, tensors)
    if norm is None and any(node.op == "placeholder" for node in walk.own):
        return None  # :mod:`.skipped` reports it
    h = down.x if norm is None else norm.h

    def evaluate(probes: Sequence[torch.Tensor]) -> torch.Tensor:
        until = len(region) if norm is None else region.index(h) + 1 if h in region else 0
        return _evaluate(gm, h, {p.node: probe for p, probe in zip(sources, probes)}, region[:until])

    found = identify(evaluate, shapes, intermediate)
    if found == "linear":
        return None
    if not isinstance(found, Formula):
        if intermediate < hidden or any(op_name(node.target) in _STATISTICS for node in region):
            return None  # a product of low rank, or a norm, which :mod:`.skipped` reports
        seen.unknown.append(([*sources, down], ", ".join(dict.fromkeys(op_name(n.target) for n in region))))
        return None
    if norm is not None:
        if found.gate is None or found.on_up or len(sources) < 2 or not exact_zeros(found.activation):
            return None  # :mod:`.skipped` reports it
        if sources[found.up].bias is not None or "[" in found.activation:
            return None
        sources = [replace(p, bias=norm.weight) if i == found.up else p for i, p in enumerate(sources)]
        found = replace(found, activation=Shaped(found.activation, rms=norm.eps).text)
    x = inputs.pop()
    allowed = set(inside) | set(down.nodes)
    escaping = next((u for n in inside for u in n.users if u not in allowed), None)
    left = ""
    if escaping is not None:
        left = f"{op_name(escaping.target)} uses what it computes inside"
    # a changed tensor may be a view of the input, so any in-place change in between counts
    elif any(
        _changes_something(n) and order[inside[0]] < order[n] < order[down.node] for n in order if n not in allowed
    ):
        left = "something is changed in place between its projections"
    elif rounded := next((n for n in region if _rounds(n, sources[0].node)), None):
        left = f"a cast to {rounded.meta['example_value'].dtype} between its projections"
    if left:
        seen.left.append(([*sources, down], left))
        return None
    both = [Stream(sources[0], (0, intermediate)), Stream(sources[0], (intermediate, 2 * intermediate))]
    streams = both if sources[0].sizes[0] == 2 * intermediate else [Stream(p) for p in sources]
    gate = None if found.gate is None else streams[found.gate]
    scaled = None if norm or found.on_up or down.bias is not None else _scaled(down.node)
    formula = (found.activation, found.on_up, hidden, intermediate)
    return Match(x, gate, streams[found.up], down, *formula, tuple(inside), tuple(region), scaled)


@dataclass(frozen=True)
class _Norm:
    """``h * weight / sqrt(mean(h ** 2) + eps)``, all that stands between the node ``h`` and ``down``."""

    h: fx.Node
    weight: fx.Node
    eps: float


def _norm_before(gm: fx.GraphModule, walk: Walk, tensors: Tensors) -> _Norm | None:
    """The RMSNorm over all neurons of the input of ``down``, recognised by what it computes."""
    region, down, order = walk.region, walk.down, {node: i for i, node in enumerate(walk.region)}
    if [node for node in walk.own if _is_parameter(node, tensors, 1)] != walk.own or len(walk.own) != 1:
        return None
    weight, width = walk.own[0], down.sizes[1]
    if tensors[weight].shape != (width,) or not any(_STATISTICS & {op_name(node.target)} for node in region):
        return None
    w = torch.linspace(0.5, 2.0, width, dtype=torch.float64)
    x = torch.sin(torch.arange(4 * width).double()).view(4, width) * w.new_tensor([[1e-4], [1e-2], [1], [1e3]])
    for h in reversed(region[:-1]):
        after = [node for node in region if order[node] > order[h]]
        if any(node not in (h, weight, *after) for user in after for node in user.all_input_nodes):
            continue  # something else reaches what follows
        try:
            small, found = (_evaluate(gm, down.x, {h: v, weight: w}, after) for v in (torch.full_like(x, 1e-12), x))
        except Exception:  # any error: no norm
            continue
        eps = float(f"{(float(w[0]) * 1e-12 / float(small.flatten()[0])) ** 2:.6g}") if small.shape == x.shape else 0
        if eps > 0 and found.shape == x.shape and torch.allclose(found, F.rms_norm(x, (width,), w, eps), 1e-6, 0):
            return _Norm(h, weight, eps)
    return None


def _scaled(node: fx.Node) -> tuple[fx.Node, float] | None:
    user = next(iter(node.users), None)
    if user is None or len(node.users) != 1 or op_name(user.target) not in ("mul", "multiply") or user.kwargs:
        return None
    if user.op not in ("call_function", "call_method") or is_in_place(user.target, user.args, user.kwargs):
        return None
    numbers = [arg for arg in user.args if isinstance(arg, int | float) and not isinstance(arg, bool)]
    return (user, float(numbers[0])) if len(numbers) == 1 and len(user.args) == 2 and numbers[0] != 0 else None


def _walk_back(down: Projection, projections: Mapping[fx.Node, Projection], held: Tensors, seen: Seen) -> Walk | None:
    """The walk from ``down``; None if its input depends on more than projections and what is ``held``."""
    sources: dict[fx.Node, Projection] = {}
    region: set[fx.Node] = set()
    own: dict[fx.Node, None] = {}
    blocked, order = "", seen.order
    todo = [down.x]
    while todo and len(region) <= _MAX_WALK:
        node = todo.pop()
        if node in region or node in sources:
            continue
        name = op_name(node.target) if node.op in ("call_function", "call_method") else ""
        problem = "" if node in projections or _is_parameter(node, held, 1) else _blocks(node)
        if len(region) > _MAX_REGION:
            problem = "a long chain of elementwise operations"
        if problem and not blocked:
            blocked = problem
            seen.blocked_by.append(problem)
        if node in projections:
            sources[node] = projections[node]
        elif node in held or node.op == "get_attr":
            own[node] = None
        elif name and not _MIXES.search(name):
            region.add(node)
            todo.extend(n for n in node.all_input_nodes if _is_tensor(n))
        else:
            return None
        # h.relu_() leaves its result in h: such nodes belong to the region although they have no users
        todo.extend(u for u in node.users if order[u] < order[down.node] and _mutates(u, node))
    if not sources or todo:
        return None
    ordered = sorted(sources.values(), key=lambda p: order[p.node])
    return Walk(down, ordered, sorted(region, key=order.__getitem__), list(own), blocked)


def _blocks(node: fx.Node) -> str:
    """Description of ``node``, no projection, if no matching FFN has it; empty if it may stand in one."""
    if node.op not in ("call_function", "call_method"):
        return "" if node.op == "get_attr" else "its own input"  # a constant that Dynamo made
    if not _may_stand_between(node):
        return op_name(node.target)
    return f"{op_name(node.target)} of tokens" if _cuts_tokens(node) else ""


def _may_stand_between(node: fx.Node) -> bool:
    name = op_name(node.target)
    if name not in _STATISTICS:
        return name in ELEMENTWISE or name in _CONSTANTS
    source = node.args[0] if node.args else None
    example = source.meta.get("example_value") if isinstance(source, fx.Node) else None
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    dims = dims if isinstance(dims, list | tuple) else [dims]
    return isinstance(example, torch.Tensor) and len(dims) == 1 and dims[0] in (-1, example.dim() - 1)


def _rounds(node: fx.Node, source: fx.Node) -> bool:
    """Whether ``node`` is a cast to a dtype that cannot hold all values of ``source``."""
    dtypes = [getattr(n.meta.get("example_value"), "dtype", torch.float64) for n in (node, source)]
    if op_name(node.target) not in CASTS or not all(dtype.is_floating_point for dtype in dtypes):
        return False
    return dtypes[0] != dtypes[1] and dtypes[0].itemsize <= dtypes[1].itemsize


def _mutates(user: fx.Node, node: fx.Node) -> bool:
    called_on_it = user.op in ("call_function", "call_method") and bool(user.args) and user.args[0] is node
    return called_on_it and is_in_place(user.target, user.args, user.kwargs)


def _changes_something(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    schema = getattr(node.target, "_schema", None)
    sets = op_name(node.target) == "setitem" or node.kwargs.get("out") is not None
    mutable = schema is not None and schema.is_mutable
    return bool(sets or mutable or is_in_place(node.target, node.args, node.kwargs))


def _cuts_tokens(node: fx.Node) -> bool:
    """Whether a slice, split or the like works on another dimension than the last, which probes may not show."""
    source = node.args[0] if node.args else None
    example = source.meta.get("example_value") if isinstance(source, fx.Node) else None
    if not isinstance(example, torch.Tensor):  # an item of what split or chunk returned
        return False
    name, last = op_name(node.target), example.dim() - 1
    if name == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        where = next((i for i, part in enumerate(index) if part is Ellipsis), len(index))
        given = len(index) - (where < len(index))
        of_dims = [*index[:where], *[slice(None)] * (last + 1 - given), *index[where + 1 :]]
        tokens = last - 1 if _halves_last(source) else last
        return any(part != slice(None) for part in of_dims[:tokens])
    places = {"chunk": 2, "split": 2, "tensor_split": 2, "narrow": 1}
    if name not in places:
        return False
    dim = node.kwargs.get("dim", node.args[places[name]] if len(node.args) > places[name] else 0)
    return dim not in (-1, last)


def _halves_last(node: Any) -> bool:
    """Whether it splits the last dimension in two, gate and up: ``h.view(batch, tokens, 2, -1)``."""
    if op_name(node.target) not in ("view", "reshape", "unflatten"):
        return False
    before, after = (getattr(n.meta.get("example_value"), "shape", ()) for n in (node.args[0], node))
    return len(after) == len(before) + 1 > 2 and after[: len(before) - 1] == before[:-1]


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return not isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size))


def size_hint(value: Any) -> int:
    """A size as a number; for symbolic sizes, that of the example."""
    node = getattr(value, "node", None)
    return int(node.hint if node is not None and node.hint is not None else value)


def _probe_shapes(sources: Sequence[Projection], region: Sequence[fx.Node]) -> list[tuple[int, ...]] | None:
    """Shapes of probes: the real ones if sizes are written into the region, else a few rows."""
    literal = any(op_name(node.target) in RESHAPES for node in region)
    shapes = []
    for projection in sources:
        example = projection.node.meta.get("example_value")
        if not isinstance(example, torch.Tensor):
            return None
        real = tuple(size_hint(size) for size in example.shape)
        shapes.append(real if literal or len(real) < 2 else (*[1] * (len(real) - 2), 4, real[-1]))
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    return shapes if elements <= _MAX_PROBE else None


def _evaluate(
    gm: fx.GraphModule, result: fx.Node, given: Mapping[fx.Node, torch.Tensor], region: Sequence[fx.Node]
) -> torch.Tensor:
    values: dict[fx.Node, Any] = dict(given)

    def value(node: fx.Node) -> Any:
        if node in values:
            return values[node]
        if node.op == "get_attr":
            return attrgetter(str(node.target))(gm)
        return size_hint(node.meta["example_value"])

    for node in region:
        args: Any = fx.map_arg(node.args, value)
        kwargs: Any = fx.map_arg(node.kwargs, value)
        if "device" in kwargs:  # a constant, in a model on meta
            kwargs = {**kwargs, "device": "cpu"}
        if node.op == "call_method":
            values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        if op_name(node.target) in CASTS and args[0].dim():  # casts of constants count
            values[node] = uncast(args[0], values[node])
    out = values[result]
    assert isinstance(out, torch.Tensor)
    return out
