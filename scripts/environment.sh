# The scripts source this file. ROOT is the project's folder. `find_python EXTRAS` sets PYTHON to an interpreter that
# can run the project. It takes the interpreter of the active environment if that has all packages, and otherwise the one
# of $ROOT/.venv, which it makes with the versions of constraints.txt if the folder is missing. Works with Bash 3.2.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
LEAST="torch numpy safetensors" # training needs only these
MODULES="$LEAST tiktoken sentencepiece ftfy tokenizers tqdm matplotlib"
TEST_MODULES="transformers pytest pytest_timeout xdist ruff mypy setuptools tensorboard wandb hypothesis megatron.core
    pyarrow gigatoken orjson xxhash tldextract trafilatura lxml_html_clean pebble py3langid datatrove lm_eval
    starlette uvicorn pydantic openai playwright gguf"

log() { echo "$*" >&2; }

# has PYTHON MODULE...: succeeds if this interpreter is new enough, has every module, and its torch is 2.11 or newer
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

# suitable_python: prints a Python that can make an environment, if possible python3. The function starts each candidate,
# because commands of pyenv may exist without working.
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

# install EXTRAS: makes .venv if it is missing, and installs the project into it
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

# find_python EXTRAS ("" or "dev,hf,data,curate,eval,serve"): sets PYTHON, or ends the script and names what is missing
find_python() {
    local needed=$MODULES own=$ROOT/.venv/bin/python
    [ -z "$1" ] || needed="$MODULES $TEST_MODULES"
    # $needed and $LEAST are lists and therefore unquoted.
    for PYTHON in python python3 "$own"; do
        if has "$PYTHON" $needed; then
            PYTHON=$(command -v "$PYTHON")
            return
        fi
    done
    # With flock, two scripts that start together (nodes that share a disk) wait for each other.
    if mkdir -p "$ROOT/.venv" && (
        flock 9 2>/dev/null || true
        has "$own" $needed || install "$1"
    ) 9>"$ROOT/.venv/lock" && has "$own" $needed; then
        return # the loop has set PYTHON to the interpreter of .venv
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
