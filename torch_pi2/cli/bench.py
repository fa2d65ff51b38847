"""Time things on this machine: `ffn` and `layer` are one feed-forward layer, `decode` and `offload` whole models."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_pi2.cli import common

EXAMPLE = "torch-pi2 bench decode --shape mistral-7b --weights int4 --threads 2 --prompt 128 --tokens 32 --json"


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A comma-separated list, for argparse."""

    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = f"comma-separated list of {kind.__name__}"
    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, help_line, add in (
        ("ffn", "one gated layer with float weights, dense against sparse", _add_ffn),
        ("layer", "one gated layer over shares of active neurons, against the memory roofline", _add_layer),
        (
            "decode",
            "a whole model, synthetic or in --folder, optionally against other engines",
            _add_decode,
        ),
        ("offload", "a model larger than memory, step by step from mmap to the pipeline", _add_offload),
        (
            "best-of",
            "several sequences of which one ends every few steps, under plans that follow or not",
            _add_best_of,
        ),
        ("plan", "the solved plan against greedy, all-hot, all-cold and random ones, by batch and memory", _add_plan),
    ):
        kind = kinds.add_parser(name, help=help_line, description=help_line)
        add(kind)
        common.add_every(kind)
        kind.set_defaults(options=kind)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=common.positive, default=4096, metavar="H")
    parser.add_argument("--intermediate", type=common.positive, default=14336, metavar="I", help="neurons")
    parser.add_argument("--tokens", type=common.positive, default=1, metavar="T")
    parser.add_argument("--rounds", type=common.positive, default=15, metavar="N")
    parser.add_argument("--seed", type=common.seed, default=0)


def _add_ffn(parser: argparse.ArgumentParser) -> None:
    _add_sizes(parser)
    parser.add_argument("--active", type=float, default=0.1, metavar="SHARE", help="share of neurons computed, 0..1")
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--rank", type=common.positive, metavar="R", help="of the predictor (default: H / 16)")


def _add_layer(parser: argparse.ArgumentParser) -> None:
    _add_sizes(parser)
    parser.add_argument(
        "--active",
        type=_list_of(float),
        default=[0.02, 0.05, 0.1, 0.2, 0.5, 1.0],
        metavar="SHARES",
        help="shares of neurons computed, comma-separated (default: 0.02,0.05,0.1,0.2,0.5,1.0)",
    )
    parser.add_argument("--weights", default="int4", choices=["int4", "int8", "bf16", "fp32"])
    _add_activations(parser)
    parser.add_argument("--rank", type=common.positive, metavar="R", help="of the predictor (default: H / 8)")


def _add_activations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--activations", default="float", choices=["float", "int8"], help="int8 is lossy")


