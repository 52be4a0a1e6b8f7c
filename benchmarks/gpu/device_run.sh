#!/usr/bin/env bash
# One visit to a machine with a GPU and no network: `bash benchmarks/gpu/device_run.sh tests live faults overhead five`.
# Wheels of what it lacks lie in build/wheels. All results are in $OUT/results.tgz (default: out/), renewed after each step.
set -u
OUT=${OUT:-out}
RESULTS=$(mktemp -d)
mkdir -p "$OUT"
python3 -m pip install -q --no-index --find-links build/wheels --target /tmp/site msgspec httptools uvloop click rich \
  prometheus-client python-multipart threadpoolctl pytest pytest-timeout hypothesis safetensors 2>&1 | tail -2
export PYTHONPATH="$PWD/src:$PWD:/tmp/site" PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv,noheader
for what in "$@"; do
  begin=$(date +%s)
  case "$what" in
    tests)
      python3 -m pytest -q -p no:cacheprovider -m "" tests/gpu tests/live/test_gpu_engine.py 2>&1 |
        tee "$RESULTS/h200-contract-tests.txt" | tail -30 ;;
    doctor) python3 -m lamina doctor 2>&1 | tee "$RESULTS/doctor.txt" ;;
    *) OUT="$RESULTS" timeout "${LIMIT:-280}" python3 -m benchmarks.gpu "$what" --out="$RESULTS" 2>&1 | tee -a "$RESULTS/log.txt" ;;
  esac
  echo "== $what: $(($(date +%s) - begin)) s"
  tar czf "$OUT/results.tgz" -C "$RESULTS" .
done
