"""``benchmarks/results/*.json`` as a page of tables with roofline columns: ``python -m benchmarks.table FOLDER``.

Each file is what one of ``python -m benchmarks`` that has a section here printed with ``--json``; nothing is computed
here but ratios of figures of one run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import methods, quantization, reads, sparsify, suite, together
from benchmarks.figures import shown
from torch_pi2.base.files import atomic_write
from torch_pi2.base.units import percent, size
from torch_pi2.errors import ArtifactError

_HEAD = """# Measured results

Written by `python -m benchmarks.table` from the JSON files beside it; each file's `command` field (older files
have none) says what produced it. Every row is one run: its cases alternate, figures are medians, ranges go from the
slowest to the fastest round. *read* is a plain streaming read of 1 GiB or more in the same run, *gathered* a plain read
of random neurons as large as the model's. Models are synthetic unless a row says that one is real: random weights that
fire as often as real ones. They speak of speed only.
"""

_TOGETHER_NOTE = """
Each with a core, a memory cap and a shard, beside one process with a core and the same cap, all on one drive.
"""

_PARTS_NOTE = """
Attention is what torch's profiler saw of it; *apart*: it saw nothing (a step compiled with `--cpp-wrapper` passes it
by), and the same calls were timed by themselves; empty: not measured, and *rest* contains it.
"""


def _number(value: Any, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _range(spread: Sequence[float] | None, digits: int = 2) -> str:
    return "" if spread is None else f"{_number(spread[0], digits)}-{_number(spread[1], digits)}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _about(name: str, result: Mapping[str, Any]) -> str:
    return f"{name}: {result['shape']} {result['weights']}, {result['activations']} activations"


def _decode_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    gb = result.get("bytes_per_token", 0) / 1e9
    peers = ", ".join(
        f"{peer} {_number(p['ratio'])} ({_range(p['spread']['ratio'])})" for peer, p in result["peers"].items()
    )
    row = [
        _about(name, result) + (", real model" if result.get("synthetic") is False else ""),
        str(result["threads"]),
        str(result.get("rounds_kept", "")),
        _number(result["tokens_per_s"]),
        _number(result["prompt_tokens_per_s"], 1),
        f"{100 * result['active_share']:.1f} %",
        _number(gb or None),
        _number(result.get("gb_per_s"), 1),
        _number(result["read_gb_per_s"], 1),
        _number(result["gather_gb_per_s"], 1),
        f"{100 * result['of_read']:.0f} %" if "of_read" in result else "",
        _number(gb / result["read_gb_per_s"] * 1e3 if gb else None, 1),
        _number(result["ms_per_token"]["total"] if gb else None, 1),
        _number(result["peak_rss_bytes"] / 1e9, 1),
        peers,
    ]
    return [row]


def _part_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    if "ms_per_token" not in result:
        return []
    ms = result["ms_per_token"]
    # files from before sdpa_from have 0 where the profiler saw nothing
    source = result.get("sdpa_from", "profiler" if ms["sdpa"] else None)
    attention = "" if source is None else _number(ms["sdpa"]) + (" (apart)" if source == "timed apart" else "")
    rest = _number(ms["python"]) + (" with attention" if source is None else "")
    others = [_number(ms[part]) for part in ("predictor", "ffn", "head")]
    share = f"{100 * ms['python'] / ms['total']:.1f} %"
    return [[name, _number(ms["linears"]), attention, *others, rest, _number(ms["total"]), share]]


def _batch_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            str(b["batch"]),
            str(b.get("rounds_kept", "")),
            _number(b["tokens_per_s"]),
            _range(b.get("spread", {}).get("tokens_per_s")),
            _number(b["prompt_tokens_per_s"], 1),
            _range(b.get("spread", {}).get("prompt_tokens_per_s"), 1),
        ]
        for b in result["batches"]
    ]


def _peer_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            str(p["about"]["engine"]),
            str(at.get("batch", 1)),
            _number(at["tokens_per_s"]),
            _number(at.get("our_tokens_per_s")),
            _number(at["ratio"]),
            _range(at["spread"]["ratio"]),
            _number(at["prompt_tokens_per_s"], 1),
            _number(at.get("our_prompt_tokens_per_s"), 1),
            _number(at["prompt_ratio"]),
            _range(at["spread"]["prompt_ratio"]),
            str(p["major_faults"]),
        ]
        for p in result["peers"].values()
        # files of before peers had batches: the first size alone
        for at in p.get("batches") or [p]
    ]


def _layer_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            f"{name}: {result['hidden']} x {result['intermediate']} {result['weights']}, {result['activations']}",
            f"{100 * share['active']:.1f} %",
            _number(share["ms"], 3),
            _number(share["touched_gb_per_s"], 1),
            _number(share["gather_ms"], 3),
            _number(result["stream_ms"], 3),
            _number(share["bound_ms"], 3),
            _number(share["of_bound"]),
        ]
        for share in result["shares"]
    ]


def _linear_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    if "linear" not in result:
        return []
    linear = result["linear"]
    row = [
        f"{name}: {linear['rows']} x {result['hidden']} {result['weights']}, {result['activations']}",
        _number(linear["ms"], 3),
        _number(linear["gb_per_s"], 1),
        _number(linear["read_gb_per_s"], 1),
        f"{100 * linear['of_read']:.0f} %",
        str(result["rank"]),
        _number(result["predictor_ms"], 3),
    ]
    return [row]


def _offload_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    about = f"{_about(name, result)}, {percent(result['ffn_in_memory'], 0)} of neurons"
    about += ", independent tokens" if "independent" in result["tokens"] else ""
    about += f", SIMULATED {result['simulated']}" if result.get("simulated") else ""
    rows = [
        [
            f"{about}, {mode}" + (" (traced)" if m.get("trace") else ""),
            _number(m["tokens_per_s"]),
            _range(m["spread"]["tokens_per_s"]),
            _number(m["p50_ms"], 1),
            _number(m["p90_ms"], 1),
            _number(m["p99_ms"], 1),
            _number((m["bytes_read_per_token"] or m["disk_bytes_per_token"] or 0) / 1e6, 1),
            _number(m["reads_per_token"], 0),
            "" if m["hit_rate"] is None else f"{100 * m['hit_rate']:.1f} %",
            "" if m["io_critical_share"] is None else f"{100 * m['io_critical_share']:.1f} %",
            shown(m.get("drive_share"), percent),
            _number(m["ffn_ms"], 1),
            _number(m["peak_rss_bytes"] / 1e9, 2),
            _number(result["cap_bytes"] / 1e9) if m["capped"] else "none",
            _number(result["against"].get(mode)),
        ]
        for mode, m in result["modes"].items()
    ]
    for peer, p in result["peers"].items():
        read = None if p["disk_bytes_per_token"] is None else p["disk_bytes_per_token"] / 1e6
        figures = [_number(p["tokens_per_s"], 3), "", "", "", "", _number(read, 1), "", "", "", "", ""]
        memory = [_number(p["peak_rss_bytes"] / 1e9, 2), _number(result["cap_bytes"] / 1e9)]
        rows.append([f"{name}: {peer}", *figures, *memory, _number(p.get("ratio"))])
    return rows


_DECODE = (
    "run", "threads", "rounds", "tokens/s", "prompt tokens/s", "FFN read", "GB/token", "GB/s", "read GB/s",
    "gathered GB/s", "of read", "ms at read speed", "ms", "peak GB", "times as fast as",
)  # fmt: skip
_PARTS = ("run", "linears", "attention", "predictor", "FFN", "head", "rest", "total", "rest of total")
_PEERS = (
    "run", "engine", "batch", "tokens/s", "ours", "ours / its", "range",
    "prompt tokens/s", "ours", "ours / its", "range", "major faults",
)  # fmt: skip
_BATCHES = ("run", "batch", "rounds", "tokens/s", "range", "prompt tokens/s", "range")
_LAYERS = ("layer", "active", "ms", "GB/s", "gathered ms", "all streamed ms", "bound ms", "of bound")
_LINEARS = ("dense linear", "ms", "GB/s", "read GB/s", "of read", "predictor rank", "predictor ms")

_OFFLOAD = (
    "run", "tokens/s", "range", "p50 ms", "p90 ms", "p99 ms", "MB/token read", "reads/token", "cache hits",
    "I/O waited for", "of the drive", "FFN ms", "peak RSS GB", "memory cap GB", "pipeline / it",
)  # fmt: skip
_OFFLOAD_NOTE = """
Half of the neurons' bytes, or what a row says, have room in memory; the rest is read from a store whose file is warm
(one sequential read before), each mode in a process of its own, one after another, in a memory cap where the machine
has one (page cache counts). Tokens are drawn at random: of one topic for a while, which gives neurons the locality that
"LLM in a flash" measured on text, or independently (a row says so): no locality but that some fire more often. I/O
waited for is time in which compute threads had nothing to compute, of all their time. *Of the drive*: reads a second
while any was under way, of what the same file gives, read at random in pieces of the same mean size by the same engine
with nothing beside it, measured after the mode.
"""


_ATTENTION = ("attention", "used", "room", "us", "range", "torch us", "read us", "GB/s", "of read", "torch us / us")
_ATTENTION_NOTE = """
Of new tokens over a cache with room for more than is used, all of which torch's SDPA reads. *Read* is a plain read of
the keys and values that are used.
"""


def _attention_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    about = f"{name}: {result['heads']} heads of {result['width']} over {result['key_heads']}, {result['dtype']}, "
    about += f"{result['tokens']} token(s) of {result['batch']} sequence(s), {result['threads']} threads"
    return [
        [
            about,
            str(length["used"]),
            str(length["room"]),
            _number(length["us"], 1),
            _range(length["spread_us"], 1),
            _number(length["torch_us"], 1),
            _number(length["read_us"], 1),
            _number(length["gb_per_s"], 1),
            f"{100 * length['of_read']:.0f} %",
            _number(length["over_torch"]),
        ]
        for length in result["lengths"]
    ]


_QUANTIZATION = ("run", "rounded", *quantization.PARTS)
_QUANTIZATION_NOTE = """
Relative change of held-out bits per byte where these weights alone are quantised, the others in floats. Trained
models; calibrated on other text than what is scored.
"""


def _quantization_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    about = f"{name}: {result['model']}, {result['weights']}, {result['bits_per_byte']:.4f} in floats, "
    about += f"{result['tokens']} tokens"
    return [
        [about, case["quantization"], *(f"{case['changes'][part]:+.2%}" for part in quantization.PARTS)]
        for case in result["cases"]
    ]


_SPECULATE = (
    "run",
    "guesses",
    "plain tokens/s",
    "guessing",
    "ratio",
    "range",
    "right",
    "a pass",
    "switched off",
    "text",
)
_SPECULATE_NOTE = """
Guessed next tokens that one pass verifies, against one token a step. *Right* are so many of the guesses, *a pass* has
so many of them; they are *switched off* in rounds where they cost more than they bring. *Text*: whether both said the
same, or were given what to say.
"""


def _speculate_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    about = f"{_about(name, result)}, prompt {result['prompt']}"
    if result["ffn_in_memory"] < 1:
        about += f", {100 * result['ffn_in_memory']:.0f} % of the neurons in memory"
    about += f", {result['simulated']}" if result["simulated"] else ""
    about += ", never resting" if result["always"] else ""
    return [
        [
            about + (", real model" if result["synthetic"] is False else ""),
            f"{case['guesses']}, up to {case['at_a_time']}",
            _number(case["tokens_per_s"]["plain"]),
            _number(case["tokens_per_s"]["speculative"]),
            _number(case["ratio"], 3),
            _range(case["ratio_spread"], 3),
            f"{100 * case['accepted'] / case['drafted']:.1f} %" if case["drafted"] else "",
            _number(case["drafted"] / case["passes"]) if case["passes"] else "",
            f"{case['switched_off']} of {result['rounds']}",
            {None: "given", True: "the same", False: "other"}[case["same_text"]],
        ]
        for case in result["cases"]
    ]


_SERVE = (
    "run", "server", "clients", "requests/s", "range", "tokens/s", "p50 ms", "p99 ms", "first text p50 ms", "p99 ms",
    "requests/s / its", "range", "its p50 / p50", "its p99 / p99", "its first p50 / p50", "its first p99 / p99",
)  # fmt: skip
_SERVE_NOTE = """
Clients that each send their next request when the last is answered, streamed and greedy over loopback; half of the
prompts begin alike, and none comes twice. Prompts and answers have as many tokens in all servers. One server at a time
has something to do. p50 and p99 are of all rounds together. llama-cpp-python's server answers one request at a time,
and reads again what a prompt does not have in common with the one before. *Its* is that server's: above 1, ours is
ahead.
"""


def _serve_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    waits = ("latency_p50_ms", "latency_p99_ms", "first_p50_ms", "first_p99_ms")
    rows = []
    for server, measured in result["servers"].items():
        for at, over in zip(measured["loads"], result["over"], strict=True):
            ratio = over["ours"].get(server)
            row = [_about(name, result), server + (", compiled" if measured["about"].get("compiled") else "")]
            row += [str(at["clients"]), _number(at["requests_per_s"]), _range(at["spread"]["requests_per_s"])]
            row += [_number(at["tokens_per_s"], 1), *(_number(at[wait], 0) for wait in waits)]
            row += ["", "", *[""] * len(waits)] if ratio is None else [
                _number(ratio["requests_per_s"]), _range(ratio["spread"]), *(_number(ratio[wait]) for wait in waits)
            ]  # fmt: skip
            rows.append(row)
    return rows


_PREFIX = ("run", "server", "prompt", "new ms", "range", "warm ms", "range", "end alone ms", "new / warm", "range")
_PREFIX_NOTE = """
Milliseconds to the first text of an answer, over loopback: of prompts that are all new, of those that begin as the one
before (*warm*), and of their last tokens alone, which is what would be left if known tokens cost nothing.
"""


def _prefix_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            _about(name, result),
            server + (", compiled" if measured["about"].get("compiled") else ""),
            f"{result['prefix']} + {row['suffix']}",
            _number(row["cold_ms"], 1),
            _range(row["spread"]["cold_ms"], 1),
            _number(row["warm_ms"], 1),
            _range(row["spread"]["warm_ms"], 1),
            _number(row["alone_ms"], 1),
            _number(row["ratio"], 1),
            _range(row["spread"]["ratio"], 1),
        ]
        for server, measured in result["servers"].items()
        for row in measured["rows"]
    ]


_GENERATE = ("run", "way", "prompt + answer", "ms", "range", "times transformers", "range", "the first ms longer")
_GENERATE_NOTE = """
Whole greedy answers in one process, in alternation. *First*: of a model that has not generated before, whose steps are
recorded. Compiled steps take longer by the last column once: with nothing on disk, or with their code found there.
"""


def _generate_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    compiling = result["compiling"]
    once = f"{compiling['ms']:.0f}{' (found)' if compiling['found'] else ''}" if compiling else ""
    return [
        [
            f"{name}: {result['shape']} {result['weights']}",
            way,
            f"{result['prompt']} + {result['tokens']}",
            _number(found["ms"], 0),
            _range(found["spread"]["ms"], 0),
            _number(found["times_as_fast"]),
            _range(found["spread"]["times_as_fast"]),
            once if way.endswith("compiled") else "",
        ]
        for way, found in result["ways"].items()
    ]


_SUITE_NOTE = """
Right answers of a dense model to questions about held-out text (`torch-pi2 eval --suite`), and by how many of a hundred
those of its other forms differ, with 95 % intervals (Bonett and Price 2012, paired). Trained models. Nothing is timed.
"""


def _named(rows_of: Callable[[Mapping[str, Any]], list[tuple[str, ...]]]) -> Any:
    """Rows with the run's name in front."""
    return lambda name, result: [[name, *row] for row in rows_of(result)]


