#!/bin/sh
# Every suite on the machine's GPU. Leaves perf.json and perf.md in $OUT (default: build/perf); options go to pytest.
set -eu
cd "$(dirname "$0")/.."
out=${OUT:-build/perf}
mkdir -p "$out"
python3 -m pytest perf --benchmark-only --benchmark-disable-gc --benchmark-json="$out/perf.json" "$@" || failed=$?
python3 -m perf.report "$out/perf.json" > "$out/perf.md"
cat "$out/perf.md"
exit "${failed:-0}"
