#!/usr/bin/env bash
# Data-parallel training. NUM_GPUS processes (default 4); further words go to train.py.
set -euo pipefail
cd "$(dirname "$0")"
exec "${PYTHON:-python3}" train.py --nproc-per-node "${NUM_GPUS:-4}" "$@"
