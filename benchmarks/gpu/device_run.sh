#!/usr/bin/env bash
# One visit to a machine with a GPU and no network: `bash benchmarks/gpu/device_run.sh tests:60 faults:180 five:300`, a step and its seconds; `beside+log:120` keeps event logs.
# Wheels of what it lacks lie in build/wheels. All results are in $OUT/results.tgz (default: out/), renewed after each step.
set -u
TOP=${OUT:-out}
export OUT
OUT=$(mktemp -d)
mkdir -p "$TOP"
export LAMINA_PROFILES=$OUT
python3 -m pip install -q --no-index --no-deps --target /tmp/site build/wheels/*.whl 2>&1 | tail -2
export PYTHONPATH="$PWD/src:$PWD:/tmp/site" PYTHONUNBUFFERED=1 PATH="/tmp/site/bin:$PATH"
# Libraries compiled once, as an installer leaves them: a start is not to be measured with the compiling of torch's sources in it.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=/tmp/pyc
site=$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
(cd "$site" && python3 -m compileall -q -j 0 torch torchvision transformers numpy triton tokenizers safetensors huggingface_hub) >/dev/null 2>&1
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv,noheader
for step in "$@"; do
  what=${step%%:*} limit=${step##*:} begin=$(date +%s)
  case "$what" in
    tests*) # all, or `tests=WORDS` as pytest's -k has them; what a library says before it aborts is not captured
      timeout -k 5 "$limit" python3 -m pytest -q --capture=sys -p no:cacheprovider -m "" -k "$(words=${what#tests}; echo "${words#=}")" tests/gpu tests/engines/test_gpu.py 2>&1 |
        tee -a "$OUT/h200-contract-tests.txt" | tail -60 ;;
    doctor) timeout -k 5 "$limit" python3 -m lamina doctor 2>&1 | tee "$OUT/h200-doctor.txt" ;;
    profile) timeout -k 5 "$limit" python3 -m benchmarks.gpu.profile_check "$OUT/profile" 20 2>&1 | tee "$OUT/profile.txt" ;;
    *.sh) OUT=$TOP timeout -k 5 "$limit" bash "$what" 2>&1 | tee -a "$OUT/log.txt" ;;
    *+log) LAMINA_EVENT_LOGS=$OUT timeout -s INT -k 5 "$limit" python3 -m benchmarks.gpu "${what%+log}" --out="$OUT" 2>&1 | tee -a "$OUT/log.txt" ;;
    *) timeout -s INT -k 5 "$limit" python3 -m benchmarks.gpu "$what" --out="$OUT" 2>&1 | tee -a "$OUT/log.txt" ;;
  esac
  echo "== $what: $(($(date +%s) - begin)) s"
  tar czf "$TOP/results.tgz" -C "$OUT" .
done
