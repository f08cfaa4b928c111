#!/usr/bin/env bash
# Serve a trained model:   bash scripts/run_text_generation_server.sh [flags of tools/run_text_generation_server.py]
# Environment variables:
#   CHECKPOINT_PATH  the --save folder of a training run (default: the newest under checkpoints/)
#   MP_SIZE          ranks that share each layer (default 1; also MPSIZE); may differ from the training's
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

read_size 1
find_checkpoint "$@"
find_python ""
exec "$PYTHON" "$ROOT/tools/run_text_generation_server.py" --nproc-per-node "$SIZE" ${LOAD[@]+"${LOAD[@]}"} "$@"
