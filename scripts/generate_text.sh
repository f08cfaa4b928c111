#!/usr/bin/env bash
# Write text with a trained model:   bash scripts/generate_text.sh [flags of tools/generate_text.py]
# From the environment, each for a flag:
#   CHECKPOINT_PATH  the --save folder of a training run (default: the newest under checkpoints/)
#   MPSIZE           ranks that share each layer (1; also MP_SIZE); whatever the training had
#   TEMP TOPK TOPP   --temperature, --top-k, --top-p
#   MAXSEQLEN        --max-new-tokens
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

name=MP_SIZE size=${MP_SIZE:-${MPSIZE:-1}}
[ -n "${MP_SIZE:-}" ] || name=MPSIZE
within "$name" "$size" 1 99999 "give the ranks that share each layer"

find_checkpoint "$@"
flags=(${LOAD[@]+"${LOAD[@]}"})
[ -z "${TEMP:-}" ] || flags+=(--temperature "$TEMP")
[ -z "${TOPK:-}" ] || flags+=(--top-k "$TOPK")
[ -z "${TOPP:-}" ] || flags+=(--top-p "$TOPP")
[ -z "${MAXSEQLEN:-}" ] || flags+=(--max-new-tokens "$MAXSEQLEN")

find_python ""
PROGRAM=tools/generate_text.py
if [ $((10#$size)) = 1 ]; then
    exec "$PYTHON" "$ROOT/$PROGRAM" ${flags[@]+"${flags[@]}"} "$@"
fi
within MASTER_PORT "${MASTER_PORT:-6000}" 1 65535 "give a free port, or unset it"
NODES=1 NODE_RANK=0 RANKS=$((10#$size))
start ${flags[@]+"${flags[@]}"} "$@"
