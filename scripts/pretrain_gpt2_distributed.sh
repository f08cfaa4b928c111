#!/usr/bin/env bash
# Pretrain GPT-2 with data parallelism:   bash scripts/pretrain_gpt2_distributed.sh [flags of pretrain_gpt2.py]
# Environment variables give the number of ranks: see launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch "$@"
