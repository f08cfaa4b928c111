#!/usr/bin/env bash
# Run a program in the project's environment:   bash scripts/python.sh tools/generate_text.py --load DIR ...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
find_python ""
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" "$@"
