#!/usr/bin/env bash
# Megatron-style training. NUM_GPUS processes (default 8); CONFIG_FILE names a YAML file,
# HIDDEN_SIZE, NUM_LAYERS, TP_SIZE and PP_SIZE override it; further words go to the script.
set -euo pipefail
cd "$(dirname "$0")"
words=()
[ -n "${CONFIG_FILE:-}" ] && words+=(--config "$CONFIG_FILE")
[ -n "${HIDDEN_SIZE:-}" ] && words+=(--hidden_size "$HIDDEN_SIZE")
[ -n "${NUM_LAYERS:-}" ] && words+=(--num_layers "$NUM_LAYERS")
[ -n "${TP_SIZE:-}" ] && words+=(--tp_size "$TP_SIZE")
[ -n "${PP_SIZE:-}" ] && words+=(--pp_size "$PP_SIZE")
exec "${PYTHON:-python3}" train_megatron.py --nproc-per-node "${NUM_GPUS:-8}" \
    ${words[@]+"${words[@]}"} "$@"
