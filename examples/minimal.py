"""PowerInfer-2's idea in one file, with nothing but PyTorch, NumPy and threads.

A feed-forward layer (FFN) computes ``down(relu(gate(x)) * up(x))``. Row i of ``gate``, row i of ``up`` and column i of
``down`` make **neuron** i, and a neuron whose gate is not positive adds nothing. This file, from top to bottom:

1. finds the FFNs of a model by what they compute,
2. profiles which neurons fire, on calibration text,
3. fits a low-rank predictor that says, before the gate is computed, which neurons will fire,
4. keeps the **hot** neurons, which fire often, as dense matrices in memory,
5. writes the **cold** ones to a file, one slot for each neuron,
6. caches the cold neurons that were used last (LRU),
7. reads missing neurons in clusters by a pool of threads while the hot neurons and the cached ones are computed,
8. generates text and compares it with the dense model's.

    python examples/minimal.py                         # exact gate: the same text as the dense model
    python examples/minimal.py --predictor low-rank    # predicted: fewer bytes in memory, an approximation

With the exact gate all gate rows stay in memory, so it is known which neurons fire, and ``up`` and ``down`` are read
for these alone. With a predictor the gate rows are on disk as well, and neurons that it misses are lost.

torch_pi2 itself does the same with quantised weights, SIMD kernels, ``O_DIRECT`` or io_uring, checksums, memory budgets
for everything, mixtures of experts, torch.compile and ExecuTorch. Reads here go through the page cache of the system,
so the times printed are no measurement of a drive.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import os
import tempfile
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Letters in names: T tokens, H hidden size, I neurons of an FFN, K hot neurons, N some neurons, R rank of a predictor.

CLUSTER = 32  # neurons that are read by one task of a reading thread


# 1. Find ------------------------------------------------------------------------------------------


@dataclass
class FFNSite:
    """One FFN of a model: its name, its module, its three matrices and which activation ``up`` has."""

    name: str
    module: nn.Module
    gate_IH: Tensor
    up_IH: Tensor
    down_HI: Tensor
    up_relu: bool  # dReLU: relu(gate) * relu(up); ReGLU: relu(gate) * up


def find_ffns(model: nn.Module) -> list[FFNSite]:
    """Modules of three linear layers that compute a gated ReLU FFN, whatever they are called.

    Each assignment of the three to gate, up and down is tried on random input; one with the module's result is taken.
    """
    found = {}
    for name, module in model.named_modules():
        linears = [child for child in module.children() if isinstance(child, nn.Linear) and child.bias is None]
        if len(linears) != 3:
            continue
        for down in linears:
            first, second = (linear for linear in linears if linear is not down)
            if not first.weight.shape == second.weight.shape == down.weight.T.shape:
                continue
            probe_TH = torch.randn(4, down.out_features, generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                expected_TH = module(probe_TH)
                for gate, up in ((first, second), (second, first)):
                    for up_relu in (True, False):
                        up_TI = torch.relu(up(probe_TH)) if up_relu else up(probe_TH)
                        if torch.allclose(down(torch.relu(gate(probe_TH)) * up_TI), expected_TH, atol=1e-5):
                            found[name] = FFNSite(name, module, gate.weight, up.weight, down.weight, up_relu)
    return list(found.values())  # dReLU matches both ways round: either will do


# 2. Profile ---------------------------------------------------------------------------------------


@dataclass
class Profile:
    """What calibration text showed of one FFN."""

    frequency_I: Tensor  # share of the tokens for which a neuron fires
    inputs_TH: Tensor  # inputs of the layer, to fit a predictor on


def profile(model: nn.Module, sites: list[FFNSite], ids_BT: Tensor) -> list[Profile]:
    """Runs the text through the dense model and looks at the inputs of each FFN."""
    inputs: list[list[Tensor]] = [[] for _ in sites]
    hooks = [
        site.module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].flatten(0, -2)))
        for site, seen in zip(sites, inputs)
    ]
    with torch.no_grad():
        for ids_T in ids_BT:
            model(ids_T[None])
        for hook in hooks:
            hook.remove()
        inputs_TH = [torch.cat(seen) for seen in inputs]
        return [Profile((x_TH @ site.gate_IH.T > 0).float().mean(0), x_TH) for site, x_TH in zip(sites, inputs_TH)]


# 3. Predict ---------------------------------------------------------------------------------------


class LowRankPredictor(nn.Module):
    """Which neurons fire: ``(x @ A) @ B > threshold`` (PowerInfer, Deja Vu), R much smaller than H and I."""

    def __init__(self, hidden: int, neurons: int, rank: int) -> None:
        super().__init__()
        self.a = nn.Linear(hidden, rank, bias=False)
        self.b = nn.Linear(rank, neurons)
        self.threshold = 0.0

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.b(self.a(x_TH))  # logits_TI

    @classmethod
    def fit(cls, site: FFNSite, seen: Profile, rank: int, recall: float, steps: int = 300) -> LowRankPredictor:
        """Trains on nine tenths of the samples; the rest sets the threshold that reaches the recall."""
        x_TH, held = seen.inputs_TH, len(seen.inputs_TH) // 10
        with torch.no_grad():
            fires_TI = (x_TH @ site.gate_IH.T > 0).float()
        torch.manual_seed(0)
        predictor = cls(x_TH.shape[1], fires_TI.shape[1], rank)
        # Starts from the gate itself, as its best approximation of this rank.
        u, s, v = torch.svd_lowrank(site.gate_IH.detach(), q=rank)
        with torch.no_grad():
            predictor.b.weight.copy_(u * s)
            predictor.a.weight.copy_(v.T)
            predictor.b.bias.zero_()
        optimizer = torch.optim.Adam(predictor.parameters(), lr=3e-3)
        for _ in range(steps):
            batch = torch.randint(held, len(x_TH), (256,))
            loss = F.binary_cross_entropy_with_logits(predictor(x_TH[batch]), fires_TI[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():  # recall of the held-back samples: the lowest logits of neurons that fire may be missed
            logits = predictor(x_TH[:held])[fires_TI[:held] > 0]
            predictor.threshold = logits.kthvalue(max(1, int((1 - recall) * logits.numel()))).values.item()
        return predictor.requires_grad_(False)


# 4, 5. Hot neurons in memory, cold ones in a file -------------------------------------------------


class NeuronStore:
    """A file of slots, one for each neuron of each layer: its gate row, its up row and its down column, in float32.

    A neuron is one contiguous read. A JSON header fills the first page. The file appears by rename, never half-written.
    """

    HEADER = 4096  # bytes

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_RDONLY)
        header = json.loads(os.pread(self.file, self.HEADER, 0))
        self.hidden, self.neurons = header["hidden"], header["neurons"]
        self.slot_bytes = 3 * 4 * self.hidden
        expected = self.HEADER + header["layers"] * self.neurons * self.slot_bytes
        if (size := os.fstat(self.file).st_size) != expected:
            raise ValueError(f"{path}: expected {expected} bytes, found {size}; write the store again")

    @classmethod
    def write(cls, path: Path, sites: list[FFNSite]) -> NeuronStore:
        neurons, hidden = sites[0].gate_IH.shape
        header = json.dumps({"layers": len(sites), "neurons": neurons, "hidden": hidden}).encode()
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as out:
            out.write(header.ljust(cls.HEADER))
            for site in sites:
                rows_I3H = torch.stack([site.gate_IH, site.up_IH, site.down_HI.T], dim=1)
                out.write(rows_I3H.detach().float().numpy().tobytes())
            out.flush()
            os.fsync(out.fileno())
        partial.rename(path)
        return cls(path)

    def read(self, layer: int, neuron: int, with_gate: bool) -> np.ndarray:
        """Rows of one neuron, [3, H], or [2, H] without the gate's."""
        skipped = 0 if with_gate else 4 * self.hidden
        at = self.HEADER + (layer * self.neurons + neuron) * self.slot_bytes + skipped
        data = os.pread(self.file, self.slot_bytes - skipped, at)
        return np.frombuffer(data, dtype=np.float32).reshape(-1, self.hidden)


