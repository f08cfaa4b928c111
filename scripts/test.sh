#!/usr/bin/env bash
# Lint, types and tests:   bash scripts/test.sh [arguments of pytest]
# Installs missing packages, including the extras [dev,hf,data,curate,eval,serve].
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export PIP_COMPILE=0 # most installed files are never imported
find_python "dev,hf,data,curate,eval,serve"
cd "$ROOT"
unset PYTHONDONTWRITEBYTECODE # otherwise each of hundreds of processes compiles the project again
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .
"$PYTHON" -m mypy & # in parallel with the tests, because it uses only one core
mypy=$!
trap 'kill "$mypy" 2>/dev/null || true' EXIT # Ctrl-C does not end background processes of bash
# Four tests at a time for two cores, because their ranks wait for each other; one thread each.
export OMP_NUM_THREADS=1
code=0
"$PYTHON" -m pytest -n 4 --dist worksteal "$@" || code=$?
wait "$mypy" || { log "error: mypy failed, see above"; code=1; }
exit "$code"
