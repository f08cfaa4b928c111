#!/usr/bin/env bash
# Pretrain GPT-2 with each layer split over MP_SIZE ranks (default 2), and with data parallelism over the rest:
#   MP_SIZE=2 GPUS_PER_NODE=4 bash scripts/pretrain_gpt2_model_parallel.sh [flags of pretrain_gpt2.py]
# Environment variables give the number of ranks: see launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch_model_parallel 2 "$@"