# 6. Cache -----------------------------------------------------------------------------------------


class NeuronCache:
    """Rows of the cold neurons that were used last, in one array of a fixed size: the memory budget of one layer."""

    def __init__(self, slots: int, rows: int, hidden: int) -> None:
        self.rows_SRH, self.free = torch.empty(slots, rows, hidden), list(range(slots))
        self.slot_of: OrderedDict[int, int] = OrderedDict()  # neuron -> slot, the least recently used first

    def look_up(self, neurons: list[int]) -> tuple[list[int], list[int]]:
        """Those that are here, which become the most recently used, and those that are missing."""
        here = [neuron for neuron in neurons if neuron in self.slot_of]
        for neuron in here:
            self.slot_of.move_to_end(neuron)
        return here, [neuron for neuron in neurons if neuron not in self.slot_of]

    def rows(self, neurons: list[int]) -> Tensor:
        return self.rows_SRH[[self.slot_of[neuron] for neuron in neurons]]

    def insert(self, neuron: int, rows_RH: Tensor) -> None:
        if len(self.rows_SRH):
            slot = self.free.pop() if self.free else self.slot_of.popitem(last=False)[1]
            self.rows_SRH[slot], self.slot_of[neuron] = rows_RH, slot


# 7. The sparse layer, with reads behind its computation -------------------------------------------