def _add_decode(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    # no defaults here: given with a folder that has something else, they are an error
    add("--shape", help="as `torch-pi2 synthetic --shape` (default: the folder's, or mistral-7b)")
    add("--weights", choices=["int4", "int8"], help="default: the folder's, or int4")
    _add_activations(parser)
    add(
        "--active",
        type=float,
        metavar="SHARE",
        help="mean share of neurons that fire, 0..1 (default: the folder's, or 0.1)",
    )
    add("--prompt", type=common.positive, default=128, metavar="T", help="tokens of the prompt")
    add("--tokens", type=common.positive, default=32, metavar="N", help="tokens of the answer")
    add(
        "--rounds", type=common.positive, default=5, metavar="N", help="alternating rounds, of batches and of each peer"
    )
    add(
        "--batch",
        type=_list_of(common.positive),
        default=[1],
        metavar="B,...",
        help="sequences decoded together, comma-separated; the first is what the main figures are of",
    )
    add("--folder", type=Path, metavar="DIR", help="model folder; made if it is not there (default: in work/bench)")
    add("--eager", action="store_true", help="do not compile the decoding step")
    add("--cpp-wrapper", action="store_true", help="compile what lies between kernels in C++ too (takes minutes)")
    add(
        "--peer",
        action="append",
        default=[],
        choices=["llama.cpp", "torch"],
        help="another engine on the same shape, in alternation: llama.cpp (Q4_0) or torch (dense, bfloat16, compiled)",
    )
    add("--seed", type=common.seed, default=0)


def _add_offload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--folder", type=Path, metavar="DIR", help="with a neuron store (torch-pi2 pack)")
    source.add_argument("--shape", help="synthetic, made in work/bench if it is not there (default: mistral-7b)")
    add("--ffn-in-memory", type=float, default=0.5, metavar="SHARE", help="of the neurons' bytes, 0..1")
    add(
        "--modes",
        type=_list_of(str),
        default=["mmap", "bundle", "cache", "pipeline", "lookahead", "llm-in-a-flash"],
        metavar="NAMES",
        help="comma-separated (default: mmap,bundle,cache,pipeline,lookahead,llm-in-a-flash)",
    )
    add("--tokens", type=common.positive, default=24, metavar="N", help="of a round")
    add("--rounds", type=common.positive, default=2, metavar="N")
    add("--prompt", type=int, default=0, metavar="N", help="tokens of prompts that are timed, too (default: none)")
    add("--engine", choices=["auto", "pread", "io_uring"], default="auto", help="of all modes but mmap")
    add("--device", metavar="NAME", help="simulate reads of ufs-4.0, ufs-3.1, nvme or a JSON file (docs/DEVICES.md)")
    add(
        "--stream",
        choices=["topics", "independent"],
        default="topics",
        help="tokens: of one topic for a while, as text is (default), or independent: the worst case",
    )
    add("--activations", default="int8", choices=["float", "int8"], help="int8 is lossy")
    add("--eager", action="store_true", help="do not compile the decoding step")
    add(
        "--peer",
        action="append",
        default=[],
        choices=["llama.cpp"],
        help="on the same shape, mapped, under the same memory cap (needs cgroup v1 and permission)",
    )
    add("--trace", type=Path, metavar="FILE", help="what threads did in mode pipeline, for Perfetto (docs/TRACES.md)")
    add("--seed", type=common.seed, default=0)


def _add_best_of(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--folder", type=Path, metavar="DIR", help="optimised model (with --ffn-in-memory: is packed)")
    source.add_argument("--shape", help="synthetic, made in work/bench if it is not there (default: llama-1b)")
    add("--sequences", type=common.positive, default=4, metavar="N", help="at the start")
    add("--every", type=common.positive, default=4, metavar="STEPS", help="after so many one sequence ends")
    add("--rounds", type=common.positive, default=5, metavar="N", help="of each plan, in alternation")
    add("--ffn-in-memory", type=float, default=1.0, metavar="SHARE", help="of the neurons' bytes; 1: no store")
    add(
        "--hardware",
        default="measured",
        metavar="NAME",
        help="profile to plan for: measured (torch-pi2 doctor --measure), a preset or a file",
    )
    add("--activations", choices=["float", "int8"], help="int8 is lossy (default: int8 if the weights are quantised)")
    add("--compiled", action="store_true", help="compile a step for each plan and number of sequences")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")
    add("--seed", type=common.seed, default=0)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--folder", type=Path, metavar="DIR", help="optimised model, or a checkpoint to be optimised")
    source.add_argument("--shape", help="synthetic, made in work/bench if it is not there (default: llama-1b)")
    add("--method", choices=["exact", "lowrank"], help="of a checkpoint that is optimised, once (default: lowrank)")
    add("--batch", type=_list_of(common.positive), default=[1, 4, 16], metavar="B,...", help="default: 1,4,16")
    add("--memory", type=_list_of(str), default=["whole", "half"], metavar="NAMES", help="default: whole,half")
    add("--ffn-in-memory", type=float, default=0.5, metavar="SHARE", help="of the neurons' bytes, for --memory half")
    add(
        "--planners",
        type=_list_of(str),
        default=["planned", "greedy", "all-hot", "all-cold", "random"],
        metavar="NAMES",
        help="comma-separated (default: planned,greedy,all-hot,all-cold,random)",
    )
    add("--tokens", type=common.positive, default=12, metavar="N", help="steps of a round, at most")
    add("--rounds", type=common.positive, default=5, metavar="N", help="of each planner in each case, in alternation")
    add("--activations", choices=["float", "int8"], help="int8 is lossy (default: int8 if the weights are quantised)")
    add(
        "--hardware",
        default="measured",
        metavar="NAME",
        help="profile to plan for: measured (torch-pi2 doctor --measure), a preset or a file",
    )
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--eager", action="store_true", help="Python around every layer, as much for all (default)")
    steps.add_argument("--compiled", action="store_true", help="compile a step for each planner and batch size")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")
    add("--seed", type=common.seed, default=0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    kinds = {"ffn": _run_ffn, "layer": _run_layer, "decode": _run_decode, "offload": _run_offload, "plan": _run_plan}
    kinds["best-of"] = _run_best_of
    result = kinds[args.what](args)
    return {**result, "command": _command(args)}


def _command(args: argparse.Namespace) -> str:
    """The command line with every value it ran with, for who reads the result; of absolute paths only the last part."""

    def text(value: Any) -> str:
        if isinstance(value, Path):
            return value.name if value.is_absolute() else str(value)
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)

    words = ["torch-pi2", "bench", args.what]
    for action in args.options._actions:
        value = getattr(args, action.dest, None)
        if value is None or value is False:
            continue
        flag = action.option_strings[-1]
        if value is True:
            words.append(flag)
        else:
            repeated = value if isinstance(action, argparse._AppendAction) else [value]
            words += [word for each in repeated for word in (flag, text(each))]
    return shlex.join(words)


def _run_ffn(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.bench import ffn

    return ffn.run(
        args.hidden,
        args.intermediate,
        args.active,
        args.dtype,
        tokens=args.tokens,
        rank=args.rank,
        rounds=args.rounds,
        seed=args.seed,
    )


def _run_layer(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.bench import layer

    return layer.run(
        args.hidden,
        args.intermediate,
        args.weights,
        args.active,
        activations=args.activations,
        rank=args.rank,
        tokens=args.tokens,
        rounds=args.rounds,
        seed=args.seed,
    )


def _run_decode(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.bench import decode

    return decode.run(
        args.shape,
        args.weights,
        activations=args.activations,
        active=args.active,
        prompt=args.prompt,
        tokens=args.tokens,
        rounds=args.rounds,
        batch=args.batch,
        folder=args.folder,
        compiled=not args.eager,
        cpp_wrapper=args.cpp_wrapper,
        peers=dict.fromkeys(args.peer),
        seed=args.seed,
    )


def _run_offload(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.base.files import check_not_standard_output
    from torch_pi2.bench import offload

    if args.trace is not None:
        check_not_standard_output(args.trace, "--trace")  # what is traced is another process
    return offload.run(
        args.folder,
        args.shape,
        ffn_in_memory=args.ffn_in_memory,
        modes=args.modes,
        tokens=args.tokens,
        rounds=args.rounds,
        prompt=args.prompt,
        engine=args.engine,
        device=args.device,
        stream=args.stream,
        activations=args.activations,
        compiled=not args.eager,
        peers=args.peer,
        trace=args.trace,
        seed=args.seed,
    )


def _run_best_of(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.bench import best_of

    return best_of.run(
        args.shape,
        args.folder,
        sequences=args.sequences,
        every=args.every,
        rounds=args.rounds,
        ffn_in_memory=args.ffn_in_memory,
        hardware=args.hardware,
        activations=args.activations,
        compiled=args.compiled,
        trust_remote_code=args.trust_remote_code,
        seed=args.seed,
    )


def _run_plan(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.bench import plan

    return plan.run(
        args.shape,
        args.folder,
        method=args.method,
        batch=args.batch,
        memory=args.memory,
        ffn_in_memory=args.ffn_in_memory,
        planners=args.planners,
        tokens=args.tokens,
        rounds=args.rounds,
        activations=args.activations,
        hardware=args.hardware,
        compiled=args.compiled,
        trust_remote_code=args.trust_remote_code,
        seed=args.seed,
    )


def render(result: dict[str, Any]) -> str:
    kinds = {
        "ffn": _render_ffn,
        "layer": _render_layer,
        "decode": _render_decode,
        "offload": _render_offload,
        "plan": _render_plan,
        "best-of": _render_best_of,
    }
    return kinds[result["what"]](result)


def _render_ffn(result: dict[str, Any]) -> str:
    rows = [
        ("torch, F.linear on all neurons", "torch_ms", None),
        ("dense, our core on all neurons", "dense_ms", "dense_gb_per_s"),
        ("sparse, given the active set", "sparse_ms", "touched_gb_per_s"),
        ("exact gate, relu", "exact_gate_ms", None),
        (f"low-rank predictor, rank {result['rank']}", "predict_ms", None),
        ("plain read of the active bundles", "gather_ms", "gather_gb_per_s"),
        ("plain read of all weights", "read_ms", "read_gb_per_s"),
    ]
    shown = [(name, f"{result[ms]:.3f}", f"{result[gb]:.1f}" if gb else "") for name, ms, gb in rows]
    return (
        f"FFN {result['hidden']} x {result['intermediate']} {result['dtype']}, {result['tokens']} token(s), "
        f"{common.percent(result['active'])} active, {result['threads']} threads, {result['kernels']} kernels\n"
        f"{common.table(('', 'ms', 'GB/s'), shown)}\n"
        f"sparse takes {result['sparse_over_dense']:.3f} of dense, {result['sparse_over_torch']:.3f} of torch; "
        f"touched / gathered bandwidth {result['touched_over_gather']:.2f}\n({result['synthetic']})"
    )


def _render_layer(result: dict[str, Any]) -> str:
    header = ("active", "ms", "GB/s", "gathered ms", "streamed ms", "bound ms", "of bound")
    rows = [
        (
            common.percent(s["active"]),
            f"{s['ms']:.3f}",
            f"{s['touched_gb_per_s']:.1f}",
            f"{s['gather_ms']:.3f}",
            f"{result['stream_ms']:.3f}",
            f"{s['bound_ms']:.3f}",
            f"{s['of_bound']:.2f}",
        )
        for s in result["shares"]
    ]
    text = (
        f"FFN {result['hidden']} x {result['intermediate']} {result['weights']}, {result['activations']} activations, "
        f"{result['tokens']} token(s), {result['threads']} threads, {result['machine']['kernels']} kernels, "
        f"streaming read {result['read_gb_per_s']:.1f} GB/s\n{common.table(header, rows)}\n"
    )
    if "linear" in result:
        linear = result["linear"]
        text += (
            f"dense linear {linear['gb_per_s']:.1f} GB/s, {common.percent(linear['of_read'])} of its streaming read; "
            f"predictor of rank {result['rank']} {result['predictor_ms']:.3f} ms\n"
        )
    return text + f"({result['synthetic']})"


def _render_decode(result: dict[str, Any]) -> str:
    lines = [
        f"{result['shape']} {result['weights']}, {result['activations']} activations, {result['threads']} threads, "
        f"{result['machine']['kernels']} kernels, prompt {result['prompt']}, answer {result['tokens']}",
        f"{result['tokens_per_s']:.2f} tokens/s, prompt {result['prompt_tokens_per_s']:.1f} tokens/s, "
        f"{common.percent(result['active_share'])} of FFN rows read, at most {common.size(result['peak_rss_bytes'])}",
    ]
    if "bytes_per_token" in result:
        parts = [(name, "" if ms is None else f"{ms:.2f}") for name, ms in result["ms_per_token"].items()]
        lines += [
            f"{common.size(result['bytes_per_token'])} a token: {result['gb_per_s']:.1f} GB/s, "
            f"{common.percent(result['of_read'])} of a streaming read ({result['read_gb_per_s']:.1f}; "
            f"gathered {result['gather_gb_per_s']:.1f})",
            common.table(("part", "ms/token"), parts),
            f"sdpa: {result['sdpa_from'] or 'not seen, python contains it'}",
        ]
    if result["batches"]:
        rows = [
            (
                b["batch"],
                b["rounds_kept"],
                f"{b['tokens_per_s']:.2f}",
                "{:.2f} to {:.2f}".format(*b["spread"]["tokens_per_s"]),
                f"{b['prompt_tokens_per_s']:.1f}",
                "{:.1f} to {:.1f}".format(*b["spread"]["prompt_tokens_per_s"]),
            )
            for b in result["batches"]
        ]
        lines.append(common.table(("batch", "rounds", "tokens/s", "from - to", "prompt tokens/s", "from - to"), rows))
    for name, peer in result["peers"].items():
        low, high = peer["spread"]["ratio"]
        lines.append(
            f"{name}: {peer['tokens_per_s']:.2f} tokens/s, prompt {peer['prompt_tokens_per_s']:.1f}; "
            f"ours is {peer['ratio']:.2f} times as fast ({low:.2f} to {high:.2f}), prompt {peer['prompt_ratio']:.2f}"
        )
    label = f"(synthetic: {result['synthetic']})" if result["synthetic"] else "(a real model: speed only)"
    return "\n".join([*lines, label])


def _render_offload(result: dict[str, Any]) -> str:
    header = ("mode", "tokens/s", "p50 ms", "p99 ms", "MB/token", "hits", "I/O waited for", "FFN ms", "most memory")
    rows = [
        (
            name + (" (traced)" if m.get("trace") else ""),
            f"{m['tokens_per_s']:.2f}",
            f"{m['p50_ms']:.1f}",
            f"{m['p99_ms']:.1f}",
            f"{(m['bytes_read_per_token'] or m['disk_bytes_per_token'] or 0) / 1e6:.1f}",
            "" if m["hit_rate"] is None else common.percent(m["hit_rate"]),
            "" if m["io_critical_share"] is None else common.percent(m["io_critical_share"]),
            f"{m['ffn_ms']:.1f}",
            common.size(m["peak_rss_bytes"]) + (" (capped)" if m["capped"] else ""),
        )
        for name, m in result["modes"].items()
    ]
    lines = [
        f"{result['shape']} {result['weights']}, {result['activations']} activations, {result['threads']} threads, "
        f"{common.percent(result['ffn_in_memory'])} of {common.size(result['ffn_bytes'])} of neurons in memory, "
        + (f"cap {common.size(result['cap_bytes'])}" if result["cap_bytes"] else "no memory cap here"),
        common.table(header, rows),
    ]
    if result["simulated"]:
        late = common.percent(max(m["late_share"] for m in result["modes"].values()))
        lines.insert(1, f"simulated device {result['simulated']}; at most {late} of reads took longer here than there")
    lines += [f"{name} failed: {why}" for name, why in result["failed"].items()]
    if result["against"]:
        lines.append("pipeline is " + ", ".join(f"{r:.2f} times {name}" for name, r in result["against"].items()))
    if result["prompt"]:
        waited = ", ".join(
            f"{name} {m['prompt_tokens_per_s']:.1f}"
            + (f" ({common.percent(w)} of it waiting)" if (w := m["prompt_io_critical_share"]) is not None else "")
            for name, m in result["modes"].items()
        )
        lines.append(f"prompts of {result['prompt']} tokens, tokens/s: {waited}")
    for name, peer in result["peers"].items():
        ratio = f"; pipeline is {peer['ratio']:.2f} times as fast" if "ratio" in peer else ""
        lines.append(f"{name}, same cap: {peer['tokens_per_s']:.3f} tokens/s{ratio}")
        if "prompt_tokens_per_s" in peer:
            ratio = f"; pipeline is {peer['prompt_ratio']:.2f} times as fast" if "prompt_ratio" in peer else ""
            lines.append(f"{name}, prompt: {peer['prompt_tokens_per_s']:.2f} tokens/s{ratio}")
    label = f"(synthetic: {result['synthetic']})" if result["synthetic"] else "(a real model: speed only)"
    return "\n".join([*lines, f"tokens {result['tokens']}; file {result['file']}", label])


def _render_best_of(result: dict[str, Any]) -> str:
    names = list(result["whole"]["tokens_per_s"])
    rows = [
        (
            r.get("batch", "all"),
            *(f"{r['tokens_per_s'][name]:.2f}" for name in names),
            _plan_number(r.get("predicted_tokens_per_s"), "{:.2f}".format),
            *(f"{r['over'][name]:.3f}" for name in names[1:]),
            *(common.percent(r["hot"][name]) if "hot" in r else "" for name in names),
        )
        for r in [*result["batches"], result["whole"]]
    ]
    over, hot = (f"/ {name}" for name in names[1:]), (f"hot, {name}" for name in names)
    switch = result["switch"]
    share = result["ffn_in_memory"]
    lines = [
        f"{result['shape']} {result['weights']}, {result['activations']} activations, {result['threads']} threads, "
        f"{'compiled steps' if result['compiled'] else 'eager steps, Python in all'}, "
        f"{'all' if share == 1 else common.percent(share)} of the neurons in memory, "
        f"for hardware {result['hardware']['name']} ({result['hardware']['source']})",
        common.table(("sequences", *names, "predicted", *over, *hot), rows),
        f"tokens/s, medians of {result['rounds']} rounds; one of {result['sequences']} sequences ends every "
        f"{result['every']} steps; / is how many times as fast the plan that follows is",
        f"a change of plan takes {switch['ms']:.3f} ms (at most {switch['most_ms']:.3f}), "
        f"{common.percent(switch['of_a_step'], 2)} of a step (at most {common.percent(switch['most_of_a_step'], 2)})",
        f"tokens: {result['tokens']}; the plan is made of others ({result['statistics']})",
    ]
    label = f"(synthetic: {result['synthetic']})" if result["synthetic"] else "(a real model: speed only)"
    return "\n".join([*lines, label])


def _render_plan(result: dict[str, Any]) -> str:
    names = list(result["rows"][0]["tokens_per_s"])
    header = ("memory", "batch", *names, "predicted", "hits", "best other", "planned / best")
    rows = [
        (
            r["memory"] if r["ffn_in_memory"] == 1 else f"{common.percent(r['ffn_in_memory'])} of neurons",
            r["batch"],
            *(_plan_rate(r["planners"][name], f"{r['tokens_per_s'][name]:.2f}") for name in names),
            _plan_number(r["planners"]["planned"]["predicted_tokens_per_s"], "{:.2f}".format),
            _plan_number(r["planners"]["planned"].get("hit_rate"), common.percent),
            r["best"],
            "{:.3f} ({:.3f} to {:.3f})".format(r["planned_over_best"], *r["spread"][r["best"]]),
        )
        for r in result["rows"]
    ]
    steps = "compiled steps" if result["compiled"] else "eager steps, Python in all"
    lines = [
        f"{result['shape']} {result['weights']}, {result['activations']} activations, "
        f"{' and '.join(result['methods'])}, {result['threads']} threads, {steps}, "
        f"for hardware {result['hardware']['name']} ({result['hardware']['source']})",
        common.table(header, rows),
        "tokens/s, medians; = as another one, which made the same plan; predicted: of planned",
        f"tokens: {result['tokens']}; plans are made of others ({result['statistics']})",
    ]
    label = f"(synthetic: {result['synthetic']})" if result["synthetic"] else "(a real model: speed only)"
    return "\n".join([*lines, label])


def _plan_number(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)


def _plan_rate(planner: dict[str, Any], rate: str) -> str:
    return f"= {planner['same_as']}" if planner["same_as"] else rate
