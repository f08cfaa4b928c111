#!/usr/bin/env bash
# Score a trained model on text files:   bash scripts/evaluate_gpt2.sh --valid-data FILE [flags of tools/evaluate_gpt2.py]
# Environment variables, in addition to those of launch.sh:
#   CHECKPOINT_PATH  the --save folder of a training run (default: the newest under checkpoints/)
#   MP_SIZE          ranks that share each layer (default 1; also MPSIZE); further ranks divide the windows
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

find_checkpoint "$@"
PROGRAM=tools/evaluate_gpt2.py
launch_model_parallel 1 ${LOAD[@]+"${LOAD[@]}"} "$@"
