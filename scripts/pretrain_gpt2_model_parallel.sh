#!/usr/bin/env bash
# Pretrain GPT-2 with each layer split over MP_SIZE ranks (2), and data-parallel over the rest:
#   MP_SIZE=2 GPUS_PER_NODE=4 bash scripts/pretrain_gpt2_model_parallel.sh [flags of pretrain_gpt2.py]
# The ranks come from the environment: see launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch_model_parallel 2 "$@"
