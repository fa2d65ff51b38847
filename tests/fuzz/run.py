"""Run fuzz targets, one for each core at a time: ``run.py [--seconds N] [--runs N] [--only NAME ...] FOLDER ...``

Targets are programs ``fuzz_NAME`` (libFuzzer) in the given folders, and as ``python-NAME`` the files that Python reads
(``TARGETS`` of tests/helpers/hostile.py, which makes sound ones and spoils them). Seeds of programs are in
``csrc/fuzz/seeds/NAME``, replayed by ``make test`` (``replay_NAME`` of CTest); ``csrc/fuzz/seeds/NAME.dict``, if it is
there, is libFuzzer's dictionary. What was executed is printed as a table.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SEEDS = ROOT / "csrc" / "fuzz" / "seeds"
OUT = ROOT / "build" / "fuzz"


def name_of(target: Path) -> str:
    return target.name.removeprefix("fuzz_")


def run_files(name: str, seconds: float, runs: int) -> tuple[int, bool]:
    """Executions, and whether all was well, over a kind of file that Python reads."""
    import hostile

    os.chdir(OUT)
    try:
        return hostile.fuzz(OUT / "sound", name, seed=random.randrange(1 << 32), executions=runs, seconds=seconds), True
    except Exception:
        traceback.print_exc()
        return 0, False


def run_program(target: Path, seconds: int, runs: int) -> tuple[int, bool]:
    """Executions, and whether all was well. What it finds on its way is kept for the next time."""
    name = name_of(target)
    corpus, seeds, words = OUT / "corpus" / name, SEEDS / name, SEEDS / f"{name}.dict"
    corpus.mkdir(parents=True, exist_ok=True)
    command = [str(target), f"-max_total_time={seconds}", "-print_final_stats=1", "-verbosity=0"]
    command += [f"-runs={runs}"] if runs < 1 << 31 else []
    command += [f"-artifact_prefix={OUT}/{name}-", "-rss_limit_mb=2048", "-timeout=60", "-max_len=16384"]
    command += [f"-dict={words}"] if words.exists() else []
    done = subprocess.run([*command, str(corpus), str(seeds)], stderr=subprocess.PIPE, text=True, errors="replace")
    found = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
    if done.returncode != 0 or found is None:
        sys.stderr.write(done.stderr)
    return int(found[1]) if found else 0, done.returncode == 0


def run_one(name: str, program: Path | None, seconds: int, runs: int) -> tuple[str, int, bool, float]:
    """Its name, executions, whether all was well, and seconds; in a process of its own."""
    begun = time.monotonic()
    if program is not None:
        executed, sound = run_program(program, seconds, runs)
    else:
        executed, sound = run_files(name.removeprefix("python-"), seconds, runs)
    return name, executed, sound, time.monotonic() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="of the programs")
    parser.add_argument("--seconds", type=int, default=60, help="of each (60)")
    parser.add_argument("--runs", type=int, default=1 << 40, help="executions of each at most")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these")
    args = parser.parse_args()
    found = [p for folder in args.folders for p in sorted(folder.glob("fuzz_*")) if p.is_file() and not p.suffix]
    programs = {name_of(p): p.resolve() for p in found}
    sys.path.insert(0, str(HERE.parent / "helpers"))
    import hostile

    names = [*programs, *(f"python-{name}" for name in hostile.TARGETS)]
    names = [name for name in names if not args.only or name in args.only]
    missing = [name for name in names if name in programs and not any((SEEDS / name).glob("*"))]
    if missing or not names:
        print(f"no seeds of {', '.join(missing)} in {SEEDS}" if missing else "no targets", file=sys.stderr)
        return 1
    shutil.rmtree(OUT / "sound", ignore_errors=True)
    OUT.mkdir(parents=True, exist_ok=True)
    if any(name not in programs for name in names):
        hostile.write_sound(OUT / "sound")
    well = True
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        runs = [pool.submit(run_one, name, programs.get(name), args.seconds, args.runs) for name in names]
        for run in as_completed(runs):
            name, executed, sound, seconds = run.result()
            failed = "" if sound else "   FAILED"
            print(f"{name:16} {executed:12,} executions {seconds:8.0f} s{failed}", flush=True)
            well = well and sound
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
