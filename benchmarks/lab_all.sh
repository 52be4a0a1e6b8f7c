#!/usr/bin/env bash
# All experiments of the lab in full, then the report and the headline tables. One command, no network:
#
#   benchmarks/lab_all.sh [FOLDER] [NAME ...]      default: results/lab, all experiments
#
# About 21 minutes on 16 cores. JOBS=N: so many processes. LIMIT_S=N: stop after so many seconds, write the reports of what is there;
# the next run takes up where this one stopped, if the commit is the same and FOLDER has come along. Without a git checkout, set LAMINA_COMMIT.
# QUICK=1: a smoke test of all of it in a minute or two; its rows have files of their own.
# An experiment that fails does not stop the others; the exit code is then 1.
set -uo pipefail
cd "$(dirname "$0")/.."

folder=${1:-results/lab}
shift || true
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
JOBS=${JOBS:-$(nproc)}
LIMIT_S=${LIMIT_S:-86400}
QUICK=${QUICK:+--quick}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

# name:core-seconds, at most: measured on a busy 2.8 GHz Xeon, or taken from there. What promises are judged by comes first.
# `scale` measures time: it runs alone, and last.
EXPECTED="worlds:1100 fleets:2500 patience:1700 beside:1400 fairness:950 kaas:300 ablation:1750 fewest:2900 esg:1500 has:1400 admission:400 glet:1200 traces:2600 scale:200"
wanted=" $* "

status=0 begun=$SECONDS
for entry in $EXPECTED; do
  name=${entry%%:*} cost=${entry##*:}
  if [ "$wanted" != "  " ] && [[ "$wanted" != *" $name "* ]]; then continue; fi
  jobs=$JOBS
  if [ "$name" = scale ]; then jobs=1; fi
  left=$((LIMIT_S - SECONDS + begun))
  if [ $left -le 5 ]; then echo "== $name: no time left"; status=1; continue; fi
  echo "== $name: at most about $((cost / jobs + 5)) s with $jobs processes ($((SECONDS - begun)) s so far)"
  started=$SECONDS
  timeout "$left" "$PYTHON" -m lamina lab run "$name" --jobs "$jobs" --resume $QUICK --out "$folder" --json > /dev/null || status=1
  echo "   $name took $((SECONDS - started)) s"
done
"$PYTHON" -m lamina lab report --results "$folder" --out "$folder/report.html" || status=1
"$PYTHON" -m lamina lab report --results "$folder" --markdown --out "$folder/report.md" || status=1
echo "== all in $((SECONDS - begun)) s; $folder/report.html, $folder/report.md"
exit $status
