#!/usr/bin/env bash
# The rows of docs/explanation/gpu-slices.md that are open, or have no number of the code as it is, in ten minutes of a machine with a GPU:
#
#   bash benchmarks/gpu/open_rows.sh                  results in out/*.json, one file a step, written as they come
#   LAMINA_GPU=null bash benchmarks/gpu/open_rows.sh  without a GPU, on the executor's twin: tries the script, its numbers mean nothing
#
# five      `frontier` as it comes against a stream per model                              (goals 1.8, 1.25 and 1.05 times, at 3x, 5x and 10x)
# elastic   a lent home, by the product's own controller, with a graph for the whole device (goal: the large tenant at most 10 % more)
# beside    interactive calls beside 0.2 s of work on half of the device, without and with a home (goals 99 and 99.5 % in 25 ms)
# density   forty models with the imports standing by, after what captures leave has gone back (goal: 100 MiB each beside the weights)
# clients   1 to 64 clients by kernel graphs, and a process for each, with the driver's own number of queues
# peers     five models behind HTTP at 1.2 to 5 times the best goodput                      (goals 0.95, 0.95, 0.93, 0.9 of it kept)
# bad_graphs, segments, kernel_graphs, overcommit: only if they are named
#
# Steps can be named: `bash benchmarks/gpu/open_rows.sh beside elastic`.
set -u
OUT=${OUT:-out}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}
declare -A LIMIT=([five]=170 [elastic]=100 [beside]=110 [density]=60 [clients]=75 [peers]=100)
if [ $# -gt 0 ]; then steps=("$@"); else steps=(five elastic beside density clients peers); fi
[ "${LAMINA_GPU:-auto}" = null ] || nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv,noheader
for step in "${steps[@]}"; do
  begin=$(date +%s)
  LAMINA_CASES=${LAMINA_CASES:-0,1} LAMINA_PARTS=${LAMINA_PARTS:-imports} LAMINA_PEERS=lamina LAMINA_RATES=${LAMINA_RATES:-"600 800 1000"} \
    LAMINA_MODES=${LAMINA_MODES:-"streams default"} LAMINA_GOALS=${LAMINA_GOALS:-"3 5 10"} \
    timeout -s INT -k 5 "${LIMIT[$step]:-120}" "$PYTHON" -m benchmarks.gpu "$step" --out="$OUT" 2>&1 | tee -a "$OUT/log.txt"
  echo "== $step: $(($(date +%s) - begin)) s"
done
