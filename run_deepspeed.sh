#!/usr/bin/env bash
# Training with sharded state (ZeRO). NUM_GPUS processes (default 4), ZERO_STAGE 1, 2 or 3 (default 2), OFFLOAD=1 for
# optimizer state in host memory (stages 1 and 2); further words go to train_megatron.py.
set -euo pipefail
cd "$(dirname "$0")"
if [ "${OFFLOAD:-0}" = 1 ]; then
    set -- --optimizer-cpu-offload "$@"
fi
exec "${PYTHON:-python3}" train_megatron.py --nproc-per-node "${NUM_GPUS:-4}" \
    --zero-stage "${ZERO_STAGE:-2}" "$@"
