#!/usr/bin/env bash
# Every check that needs an accelerator: kernel numerics on the device, kernels against copy bandwidth and plain torch, whole layers and steps, a short training run.
# From a fresh checkout:  pip install -e '.[dev]' && scripts/bench/gpu.sh      Each part has a time-out; all together take less than 10 minutes.
# PYTHON: the interpreter to use. OUT: a folder for logs and results (default: outputs/gpu).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${PYTHON:-python3}"
out="${OUT:-outputs/gpu}"
mkdir -p "$out"

"$python" - <<'PY' || exit 2
import sys, torch
if torch.accelerator.current_accelerator() is None:
    sys.exit("no accelerator: torch finds none on this machine")
PY

names=() results=() times=() failed=0
part() { # name, seconds allowed, command...
  local name=$1 limit=$2 start=$SECONDS result=passed
  shift 2
  echo "== $name"
  timeout "$limit" "$@" 2>&1 | tee "$out/${name// /-}.log"
  local status=${PIPESTATUS[0]}
  if [ "$status" -eq 124 ]; then result="over $limit s"; elif [ "$status" -ne 0 ]; then result="failed ($status)"; fi
  [ "$result" = passed ] || failed=1
  names+=("$name") results+=("$result") times+=("$((SECONDS - start)) s")
}

part "kernel numerics" 180 env PARTITA_KERNEL_TESTS=device "$python" -m pytest -q -p no:cacheprovider tests/kernels
part "kernel bench" 150 "$python" scripts/bench/kernels.py --compile --json "$out/kernels.json"
part "layer bench" 100 "$python" scripts/bench/layers.py --json "$out/layers.json"
part "product bench" 60 "$python" scripts/bench/products.py --json "$out/products.json"
part "short train" 110 "$python" scripts/train.py train.steps=20 precision=bf16 launch.ranks=1 "run.dir=$out/train"

echo
printf '%-18s %-14s %s\n' part result time
for i in "${!names[@]}"; do printf '%-18s %-14s %s\n' "${names[$i]}" "${results[$i]}" "${times[$i]}"; done
exit "$failed"
