"""Tokens/s against the memory budget, as SVG: ``python -m benchmarks.plot out.svg RESULT.json ...``.

Each file is what ``python -m benchmarks offload --json`` printed; files of a sweep differ in ``--ffn-in-memory``. Every
figure in the drawing is in one of them; nothing is measured or smoothed here.
"""

from __future__ import annotations

import argparse
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.offload import MODES
from benchmarks.table import read_result
from torch_pi2.base.extras import missing_package
from torch_pi2.base.files import atomic_write
from torch_pi2.errors import ArtifactError, ConfigError

#: What results in one drawing have in common.
_SAME = ("shape", "weights", "activations", "synthetic", "threads", "tokens", "simulated", "machine", "versions")
#: A mode keeps its colour and its mark, whatever others are drawn (colours that are told apart by most eyes).
_LOOKS = {
    "pipeline": ("#0072b2", "o"),
    "cache": ("#e69f00", "s"),
    "lookahead": ("#009e73", "^"),
    "llm-in-a-flash": ("#cc79a7", "D"),
    "bundle": ("#56b4e9", "v"),
    "mmap": ("#d55e00", "x"),
    "llama.cpp": ("#000000", "P"),
}


class Point(NamedTuple):
    """``share``: the budget, of what the model takes whole in memory. Tokens/s: the median of rounds, and its range."""

    share: float
    tokens_per_s: float
    slowest: float
    fastest: float


def series(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Points by mode or other engine, ascending in the budget."""
    found: dict[str, list[Point]] = defaultdict(list)
    for result in results:
        for mode, m in result["modes"].items():
            share = m["budget_bytes"] / _whole(result)
            found[mode].append(Point(share, m["tokens_per_s"], *m["spread"]["tokens_per_s"]))
        for peer, p in result["peers"].items():  # under the cap of modes with a cache
            share = result["budget_bytes"] / _whole(result)
            found[peer].append(Point(share, *[p["tokens_per_s"]] * 3))
    return {name: sorted(found[name]) for name in (*MODES, *sorted(set(found) - set(MODES))) if name in found}


def _whole(result: Mapping[str, Any]) -> float:
    """Bytes of the model with every neuron in memory (but for 40 bytes of bookkeeping a neuron)."""
    return float(result["budget_bytes"] + (1 - result["ffn_in_memory"]) * result["ffn_bytes"])


def demand(result: Mapping[str, Any]) -> float:
    """The budget, as a share of the whole model, that holds what one token wants: below it loading a model warns."""
    rest = result["budget_bytes"] - result["ffn_in_memory"] * result["ffn_bytes"]
    return float((rest + result["token_bytes"]) / _whole(result))


def draw(paths: Sequence[str | Path], target: str | Path) -> Path:
    """Read results and write the drawing; returns ``target``.

    Raises:
        LibraryMissingError: no matplotlib. ConfigError: results of different models, settings or machines, or none.
        ArtifactError: a file is not a result of ``bench offload``, or ``target`` cannot be written.
    """
    results = [_read(Path(path)) for path in paths]
    _check_same(paths, results)
    target = Path(target)
    atomic_write(target, _svg(results))
    return target


def _read(path: Path) -> dict[str, Any]:
    result = read_result(path)
    if result["what"] != "offload":
        raise ArtifactError(
            str(path),
            expected="what `python -m benchmarks offload --json` printed",
            found=f"a result of bench {result['what']}",
            fix="Leave it out.",
        )
    try:
        series([result]), demand(result), _subject(result), _setting(result), [result[key] for key in _SAME]
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ArtifactError(
            str(path),
            expected="what `python -m benchmarks offload --json` printed",
            found=f"one that cannot be drawn ({type(error).__name__}: {error})",
            fix="Measure again with this version.",
        ) from error
    return result


def _check_same(paths: Sequence[str | Path], results: Sequence[Mapping[str, Any]]) -> None:
    if not results:
        raise ConfigError("results to draw", expected="one or more", found="none", fix="Name JSON files.")
    first = results[0]
    for path, result in zip(paths, results):
        different = [f"{key} {result[key]}" for key in _SAME if result[key] != first[key]]
        if different:
            raise ConfigError(
                str(path),
                expected=f"the model, settings and machine of {paths[0]}",
                found="; ".join(different),
                fix="Draw them apart.",
            )


def _svg(results: Sequence[Mapping[str, Any]]) -> str:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_package("matplotlib", "bench", error) from error
    first, text = results[0], io.StringIO()
    # text stays text, and the same results make the same file
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pi2", "font.size": 10, "font.family": "sans-serif"}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for name, points in series(results).items():
            colour, mark = _LOOKS.get(name, ("#666666", "o"))
            rates = [p.tokens_per_s for p in points]
            ranges = [[p.tokens_per_s - p.slowest for p in points], [p.fastest - p.tokens_per_s for p in points]]
            axes.errorbar(
                [100 * p.share for p in points], rates, ranges, label=name, color=colour, marker=mark,
                linewidth=2, markersize=6, elinewidth=1, capsize=3, gid=f"series {name}",
            )  # fmt: skip
        at = 100 * demand(first)
        axes.axvline(at, color="#666666", linewidth=1, linestyle="--")
        axes.annotate(
            f"one token's demand: {at:.0f} %", (at, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
            textcoords="offset points", va="top", color="#444444",
        )  # fmt: skip
        axes.set_xlabel(f"memory budget, % of the {_whole(first) / 1e9:.2f} GB that the whole model takes")
        axes.set_ylabel("tokens/s: median of rounds, slowest to fastest")
        axes.set_ylim(bottom=0)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", frameon=False)
        axes.set_title(_subject(first), loc="left", fontsize=11)
        figure.supxlabel(_setting(first), fontsize=7, color="#444444")
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _subject(result: Mapping[str, Any]) -> str:
    simulated = f", SIMULATED {result['simulated']}" if result["simulated"] else ""
    synthetic = "synthetic " if result["synthetic"] else ""
    return (
        f"{synthetic}{result['shape']}, {result['weights']} weights, {result['activations']} activations, "
        f"{result['threads']} threads{simulated}"
    )


def _setting(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['kernels']} "
        f"kernels; {versions}\ntokens {result['tokens']}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args(argv)
    draw(args.results, args.target)


if __name__ == "__main__":
    main()