def _of_tokens(rows_of: Callable[[Mapping[str, Any]], list[tuple[str, ...]]]) -> Any:
    """Rows with the run's name and its tokens in front."""
    return lambda name, result: [[f"{name}: {result['tokens']:,} tokens", *row] for row in rows_of(result)]


_METHODS_NOTE = """
Methods of sparsity with float and 4-bit weights (GPTQ), beside the dense model in floats, on held-out text: in memory,
then the loss over a store of which every call reads what it wants, and in a bundle, token by token. Nothing is timed.
"""


_SPARSIFY_NOTE = """
A trained model, trained on with ReLU and a penalty that is steered to a share of zeros: these and the loss on held-out
text, beside the loss of the same model trained on as long without (*dense*; *before*: as it was). Nothing is timed.
"""


def _sparsify_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    settings = result["settings"]
    return [
        [f"{name}: {settings['activation']}, {settings['steps']:,} steps", *row] for row in sparsify.rows_of(result)
    ]


_FIT = ("run", "layers", "weights in files", "memory: profile", "fit", "after the first layer", "after the last")
_FIT_NOTE = """
Predictors fitted to random weights that stay in their files (`--mapped`): the most memory of the process in each phase,
and what it has after the first layer and after the last. How many layers there are should not matter.
"""


