#!/usr/bin/env bash
# Environment report, then a few training steps of one small model in every kind of layout, up to 8 processes on this
# machine. A layout passes if it ends at the loss of one process. PYTHON names the interpreter.
set -uo pipefail
cd "$(dirname "$0")"
python="${PYTHON:-python3}"
"$python" - <<'PY' || { echo "quick_test: torch cannot be imported by $python; pip install -r requirements.txt, or set PYTHON"; exit 2; }
import platform, torch
print(f"Python {platform.python_version()}, torch {torch.__version__}, GPUs: {torch.cuda.device_count()}")
PY
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
expected="" passed=0 failed=0
# --batch_size is per data-parallel rank: a step has 8 samples in every layout.
small=(--vocab_size 500 --hidden_size 64 --num_attention_heads 4 --num_layers 4 --max_seq_len 64 --max_steps 5)
torchrun=("$python" -m torch.distributed.run --standalone)

run() {
    local title="$1" processes="$2" folder="$scratch/$((passed + failed))" began=$SECONDS loss verdict=FAIL; shift 2
    if "$@" "${small[@]}" --run-dir "$folder" >"$scratch/log" 2>&1; then
        loss=$("$python" -c 'import json, sys; print("%.6f" % json.loads(open(sys.argv[1]).readlines()[-1])["loss"])' \
            "$folder/metrics.jsonl")
        expected="${expected:-$loss}"
        "$python" -c 'import sys; a, b = map(float, sys.argv[1:]); sys.exit(abs(a - b) > 1e-4 * b)' "$loss" "$expected" \
            && verdict=PASS
    fi
    printf '%s  %-25s  %9s  %-9s  %3d s\n' "$verdict" "$title" "$processes" "${loss:--}" $((SECONDS - began))
    if [ "$verdict" = PASS ]; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    if [ -n "${loss:-}" ]; then echo "      the loss of one process is $expected"; else tail -n 15 "$scratch/log"; fi
}

printf '      %-25s  %9s  %-9s\n' layout processes loss
run "one process" 1 "$python" train.py --nproc-per-node 1 --batch_size 8
run "data parallel" 2 "${torchrun[@]}" --nproc_per_node=2 train.py --batch_size 4
run "tensor parallel" 2 "${torchrun[@]}" --nproc_per_node=2 train.py --tp_size 2 --batch_size 8
run "pipeline parallel" 2 "${torchrun[@]}" --nproc_per_node=2 train_3d_parallel.py --pp_size 2 \
    --num_microbatches 4 --batch_size 8
run "tensor x pipeline (2 x 2)" 4 "${torchrun[@]}" --nproc_per_node=4 train_3d_parallel.py --tp_size 2 --pp_size 2 \
    --num_microbatches 4 --batch_size 8
run "3D: with data (2 x 2 x 2)" 8 "${torchrun[@]}" --nproc_per_node=8 train_3d_parallel.py --tp_size 2 --pp_size 2 \
    --num_microbatches 4 --batch_size 4
echo "$passed of $((passed + failed)) layouts pass"
exit $((failed > 0))
