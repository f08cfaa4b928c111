# Sourced by the scripts. `find_python EXTRAS` sets PYTHON to an interpreter that can run the project: the active
# environment's where it has everything, else that of .venv in the project's folder, which is made and filled with
# the versions of constraints.txt where it is missing. ROOT is that folder. Bash 3.2 is enough.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
LEAST="torch numpy safetensors" # training runs with these alone
MODULES="$LEAST tiktoken sentencepiece ftfy tokenizers tqdm matplotlib"
TEST_MODULES="transformers pytest pytest_timeout xdist ruff mypy setuptools tensorboard wandb hypothesis megatron.core
    zstandard pyarrow gigatoken orjson xxhash tldextract trafilatura lxml_html_clean py3langid datatrove lm_eval
    starlette uvicorn pydantic openai playwright"

log() { echo "$*" >&2; }

# has PYTHON MODULE...: this interpreter is new enough, has every module, and its torch is 2.11 or newer
has() {
    local python=$1
    shift
    "$python" -c '
import sys
from importlib.metadata import version
from importlib.util import find_spec
assert sys.version_info >= (3, 10)
assert all(find_spec(name) for name in sys.argv[1:])
assert tuple(map(int, version("torch").split(".")[:2])) >= (2, 11)
' "$@" >/dev/null 2>&1
}

# A Python that can make an environment: the user's own before a newer one. pyenv's commands may be there without
# running, hence the trial.
suitable_python() {
    local python
    for python in python3 python python3.13 python3.12 python3.11 python3.10; do
        if "$python" -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 10)' >/dev/null 2>&1; then
            echo "$python"
            return
        fi
    done
    log "error: found no Python 3.10 or newer that has venv (on Debian and Ubuntu: apt install python3-venv)"
    return 1
}

# install EXTRAS: makes .venv where it is missing, and installs into it
install() {
    local python
    if ! "$ROOT/.venv/bin/python" -c '' 2>/dev/null; then
        python=$(suitable_python) || return 1
        log "making $ROOT/.venv with $("$python" --version)"
        "$python" -m venv "$ROOT/.venv" || return 1
    fi
    log "installing $(grep '^torch==' "$ROOT/constraints.txt") and the rest into .venv; this takes minutes, once"
    "$ROOT/.venv/bin/python" -m pip install --disable-pip-version-check \
        -c "$ROOT/constraints.txt" -e "$ROOT${1:+[$1]}" >&2
}

# find_python EXTRAS ("" or "dev,hf,data,curate,eval,serve"): sets PYTHON, or ends the script with what is missing
find_python() {
    local needed=$MODULES own=$ROOT/.venv/bin/python
    [ -z "$1" ] || needed="$MODULES $TEST_MODULES"
    # $needed and $LEAST are lists: left unquoted on purpose.
    for PYTHON in python python3 "$own"; do
        if has "$PYTHON" $needed; then
            PYTHON=$(command -v "$PYTHON")
            return
        fi
    done
    # Two scripts started together (nodes that share a disk) wait for each other where there is flock.
    if mkdir -p "$ROOT/.venv" && (
        flock 9 2>/dev/null || true
        has "$own" $needed || install "$1"
    ) 9>"$ROOT/.venv/lock" && has "$own" $needed; then
        return # PYTHON is the last one tried, .venv's
    fi
    if [ -z "$1" ]; then
        for PYTHON in "$own" python python3; do
            if has "$PYTHON" $LEAST; then
                PYTHON=$(command -v "$PYTHON")
                log "notice: the installation failed; going on with $PYTHON, which has $LEAST"
                return
            fi
        done
    fi
    log "error: the installation failed, see above. Without a network, activate an environment that has:" $needed
    exit 1
}