def _fit_rows(name: str, result: Mapping[str, Any]) -> list[list[str]]:
    phases, by_layer = result["phases"], result["rss_by_layer"]
    peaks = [size(phases[phase]["peak_rss_bytes"]) for phase in ("profile", "fit")]
    about = f"{name}: {result['shape']}, {result['tokens']:,} tokens, {result['steps']} steps"
    return [
        [about, str(result["layers"]), size(result["checkpoint_bytes"]), *peaks, size(by_layer[0]), size(by_layer[-1])]
    ]


_ORDERS_NOTE = """
Of the neurons that a token of a 7B model reads (int4, 8 KiB each with direct reads), modelled of what a small trained
model wants of held-out text: with what share of all neurons in the cache (LFU) which share of those wanted is missed,
and per token reads and bytes without reading gaps, and with gaps of 16 KiB.
"""
_ORDER_TIMES_NOTE = """
Milliseconds of a token's reads, modelled, each order with its best gap of 0, 16 and 64 KiB; the last column: with 16.
"""


#: Of which benchmark, title with a note, header, and rows of a result by its name.
_SECTIONS: tuple[tuple[str, str, Sequence[str], Callable[[str, Mapping[str, Any]], list[list[str]]]], ...] = (
    ("decode", "## Whole models", _DECODE, _decode_rows),
    ("decode", f"### Milliseconds per token\n{_PARTS_NOTE}", _PARTS, _part_rows),
    ("decode", "### Other engines, in alternation", _PEERS, _peer_rows),
    ("decode", "### Batches", _BATCHES, _batch_rows),
    ("generate", f"## model.generate\n{_GENERATE_NOTE}", _GENERATE, _generate_rows),
    ("speculate", f"## Guessed tokens\n{_SPECULATE_NOTE}", _SPECULATE, _speculate_rows),
    ("serve", f"## Servers under load\n{_SERVE_NOTE}", _SERVE, _serve_rows),
    ("prefix", f"### Prompts that begin alike\n{_PREFIX_NOTE}", _PREFIX, _prefix_rows),
    ("offload", f"## Larger than memory\n{_OFFLOAD_NOTE}", _OFFLOAD, _offload_rows),
    ("methods", f"## Methods and 4 bits\n{_METHODS_NOTE}", ("run", *methods.HEADER), _of_tokens(methods.rows_of)),
    ("together", f"## Several processes\n{_TOGETHER_NOTE}", ("run", *together.HEADER), _named(together.rows_of)),
    ("sparsify", f"## Made sparse by training\n{_SPARSIFY_NOTE}", ("run", *sparsify.HEADER), _sparsify_rows),
    ("layer", "## One feed-forward layer", _LAYERS, _layer_rows),
    ("layer", "## Dense linears and predictors", _LINEARS, _linear_rows),
    ("quantization", f"## Quality\n{_QUANTIZATION_NOTE}", _QUANTIZATION, _quantization_rows),
    ("suite", f"### Questions\n{_SUITE_NOTE}", ("run", *suite.HEADER), _named(suite.rows_of)),
    ("reads", f"## Orders of neurons\n{_ORDERS_NOTE}", ("run", *reads.COUNT_HEADER), _named(reads.count_rows)),
    ("reads", f"### Their times\n{_ORDER_TIMES_NOTE}", ("run", *reads.ORDER_HEADER), _named(reads.order_rows)),
    ("fit", f"## Memory of a fit\n{_FIT_NOTE}", _FIT, _fit_rows),
    ("attention", f"## Attention\n{_ATTENTION_NOTE}", _ATTENTION, _attention_rows),
)
_BENCHMARKS = tuple(dict.fromkeys(what for what, *_ in _SECTIONS))
_NAMES = f"{', '.join(_BENCHMARKS[:-1])} or {_BENCHMARKS[-1]}"


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown of results by name (file name without ``.json``)."""
    parts = [_HEAD, *_machines(results)]
    for what, title, header, rows_of in _SECTIONS:
        rows = [row for name, result in results.items() if result["what"] == what for row in rows_of(name, result)]
        if rows:
            parts.append(f"{title.rstrip()}\n\n{_table(header, rows)}\n")
    return "\n".join(parts)


def _machines(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The first result's with its versions; of results of another CPU, or kernels, which they are."""
    by_machine: dict[tuple[str, ...], list[str]] = {}
    for name, result in results.items():
        by_machine.setdefault(tuple(str(result["machine"][what]) for what in ("cpu", "cores", "kernels")), []).append(
            name
        )
    found = [(names, _machine(results[names[0]])) for names in by_machine.values()]
    return [*(text for _, text in found[:1]), *(f"Of {', '.join(names)}: {text}" for names, text in found[1:])]


def _machine(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['kernels']} kernels; {versions}.\n"
    )


def write(folder: str | Path) -> Path:
    """Read ``folder/*.json`` and write ``folder/README.md``; returns its path.

    Raises:
        ArtifactError: a file is not a result of one of ``python -m benchmarks`` that has a section here.
    """
    folder = Path(folder)
    results = {}
    for path in sorted(folder.glob("*.json")):
        if not path.stem.startswith("qnn-"):  # of benchmarks.qnn, which are no runs
            results[path.stem] = read_result(path)
    target = folder / "README.md"
    atomic_write(target, page(results))
    return target


def read_result(path: Path) -> dict[str, Any]:
    """One JSON file. Raises ArtifactError, as :func:`write`."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        what = result["what"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _not_a_result(path, f"{type(error).__name__}: {error}") from error
    if what not in _BENCHMARKS:
        raise _not_a_result(path, f"a result of bench {what}")
    return result


def _not_a_result(path: Path, found: str) -> ArtifactError:
    return ArtifactError(
        str(path),
        expected=f"what `python -m benchmarks` {_NAMES} printed with --json",
        found=found,
        fix="Remove the file, or run `make bench` again.",
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args(argv).folder)


if __name__ == "__main__":
    main()
