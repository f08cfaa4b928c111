#!/usr/bin/env bash
# Write text with a trained model:   bash scripts/generate_text.sh [flags of tools/generate_text.py]
# Environment variables, each for a flag:
#   CHECKPOINT_PATH  the --save folder of a training run (default: the newest under checkpoints/)
#   MP_SIZE          ranks that share each layer (default 1; also MPSIZE); may differ from the training's
#   TEMP TOPK TOPP   --temperature, --top-k, --top-p
#   MAXSEQLEN        --max-new-tokens
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

read_size 1
find_checkpoint "$@"
flags=(${LOAD[@]+"${LOAD[@]}"})
[ -z "${TEMP:-}" ] || flags+=(--temperature "$TEMP")
[ -z "${TOPK:-}" ] || flags+=(--top-k "$TOPK")
[ -z "${TOPP:-}" ] || flags+=(--top-p "$TOPP")
[ -z "${MAXSEQLEN:-}" ] || flags+=(--max-new-tokens "$MAXSEQLEN")

find_python ""
exec "$PYTHON" "$ROOT/tools/generate_text.py" --nproc-per-node "$SIZE" ${flags[@]+"${flags[@]}"} "$@"
