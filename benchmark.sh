#!/usr/bin/env bash
# Benchmarks every layout of NUM_GPUS processes (default 8).
set -euo pipefail
cd "$(dirname "$0")"
exec "${PYTHON:-python3}" -m pentatron bench --nproc-per-node "${NUM_GPUS:-8}" "$@"
