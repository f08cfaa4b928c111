#!/usr/bin/env bash
# Test the GPU code on a fake GPU:   bash scripts/test_fake_cuda.sh [arguments of pytest]
# Needs torch's CUDA build and g++, but no driver. If the active environment's torch is not a CUDA build, .venv-cuda is
# made from the package index, once (some GB, a minute). If the installation fails, the tests are skipped, and the last
# line says why. RECORD_BUDGETS=1 records the current number of kernels of each mode as its budget.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

# has_cuda PYTHON: succeeds if this interpreter has the packages for the tests and a CUDA build of torch
has_cuda() {
    has "$1" $LEAST pytest pytest_timeout && "$1" -c 'import torch; assert torch.version.cuda' >/dev/null 2>&1
}

skip() {
    log "SKIPPED: the tests on a fake GPU did NOT run: $1"
    exit 0
}

own=$ROOT/.venv-cuda/bin/python
PYTHON=python3
if ! has_cuda "$PYTHON"; then
    PYTHON=$own
    if ! has_cuda "$PYTHON"; then
        python=$(suitable_python) || skip "there is no Python 3.10 or newer"
        log "making .venv-cuda with torch's CUDA build; this takes a minute and some GB, once"
        # "===" excludes builds with a local label, such as 2.13.0+cpu.
        release=$(sed -n 's/^torch==/torch===/p' constraints.txt)
        { "$python" -m venv "$ROOT/.venv-cuda" &&
            "$own" -m pip install --quiet --disable-pip-version-check "$release" numpy safetensors pytest pytest-timeout \
                >&2; } || skip "torch's CUDA build could not be installed"
        has_cuda "$PYTHON" || skip "the package index gave a torch without CUDA"
    fi
fi
command -v g++ >/dev/null || skip "there is no g++"
FAKE_CUDA=1 OMP_NUM_THREADS=1 PYTHONPATH=$ROOT "$PYTHON" -m pytest tests/fake_cuda -p no:cacheprovider "$@"
