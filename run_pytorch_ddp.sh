#!/usr/bin/env bash
# Data-parallel training. NUM_GPUS processes (default 4); further words go to train.py.
set -euo pipefail
cd "$(dirname "$0")"
exec "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc_per_node="${NUM_GPUS:-4}" train.py "$@"