@dataclass
class Counters:
    computed: int = 0  # neurons, cold and hot
    possible: int = 0
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    reading_s: float = 0.0  # by the threads
    waiting_s: float = 0.0  # by the computation, for reads that were not done yet


class SparseFFN(nn.Module):
    """Computes what the dense FFN computes, from hot matrices, a cache, and a store on disk."""

    def __init__(
        self,
        site: FFNSite,
        layer: int,
        hot_K: Tensor,
        store: NeuronStore,
        cache_slots: int,
        readers: ThreadPoolExecutor,
        predictor: LowRankPredictor | None,
        counters: Counters,
    ) -> None:
        super().__init__()
        self.layer, self.store, self.readers = layer, store, readers
        self.predictor, self.counters, self.up_relu = predictor, counters, site.up_relu
        self.neurons, hidden = site.gate_IH.shape
        is_hot_I = torch.zeros(self.neurons, dtype=torch.bool)
        is_hot_I[hot_K] = True
        self.cold_N = torch.nonzero(~is_hot_I).flatten()
        self.hot_gate_KH = site.gate_IH[hot_K].detach().clone()
        self.hot_up_KH = site.up_IH[hot_K].detach().clone()
        self.hot_down_KH = site.down_HI.T[hot_K].detach().clone()
        # With the exact gate the gate rows of cold neurons stay in memory.
        self.cold_gate_NH = site.gate_IH[self.cold_N].detach().clone() if predictor is None else None
        self.cache = NeuronCache(cache_slots, 2 if predictor is None else 3, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x_TH = x.flatten(0, -2)
        # Which cold neurons are wanted, by any of the tokens?
        gate_TN = None
        if self.predictor is None:
            gate_TN = torch.relu(x_TH @ self.cold_gate_NH.T)
            wanted = torch.nonzero(gate_TN.amax(0) > 0).flatten()
        else:
            logits_TI = self.predictor(x_TH)
            wanted = torch.nonzero((logits_TI > self.predictor.threshold).any(0)[self.cold_N]).flatten()
        index_of = dict(zip(self.cold_N[wanted].tolist(), wanted.tolist()))  # neuron -> its place among the cold ones
        here, missing = self.cache.look_up(list(index_of))
        # Reads begin now ...
        clusters = [missing[i : i + CLUSTER] for i in range(0, len(missing), CLUSTER)]
        reads: dict[Future, list[int]] = {self.readers.submit(self._read, cluster): cluster for cluster in clusters}
        # ... and go on while hot neurons and cached ones are computed.
        hot_gate_TK = torch.relu(x_TH @ self.hot_gate_KH.T)
        y_TH = self._times_up(hot_gate_TK, x_TH @ self.hot_up_KH.T) @ self.hot_down_KH
        if here:
            y_TH += self._cold(x_TH, gate_TN, [index_of[n] for n in here], self.cache.rows(here))
        began = time.perf_counter()
        for read in as_completed(reads):  # whichever cluster is there first
            self.counters.waiting_s += time.perf_counter() - began
            cluster, rows_NRH = reads[read], read.result()
            y_TH += self._cold(x_TH, gate_TN, [index_of[n] for n in cluster], rows_NRH)
            for neuron, rows_RH in zip(cluster, rows_NRH):
                self.cache.insert(neuron, rows_RH)
            began = time.perf_counter()
        self._count(len(here), len(missing))
        return y_TH.view_as(x)

    def _times_up(self, gate_TN: Tensor, up_TN: Tensor) -> Tensor:
        return gate_TN * (torch.relu(up_TN) if self.up_relu else up_TN)

    def _cold(self, x_TH: Tensor, gate_TN: Tensor | None, index: list[int], rows_NRH: Tensor) -> Tensor:
        """What some cold neurons add: their gates were computed before, or their gate rows are the first ones."""
        gates = torch.relu(x_TH @ rows_NRH[:, 0].T) if gate_TN is None else gate_TN[:, index]
        return self._times_up(gates, x_TH @ rows_NRH[:, -2].T) @ rows_NRH[:, -1]

    def _read(self, cluster: list[int]) -> Tensor:
        """In a thread of the pool; ``pread`` lets other threads of Python run."""
        began = time.perf_counter()
        rows = [self.store.read(self.layer, neuron, with_gate=self.predictor is not None) for neuron in cluster]
        self.counters.reading_s += time.perf_counter() - began
        return torch.from_numpy(np.stack(rows))

    def _count(self, hits: int, misses: int) -> None:
        counters = self.counters
        counters.computed += len(self.hot_gate_KH) + hits + misses
        counters.possible += self.neurons
        counters.hits += hits
        counters.misses += misses
        counters.bytes_read += misses * (self.store.slot_bytes * (2 if self.predictor is None else 3) // 3)

    def bytes_in_memory(self) -> int:
        tensors = [self.hot_gate_KH, self.hot_up_KH, self.hot_down_KH, self.cache.rows_SRH]
        tensors += [self.cold_gate_NH] if self.predictor is None else list(self.predictor.parameters())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def sparsify(
    model: nn.Module,
    ids_BT: Tensor,
    store_path: Path,
    hot_share: float = 0.1,
    cache_share: float = 0.3,
    predictor: str = "exact",
    rank: int = 64,
) -> Counters:
    """Steps 1 to 7: replaces the FFNs of ``model``; their weights are then in the store alone."""
    sites = find_ffns(model)
    if not sites:
        raise ValueError("expected FFNs that compute down(relu(gate(x)) * up(x)), found none in this model")
    seen = profile(model, sites, ids_BT)
    store = NeuronStore.write(store_path, sites)
    counters, readers = Counters(), ThreadPoolExecutor(4, thread_name_prefix="neuron-reader")
    for layer, (site, shown) in enumerate(zip(sites, seen)):
        neurons = len(shown.frequency_I)
        hot_K = shown.frequency_I.topk(int(hot_share * neurons)).indices.sort().values
        fitted = LowRankPredictor.fit(site, shown, rank, recall=0.99) if predictor == "low-rank" else None
        sparse = SparseFFN(site, layer, hot_K, store, int(cache_share * neurons), readers, fitted, counters)
        parent, _, child = site.name.rpartition(".")
        setattr(model.get_submodule(parent), child, sparse)
    return counters


# 8. Use it ----------------------------------------------------------------------------------------


def calibration_text(characters: int = 60_000) -> str:
    """Python's own standard library: text that every installation has."""
    return "\n".join(inspect.getsource(module) for module in (argparse, tempfile, inspect))[:characters]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=Path(__file__).parent / "models" / "drelu-stdlib-5m")
    parser.add_argument("--prompt", default="def read_file(path):")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--predictor", choices=("exact", "low-rank"), default="exact")
    parser.add_argument("--hot-share", type=float, default=0.1)
    parser.add_argument("--cache-share", type=float, default=0.3)
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=True)
    dense = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=True, dtype="float32").eval()
    ids_BT = tokenizer(calibration_text(), return_tensors="pt").input_ids[0]
    ids_BT = ids_BT[: len(ids_BT) // 256 * 256].view(-1, 256)
    sparse = copy.deepcopy(dense)
    with tempfile.TemporaryDirectory() as folder:
        shares = {"hot_share": args.hot_share, "cache_share": args.cache_share}
        counters = sparsify(sparse, ids_BT, Path(folder) / "model.neurons", predictor=args.predictor, **shares)
        prompt = tokenizer(args.prompt, return_tensors="pt")
        texts = []
        for model in (dense, sparse):
            out = model.generate(**prompt, max_new_tokens=args.tokens, do_sample=False)
            texts.append(tokenizer.decode(out[0, prompt.input_ids.shape[1] :]))
    in_memory = sum(module.bytes_in_memory() for module in sparse.modules() if isinstance(module, SparseFFN))
    whole = sum(site.gate_IH.numel() * 3 * 4 for site in find_ffns(dense))
    print(f"dense:  {texts[0]!r}\nsparse: {texts[1]!r}\nthe same text: {texts[0] == texts[1]}")
    print(f"FFN weights in memory: {in_memory / 1e6:.1f} of {whole / 1e6:.1f} MB")
    print(f"neurons computed: {counters.computed / counters.possible:.0%}")
    print(f"cold neurons in the cache: {counters.hits / max(1, counters.hits + counters.misses):.0%}")
    print(f"read: {counters.bytes_read / 1e6:.1f} MB in {counters.reading_s:.2f} s of the reading threads;", end=" ")
    print(f"the computation waited {counters.waiting_s:.2f} s")


if __name__ == "__main__":
    main()
