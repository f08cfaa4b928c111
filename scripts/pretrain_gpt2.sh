#!/usr/bin/env bash
# Pretrain GPT-2 in one process:   bash scripts/pretrain_gpt2.sh [flags of pretrain_gpt2.py]
# Installs missing packages. Without flags it trains a small model on the built-in corpus, on a GPU if there is one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
find_python ""
exec "$PYTHON" "$ROOT/pretrain_gpt2.py" "$@"
