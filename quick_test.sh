#!/usr/bin/env bash
# Environment report and a short training run with one process and with two.
set -uo pipefail
cd "$(dirname "$0")"
python="${PYTHON:-python3}"
"$python" - <<'PY' || { echo "quick_test: torch cannot be imported by $python; pip install -r requirements.txt, or set PYTHON"; exit 2; }
import platform, torch
print(f"Python {platform.python_version()}, torch {torch.__version__}, GPUs: {torch.cuda.device_count()}")
PY
failed=0
run() {
    local title="$1"; shift
    local log; log=$(mktemp)
    if "$@" >"$log" 2>&1; then echo "PASS  $title"; else echo "FAIL  $title"; tail -n 15 "$log"; failed=1; fi
    rm -f "$log"
}
small=(--vocab_size 500 --hidden_size 64 --num_layers 2 --batch_size 4 --max_seq_len 64 --max_steps 10)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
run "one process" "$python" train.py "${small[@]}" --run-dir "$scratch/one" --nproc-per-node 1
run "two processes, data parallel" "$python" -m torch.distributed.run --standalone --nproc_per_node=2 train.py \
    "${small[@]}" --run-dir "$scratch/two"
exit $failed
