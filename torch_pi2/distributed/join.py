"""Loads this process' shard and joins the group in ``torch.distributed`` (docs/DISTRIBUTED.md)."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_pi2.base.fields import Field, argument
from torch_pi2.base.package import __version__
from torch_pi2.base.reading import parse
from torch_pi2.distributed.group import Group, of_each
from torch_pi2.distributed.pipeline_parallel import connect_stages
from torch_pi2.distributed.shard_store import check_complete, common_hash, shard_name, shards_in
from torch_pi2.distributed.tensor_parallel import Share, agree_on_logits
from torch_pi2.errors import ConfigError
from torch_pi2.ops.activations import of_all
from torch_pi2.store.storefile import StoreReader
from torch_pi2.types.plan import Plan
from torch_pi2.types.shard import GroupConfig, Shard

#: Keys of config.json that may differ between shards; the dtype is compared separately.
_IGNORED = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype")


def own_shard(folder: Path) -> Path:
    """This process' shard in ``folder``, or ``folder`` if it has none. Raises ConfigError: no group of that size."""
    shards = shards_in(folder)
    if not shards:
        return folder
    ranks = int(next(iter(shards.values())).name.rpartition("-")[2])
    rank = _check_group(str(folder), ranks)
    if rank not in shards:
        fix = "Copy that folder to this machine, or start the process on the machine that has it."
        expected = f"{shard_name(rank, ranks)}, as this is process {rank}"
        argument(folder, str(folder), fix).wrong(expected, ", ".join(path.name for path in shards.values()))
    return shards[rank]


def _check_group(what: str, ranks: int) -> int:
    """This process' rank. Raises ConfigError: it is in no group of ``ranks``."""
    grouped = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if grouped else 1
    if size != ranks:
        found, call = f"{size} processes" if grouped else "a process that is in no group", 'init_process_group("gloo")'
        start = f"Start it with torchrun --nproc-per-node {ranks} (or --nnodes), and call torch.distributed.{call}"
        expected = f"a group of {ranks} processes, one for each shard"
        fix = f"{start}; or make other shards with torch-pi2 pack --ranks."
        raise ConfigError(what, expected=expected, found=found, fix=fix)
    return dist.get_rank()


@dataclass(frozen=True)
class Membership:
    """This process in a group; ``shards``: of all processes, by rank. ``reduction``: see ``GroupConfig``."""

    group: Group
    shards: tuple[Shard, ...]
    reduction: str

    @property
    def own(self) -> Shard:
        return self.shards[self.group.rank]

    def share(self, key: str) -> Share:
        """This process' share of a layer that is divided by neurons."""
        return Share(self.group, self.shards, key, self.reduction)

    def connect(self, model: Any) -> None:
        """Connect a loaded ``model`` with the other processes. Raises UnsupportedModelError."""
        if self.own.by_layers:
            connect_stages(model, self.own, self.group)
        else:
            agree_on_logits(model, self.group)


def join(reader: StoreReader, plan: Plan, hf: Any, how: GroupConfig, settings: Mapping[str, Any]) -> Membership:
    """Join the group; all processes call this with a ``reader`` of their shard, and from then on draw the same random
    numbers. ``hf``: transformers' configuration. ``settings``: further ones that must be equal in all processes. Raises
    in all processes ConfigError: a setting differs, or the shards do not form one model; Pi2Error: one has ended.
    """
    shard = reader.shard
    assert shard is not None
    _check_group(str(reader.path), shard.ranks)
    check_activations(plan)
    said = {name: value for name, value in hf.to_diff_dict().items() if name not in _IGNORED}
    own = {"version of torch_pi2": __version__, "version of torch": torch.__version__}
    own["instruction set"] = f"{torch.ops.pi2.kernel_tables()}, {torch.backends.cpu.get_cpu_capability()}"
    own |= {"model": f"{reader.model_hash} {plan.orders_hash}", "weights beside the neurons": common_hash(reader)}
    own["configuration"] = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()
    own |= {"reduction": how.reduction, **{name: str(value) for name, value in settings.items()}}
    everyone = of_each(lambda: (own, shard.to_json(), torch.get_rng_state()))
    first, _, random_state = everyone[0]
    for rank, (theirs, *_) in enumerate(everyone):
        for name, value in first.items():
            if theirs[name] != value:
                fix = "Give all processes the same: they compute one model together."
                expected = f"{value}, as process 0 has"
                argument(theirs[name], f"{name} of process {rank} of {shard.ranks}", fix).wrong(expected, theirs[name])
    shards = tuple(Shard.from_json(Field(parse(text, "shard"), "shard", "")) for _, text, _ in everyone)
    check_complete(shards, str(reader.path))
    torch.set_rng_state(random_state)
    group = Group(how.timeout_s)
    if shard.by_layers:
        group.connect_neighbours()
    return Membership(group, shards, how.reduction)


def check_activations(plan: Plan) -> None:
    """Raises ConfigError: a layer needs the neurons of a token at once."""
    if key := next((layer.site.key for layer in plan.layers if of_all(layer.site.activation)), None):
        argument(plan, f"{key} in shards", "Load the whole model on one machine.").wrong(
            "an activation of each neuron by itself", "one that depends on all neurons of a token"
        )
