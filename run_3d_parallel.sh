#!/usr/bin/env bash
# 3D-parallel training. NUM_GPUS processes (default 8) as TP_SIZE x PP_SIZE (default 2 x 2) x data; further
# words go to the script.
set -euo pipefail
cd "$(dirname "$0")"
exec "${PYTHON:-python3}" train_3d_parallel.py --nproc-per-node "${NUM_GPUS:-8}" \
    --tp_size "${TP_SIZE:-2}" --pp_size "${PP_SIZE:-2}" "$@"
