#!/usr/bin/env bash
# Copies a bundle and a runner to the device that adb sees, and runs it there: run.sh RUNNER BUNDLE [options of pi2_runner]
#   RUNNER   build/android/pi2 (a build with the NDK) or build/runner-arm/pi2 (make runner-arm: glibc, in its own folder)
# What is there with the same SHA-256 is not copied again. PI2_DEVICE_DIR: where to (/data/local/tmp/torch_pi2).
set -euo pipefail

fail() {
  echo "run.sh: $1" >&2
  exit 2
}

[ $# -ge 2 ] || fail "arguments: expected RUNNER BUNDLE [options], found $# arguments. See the head of this file."
runner=${1%/} bundle=${2%/}
shift 2
target=${PI2_DEVICE_DIR:-/data/local/tmp/torch_pi2}
[ -f "$runner/pi2_runner" ] || fail "$runner: expected a folder with pi2_runner, found none. Build it: docs/ANDROID.md."
[ -f "$bundle/manifest.json" ] || fail "$bundle: expected a bundle, found no manifest.json. Make one: torch-pi2 export."
command -v adb >/dev/null || fail "adb: expected it in PATH, found none. Install Android's platform tools."
[ "$(adb get-state 2>/dev/null)" = device ] || fail "adb: expected one device, found none. Connect it, allow USB debugging."

# For the device's shell, which reads what adb passes on once more.
quoted() {
  local word
  for word in "$@"; do
    printf "'%s' " "${word//\'/\'\\\'\'}"
  done
}

push() {
  local file=$1 to=$2 here there
  here=$(sha256sum <"$file" | cut -d ' ' -f 1)
  there=$(adb shell "cat $(quoted "$to")2>/dev/null | sha256sum" </dev/null | cut -d ' ' -f 1)
  [ "$here" = "$there" ] || adb push "$file" "$to" >/dev/null </dev/null
}

adb shell "mkdir -p $(quoted "$target/runner" "$target/bundle")" </dev/null
for file in "$bundle"/*; do
  push "$file" "$target/bundle/${file##*/}"
done
command="LD_LIBRARY_PATH=$(quoted "$target/runner")$(quoted "$target/runner/pi2_runner")"
for file in "$runner"/pi2_runner "$runner"/run "$runner"/*.so*; do
  [ -f "$file" ] || continue
  push "$file" "$target/runner/${file##*/}"
  # Its own C library: the system's must not find it.
  if [ "${file##*/}" = run ]; then command="sh $(quoted "$target/runner/run")"; fi
done
adb shell "chmod -R 755 $(quoted "$target/runner")" </dev/null
adb shell "$command$(quoted "$target/bundle" "$@")"
