#!/usr/bin/env bash
# Measures a bundle on the device that adb sees: bench.sh OUT RUNNER BUNDLE [options of pi2_runner]
# Copies as run.sh does, and writes into the folder OUT: rounds.json (pi2_runner --repeat 10 --json, with temperatures and
# battery as /sys tells them), device.txt, and before.txt and after.txt, what Android says of battery and throttling.
set -euo pipefail

[ $# -ge 3 ] || {
  echo "bench.sh: arguments: expected OUT RUNNER BUNDLE [options], found $# arguments. See the head of this file." >&2
  exit 2
}
out=$1 run=(bash "$(dirname "$0")/run.sh" "$2" "$3")
shift 3
[ $# -gt 0 ] || set -- --prompt 'def main(' --max-new-tokens 128

conditions() {
  adb shell 'date; dumpsys battery; dumpsys thermalservice' </dev/null
}

"${run[@]}" --help >/dev/null # what is to be copied is copied before anything is measured
mkdir -p "$out"
adb shell 'getprop ro.product.model; getprop ro.soc.model; getprop ro.build.fingerprint; uname -a' </dev/null >"$out/device.txt"
conditions >"$out/before.txt"
"${run[@]}" --repeat 10 --json "$@" >"$out/rounds.json"
conditions >"$out/after.txt"
echo "$out"
