#!/usr/bin/env bash
# The rows of docs/explanation/gpu-slices.md that have no number of the code as it is, in under ten minutes of a machine with a GPU:
#
#   bash benchmarks/gpu/open_rows.sh                  results in out/*.json, one file a step, written as they come
#   LAMINA_GPU=null bash benchmarks/gpu/open_rows.sh  without a GPU, on the executor's twin: tries the script, its numbers mean nothing
#
# beside    an interactive model beside long work on the whole device, without an SLO and with one of 10 s   (goal 99 % in 25 ms; 80 % of what is left)
# density   forty models: first and second start, 1,600 calls/s; 200 registered and 60 standing               (goals 8, 25 and 12 s; 99 % in 100 ms)
# peers     five models behind HTTP at 1.2 to 5 times the best goodput                                        (goal 0.9 to 0.95 of it kept)
# elastic   a lent home, by the product's own controller                                                      (goal 80 % less; at most 10 % more)
# bad_graphs  10,000 requests with changes, only if it is named                                               (goal: nothing leaked, nobody late)
#
# Steps can be named: `bash benchmarks/gpu/open_rows.sh beside elastic`.
set -u
OUT=${OUT:-out}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}
declare -A LIMIT=([beside]=120 [density]=230 [peers]=100 [elastic]=130 [bad_graphs]=120)
if [ $# -gt 0 ]; then steps=("$@"); else steps=(beside density peers elastic); fi
[ "${LAMINA_GPU:-auto}" = null ] || nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv,noheader
for step in "${steps[@]}"; do
  begin=$(date +%s)
  LAMINA_CASES=whole,patient LAMINA_PARTS=${LAMINA_PARTS:-server,many} LAMINA_PEERS=lamina LAMINA_RATES=${LAMINA_RATES:-"800 1000"} \
    timeout -s INT -k 5 "${LIMIT[$step]}" "$PYTHON" -m benchmarks.gpu "$step" --out="$OUT" 2>&1 | tee -a "$OUT/log.txt"
  echo "== $step: $(($(date +%s) - begin)) of ${LIMIT[$step]} s"
done
