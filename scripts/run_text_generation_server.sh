#!/usr/bin/env bash
# Serve a trained model:   bash scripts/run_text_generation_server.sh [flags of tools/run_text_generation_server.py]
# From the environment:
#   CHECKPOINT_PATH  the --save folder of a training run (default: the newest under checkpoints/)
#   MPSIZE           ranks that share each layer (1; also MP_SIZE); whatever the training had
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

name=MP_SIZE size=${MP_SIZE:-${MPSIZE:-1}}
[ -n "${MP_SIZE:-}" ] || name=MPSIZE
within "$name" "$size" 1 99999 "give the ranks that share each layer"
find_checkpoint "$@"
find_python ""
exec "$PYTHON" "$ROOT/tools/run_text_generation_server.py" ${LOAD[@]+"${LOAD[@]}"} \
    --nproc-per-node $((10#$size)) "$@"
