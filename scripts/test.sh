#!/usr/bin/env bash
# Lint, types and tests:   bash scripts/test.sh [arguments of pytest]
# Installs what is missing, the extras [dev,hf,data,curate,eval,serve] included.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export PIP_COMPILE=0 # most of what is installed is never imported
find_python "dev,hf,data,curate,eval,serve"
cd "$ROOT"
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile the project anew
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .
"$PYTHON" -m mypy & # beside the tests: alone it would leave a core idle
mypy=$!
trap 'kill "$mypy" 2>/dev/null || true' EXIT # Ctrl-C does not reach what bash runs in the background
# Four tests at a time on two cores, since their ranks wait for each other; one thread each.
export OMP_NUM_THREADS=1
code=0
"$PYTHON" -m pytest -n 4 --dist worksteal "$@" || code=$?
wait "$mypy" || { log "error: mypy found what it names above"; code=1; }
exit "$code"
