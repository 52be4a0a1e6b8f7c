#!/usr/bin/env bash
# What depends on wall time, on a machine with cores to spare and no network: `bash benchmarks/attacks/device_run.sh 4-11 soak:300 floods:90`,
# the cores that may be used, and steps with their seconds. Wheels of what it lacks lie in build/wheels; results go to $OUT (default: out/).
set -u
CORES=$1; shift
TOP=${OUT:-out} PYTHON=${PYTHON:-python3}
mkdir -p "$TOP"
[ -d build/wheels ] && $PYTHON -m pip install -q --no-index --no-deps --target /tmp/site build/wheels/*.whl 2>&1 | tail -2
export PYTHONPATH="$PWD/src:$PWD:/tmp/site" PYTHONUNBUFFERED=1
for step in "$@"; do
  what=${step%%:*} limit=${step##*:} begin=$(date +%s)
  case "$what" in
    soak) command=(-m tests.soak server 8000:60000 --jobs "$(taskset -c "$CORES" nproc)" --for "$limit" --record "$TOP/soak.json") ;;
    floods) command=(-m benchmarks.attacks.floods 1.5) ;;
    memory) command=(-m benchmarks.attacks.memory) ;;
    loop_lag) command=(-m benchmarks.attacks.loop_lag) ;;
    takeovers) command=(-m benchmarks.attacks.takeovers --takeovers 40 --databases sqlite --out "$TOP/takeovers.json") ;;
    *) echo "no step $what"; continue ;;
  esac
  timeout -s INT -k 5 $((limit + 30)) taskset -c "$CORES" "$PYTHON" "${command[@]}" > "$TOP/$what.txt" 2>&1; touch -d "@$begin" "$TOP/$what.txt"
  [ results/attacks/"$what".json -nt "$TOP/$what.txt" ] && cp results/attacks/"$what".json "$TOP/"
  echo "== $what: $(($(date +%s) - begin)) s, load $(cut -d' ' -f1 /proc/loadavg)"; grep -v "^  \|of .* worlds wrong" "$TOP/$what.txt" | tail -20
done
