"""The trained model on its way to a phone: exported, and run by everything that runs bundles, with the same text.

Exports the optimised model of ``make demo``, and lets PyTorch, ExecuTorch's Python runtime, its own LLM runner, the C++
runner on this machine, the C++ runner for 64-bit ARM (under qemu, where there is one) and the Kotlin for Android (under
a JVM, where ``make jni`` has built it) continue the same prompts greedily. Their tokens must be the same (of
ExecuTorch's runner, which shows no tokens, the text), and their logits, where they show them, within 1e-4. ``make
phone`` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

import torch_pi2
from torch_pi2.base.files import atomic_write
from torch_pi2.decode.executorch import load_library, set_options
from torch_pi2.export.contents import describe_program
from torch_pi2.export.run import Bundle

ROOT = Path(__file__).parent.parent
PROMPTS = (
    'def read_config(path):\n    """Read a configuration file',
    "import os\n\nclass Cache:\n    def __init__(self",
)
#: Logits of float32 models, everywhere; relative to the largest.
TOLERANCE = 1e-4
STOCK = "ExecuTorch's LLM runner"
JVM = "JNI under a JVM"


def runner(command: list[str], bundle: Path, prompt: str, tokens: int) -> dict[str, Any]:
    """What a C++ runner answers: token ids, logits of the prompt's last token, figures."""
    with tempfile.TemporaryDirectory() as folder:
        logits = Path(folder) / "logits.npy"
        asked = [*command, str(bundle), "--prompt", prompt, "--max-new-tokens", str(tokens), "--json"]
        done = subprocess.run([*asked, "--logits", str(logits)], capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise SystemExit(f"{command[0]} failed: {done.stderr.strip().splitlines()[-1]}")
        found: dict[str, Any] = json.loads(done.stdout)
        found["logits"] = torch.from_numpy(np.load(logits)[0, 0])
    return found


def answers(model: Any, tokenizer: Any, bundle: Path, arm: Path | None, prompt: str, tokens: int) -> dict[str, Any]:
    """Token ids and first logits of each way of running the bundle."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[0, -1].float()
        text = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    found = {"PyTorch": (text[0, ids.shape[1] :].tolist(), logits)}
    with Bundle(bundle) as opened:
        ids_list = ids[0].tolist()
        found["ExecuTorch, Python"] = (
            opened.generate(ids_list, tokens).sequences[0].ids,
            opened.logits(ids_list, len(ids_list))[-1],
        )
    ways = {"C++ runner, x86-64": [str(ROOT / "build" / "runner" / "pi2" / "pi2_runner")]}
    if arm is not None:
        for cpu in ("max", "cortex-a53"):
            ways[f"C++ runner, aarch64 ({cpu}, qemu)"] = ["qemu-aarch64-static", "-cpu", cpu, *arm_command(arm)]
    for name, command in ways.items():
        made = runner(command, bundle, prompt, tokens)
        found[name] = (made["sequences"][0]["ids"], made["logits"])
    return found


def stock_text(bundle: Path, prompt: str, tokens: int) -> str:
    """What ExecuTorch's own LLM runner says."""
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    load_library()
    set_options({"store_path": str(bundle)})
    pieces: list[str] = []
    try:
        stock = TextLLMRunner(str(bundle / "model.pte"), str(bundle / "tokenizer.json"))
        greedy = GenerationConfig(max_new_tokens=tokens, temperature=0.0, echo=False)
        stock.generate(prompt, greedy, pieces.append, None)
    finally:
        set_options({"store_path": ""})
    return "".join(pieces)


def jvm_ids(bundle: Path, prompt: str, tokens: int) -> list[int]:
    """What Bundle.kt answers over the library of ``export/android``."""
    build = ROOT / "build"
    libraries, classes = build / "runner" / "pi2", (build / "jni", build / "deps" / "kotlin" / "kotlin.jar")
    command = [
        "java",
        f"-Djava.library.path={libraries}",
        "-cp",
        ":".join(map(str, classes)),
        "org.torchpi2.jvm.MainKt",
    ]
    done = subprocess.run([*command, str(bundle), prompt, str(tokens)], capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{JVM} failed: {done.stderr.strip()}")
    ids: list[int] = json.loads(done.stdout)["sequences"][0]["ids"]
    return ids


def arm_command(folder: Path) -> list[str]:
    """The packed runner by its own loader, as its ``run`` script starts it."""
    return [str(folder / "ld-linux-aarch64.so.1"), "--library-path", str(folder), str(folder / "pi2_runner")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--demo", type=Path, default=Path("demo-out"), help="what make demo wrote (default %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer (default %(default)s)")
    parser.add_argument("--batches", default="1", help="batch sizes to export, comma-separated (default %(default)s)")
    parser.add_argument("--arm", action="store_true", help="fail where the runner for aarch64 or qemu is not there")
    parser.add_argument("--jvm", action="store_true", help="fail where there is no JVM, or nothing for it (make jni)")
    args = parser.parse_args()
    model = torch_pi2.load(args.demo / "model", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(args.demo / "model", trust_remote_code=True)
    bundle, started = args.demo / "bundle", time.perf_counter()
    batches = tuple(int(size) for size in args.batches.split(","))
    torch_pi2.export(model, bundle, tokenizer=tokenizer, max_tokens=256, batches=batches, progress=True)
    seconds = time.perf_counter() - started
    arm = ROOT / "build" / "runner-arm" / "pi2"
    under_qemu = arm if (arm / "pi2_runner").exists() and shutil.which("qemu-aarch64-static") else None
    jvm = (ROOT / "build" / "jni" / ".built").exists() and shutil.which("java") is not None
    report: dict[str, Any] = {"export_seconds": seconds, "program": describe_program(bundle / "model.pte"), "ways": {}}
    same = True
    for prompt in PROMPTS:
        found = answers(model, tokenizer, bundle, under_qemu, prompt, args.tokens)
        wanted, logits = found["PyTorch"]
        for name, (ids, others) in found.items():
            error = float((others - logits).abs().max() / logits.abs().max())
            good = ids == wanted and error < TOLERANCE
            same &= good
            report["ways"].setdefault(name, []).append({"same_tokens": ids == wanted, "logit_error": error})
            print(f"{name:40s} {'same' if ids == wanted else 'OTHER'} {len(ids)} tokens, logits off by {error:.1e}")
        as_said = stock_text(bundle, prompt, args.tokens) == tokenizer.decode(wanted)
        same &= as_said
        report["ways"].setdefault(STOCK, []).append({"same_text": as_said})
        print(f"{STOCK:40s} {'same' if as_said else 'OTHER'} text")
        if jvm:
            as_said = jvm_ids(bundle, prompt, args.tokens) == wanted
            same &= as_said
            report["ways"].setdefault(JVM, []).append({"same_tokens": as_said})
            print(f"{JVM:40s} {'same' if as_said else 'OTHER'} {len(wanted)} tokens")
        print(tokenizer.decode(wanted), end="\n\n")
    same &= jvm or not args.jvm
    same &= under_qemu is not None or not args.arm
    if under_qemu is None:
        print("not run: aarch64 (make runner-arm, and qemu-user-static)")
    if not jvm:
        print("not run: a JVM (make jni)")
    report["bytes"] = {path.name: path.stat().st_size for path in bundle.iterdir()}
    atomic_write(args.demo / "phone.json", json.dumps(report, indent=1) + "\n")
    print(f"bundle {bundle}, exported in {seconds:.0f} s; all numbers in {args.demo / 'phone.json'}")
    return 0 if same else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(main())
