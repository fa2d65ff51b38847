"""Loading the shard of this process, in a group of ``torch.distributed`` (docs/DISTRIBUTED.md)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_pi2.base.fields import Field
from torch_pi2.base.reading import parse
from torch_pi2.base.version import __version__
from torch_pi2.distributed.group import Group
from torch_pi2.distributed.pipeline_parallel import connect_stages
from torch_pi2.distributed.ranks import Ranks
from torch_pi2.distributed.shard_store import check_together, common_hash, ranks_of, shard_name, shards_in
from torch_pi2.distributed.tensor_parallel import Share, agree_on_logits
from torch_pi2.errors import ConfigError
from torch_pi2.ops.activations import cuts
from torch_pi2.store.storefile import StoreReader
from torch_pi2.types.plan import Plan
from torch_pi2.types.shard import GroupConfig, Shard

#: What folders of one model may say differently in config.json; its dtype is compared where it is chosen.
_NOT_OF_THE_MODEL = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype")


def own_shard(folder: Path) -> Path:
    """The folder of this process' shard if ``folder`` has shards in it, else ``folder``.

    Raises:
        ConfigError: this is no process of a group of as many, or its shard is not here.
    """
    found = shards_in(folder)
    if not found:
        return folder
    ranks = ranks_of(next(iter(found.values())))
    rank = _check_group(str(folder), ranks)
    if rank not in found:
        raise ConfigError(
            str(folder),
            expected=f"{shard_name(rank, ranks)}, as this is process {rank}",
            found=", ".join(path.name for path in found.values()),
            fix="Copy that folder to this machine, or start the process on the machine that has it.",
        )
    return found[rank]


def _check_group(what: str, ranks: int) -> int:
    """The number of this process. Raises ConfigError: it is in no group of ``ranks``."""
    grouped = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if grouped else 1
    if size != ranks:
        raise ConfigError(
            what,
            expected=f"a group of {ranks} processes, one for each shard",
            found=f"{size} processes" if grouped else "a process that is in no group",
            fix=f"Start it with torchrun --nproc-per-node {ranks} (or --nnodes), and call "
            'torch.distributed.init_process_group("gloo"); or make other shards with torch-pi2 pack --ranks.',
        )
    return dist.get_rank()


@dataclass(frozen=True)
class Together:
    """What several processes have of one model.

    Attributes:
        group: they. shards: theirs, by rank. reduction: see :class:`~torch_pi2.types.shard.GroupConfig`.
    """

    group: Group
    shards: tuple[Shard, ...]
    reduction: str

    @property
    def own(self) -> Shard:
        """This process'."""
        return self.shards[self.group.rank]

    def share(self, key: str) -> Share:
        """Of a layer of which each has some neurons."""
        return Share(self.group, self.shards, key, self.reduction)

    def meet(self, model: Any) -> None:
        """``model``, which is loaded, asks the others for what is not here. Raises UnsupportedModelError."""
        if self.own.by_layers:
            connect_stages(model, self.own, self.group)
            return
        agree_on_logits(model, self.group)


def join(reader: StoreReader, plan: Plan, hf: Any, how: GroupConfig, settings: Mapping[str, Any]) -> Together:
    """All processes, which all call this; ``reader`` is of this one's shard.

    From now on all of them draw the random numbers that the first one draws.

    Args:
        hf: the configuration of the model, of transformers.
        settings: what else must be the same in all of them, by name.

    Raises:
        ConfigError: in all processes, where one of them has something else, or the shards are not all of one model.
        UnsupportedModelError: attention cannot be divided. Pi2Error: one of them has ended.
    """
    shard = reader.shard
    assert shard is not None
    rank = _check_group(str(reader.path), shard.ranks)
    check_kinds(plan)
    own = {
        "version of torch_pi2": __version__,
        "version of torch": torch.__version__,
        "instruction set": f"{torch.ops.pi2.kernel_tables()}, {torch.backends.cpu.get_cpu_capability()}",
        "model": f"{reader.model_hash} {plan.orders_hash}",
        "weights beside the neurons": common_hash(reader),
        "configuration": _hash_of(hf),
        "reduction": how.reduction,
        **{name: str(value) for name, value in settings.items()},
    }
    found = Ranks(together=True).each((rank, own, shard.to_json(), torch.get_rng_state()))
    first = found[0][1]
    for other, theirs, *_ in found:
        for name, value in first.items():
            if theirs[name] != value:
                raise ConfigError(
                    f"{name} of process {other} of {shard.ranks}",
                    expected=f"{value}, as process 0 has",
                    found=theirs[name],
                    fix="Give all processes the same: they compute one model together.",
                )
    shards = tuple(Shard.from_json(Field(parse(text, "shard"), "shard", "")) for _, _, text, _ in found)
    check_together(shards, str(reader.path))
    torch.set_rng_state(found[0][3])
    group = Group(how.timeout_s)
    if shard.by_layers:
        group.connect_neighbours()
    return Together(group, shards, how.reduction)


def _hash_of(hf: Any) -> str:
    """Of what a configuration says of the model's arithmetic, wherever it is."""
    said = {name: value for name, value in hf.to_diff_dict().items() if name not in _NOT_OF_THE_MODEL}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def check_kinds(plan: Plan) -> None:
    """Raises ConfigError: layers that need all gates at once."""
    if key := next((layer.site.key for layer in plan.layers if cuts(layer.site.activation)), None):
        raise ConfigError(
            f"{key} in shards",
            expected="an activation of each neuron by itself",
            found="one that compares each gate with those of all neurons",
            fix="Load the whole model on one machine.",
        )
