# Sourced by the scripts that start several ranks. `launch FLAGS...` runs PROGRAM on every rank of this node: the only
# node starts its ranks by --nproc-per-node, several by torchrun. `launch_model_parallel SIZE FLAGS...` also splits each
# layer. A value that cannot be ends the script in one line and status 2. From the environment:
#   GPUS_PER_NODE  ranks on this node (default: the visible GPUs, 2 on a CPU)
#   NNODES         nodes (1); with more, run the script on each, with
#   NODE_RANK      the node's own number (0 to NNODES-1)
#   MASTER_ADDR    host of node 0
#   MASTER_PORT    a free port there (6000)
#   MP_SIZE        ranks that share each layer (default: SIZE; also MPSIZE), of launch_model_parallel alone
#   OMP_NUM_THREADS  threads of a rank (default: cores / ranks)

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
PROGRAM=pretrain_gpt2.py # under $ROOT; another script names another one

# within NAME VALUE LEAST MOST ADVICE: goes on where VALUE is a whole number from LEAST to MOST
within() {
    case $2 in
        '' | *[!0-9]* | ??????????*) ;; # not digits, or too many for bash's own numbers
        *) if [ "$2" -ge "$3" ] && [ "$2" -le "$4" ]; then return; fi ;;
    esac
    say "error: $1=$2 is not a whole number from $3 to $4: $5"
    exit 2
}

# read_size DEFAULT: sets SIZE, the ranks that share each layer
read_size() {
    local name=MP_SIZE
    SIZE=${MP_SIZE:-${MPSIZE:-$1}}
    [ -n "${MP_SIZE:-}" ] || [ -z "${MPSIZE:-}" ] || name=MPSIZE
    within "$name" "$SIZE" 1 99999 "give the ranks that share each layer"
    SIZE=$((10#$SIZE)) # a leading 0 would mean octal
}

# Sets PYTHON, NODES and RANKS (those of this node; 0 on the only one: the program counts the GPUs)
read_layout() {
    within NNODES "${NNODES:-1}" 1 99999 "give the number of nodes"
    NODES=$((10#${NNODES:-1}))
    within NODE_RANK "${NODE_RANK:-0}" 0 $((NODES - 1)) "give this node's own number, below NNODES=$NODES"
    if [ "$NODES" -gt 1 ]; then
        if [ -z "${MASTER_ADDR:-}" ]; then
            say "error: NNODES=$NODES needs MASTER_ADDR, the host of node 0"
            exit 2
        fi
        within MASTER_PORT "${MASTER_PORT:-6000}" 1 65535 "give a port of node 0, or unset it"
    fi
    if [ -n "${GPUS_PER_NODE:-}" ]; then
        within GPUS_PER_NODE "$GPUS_PER_NODE" 1 99999 "give the ranks of this node, or unset it"
    fi
    find_python ""
    RANKS=${GPUS_PER_NODE:-0}
    if [ "$RANKS" = 0 ] && [ "$NODES" -gt 1 ]; then
        RANKS=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')
    fi
    RANKS=$((10#$RANKS))
}

# start FLAGS...: $PROGRAM on RANKS of each of NODES
start() {
    local cores
    if [ "$NODES" = 1 ]; then
        exec "$PYTHON" "$ROOT/$PROGRAM" --nproc-per-node "$RANKS" "$@"
    fi
    if [ -z "${OMP_NUM_THREADS:-}" ]; then # or torchrun would give each rank one
        cores=$(getconf _NPROCESSORS_ONLN)
        export OMP_NUM_THREADS=$((cores > RANKS ? cores / RANKS : 1))
    fi
    exec "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$RANKS" \
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-6000}" "$ROOT/$PROGRAM" "$@"
}

launch() {
    read_layout
    start "$@"
}

launch_model_parallel() {
    read_size "$1"
    shift
    read_layout
    start --model-parallel-size "$SIZE" "$@"
}

# find_checkpoint FLAGS...: sets LOAD, the flags that name the trained model: none where FLAGS say it, else
# CHECKPOINT_PATH, else the newest under checkpoints/
find_checkpoint() {
    local tracker newest=""
    LOAD=()
    case " ${*//=/ } " in
        *" --load "* | *" --help "* | *" -h "*) return ;;
    esac
    if [ -z "${CHECKPOINT_PATH:-}" ]; then
        for tracker in checkpoints/*/latest_checkpointed_iteration.txt; do
            if [ -e "$tracker" ] && { [ -z "$newest" ] || [ "$tracker" -nt "$newest" ]; }; then newest=$tracker; fi
        done
        if [ -z "$newest" ]; then
            say "error: no checkpoint is under checkpoints/: name one with CHECKPOINT_PATH=FOLDER"
            exit 2
        fi
        CHECKPOINT_PATH=${newest%/*}
        say "notice: the newest checkpoint is of $CHECKPOINT_PATH"
    fi
    LOAD=(--load "$CHECKPOINT_PATH")
}
