#!/usr/bin/env bash
# Pretrain GPT-2 data-parallel:   bash scripts/pretrain_gpt2_distributed.sh [flags of pretrain_gpt2.py]
# The ranks come from the environment: see launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch "$@"
