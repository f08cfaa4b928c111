# The scripts that start several ranks source this file. `launch FLAGS...` runs PROGRAM on every rank of this node;
# `launch_model_parallel SIZE FLAGS...` also splits each layer. Wrong values end the script with one line and status 2.
# Environment variables:
#   GPUS_PER_NODE  ranks on this node (default: the visible GPUs, 2 on a CPU)
#   NNODES         nodes (1); with more, run the script on each, with
#   NODE_RANK      the number of this node (0 to NNODES-1)
#   MASTER_ADDR    host of node 0
#   MASTER_PORT    a free port there (29500)
#   MP_SIZE        ranks that share each layer (default: SIZE; also MPSIZE), only for launch_model_parallel
#   OMP_NUM_THREADS  threads per rank (default: cores / ranks)

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
PROGRAM=pretrain_gpt2.py # path below $ROOT; a script may set PROGRAM to a different program

# within NAME VALUE LEAST MOST ADVICE: ends the script with an error unless VALUE is a whole number from LEAST to MOST
within() {
    case $2 in
        '' | *[!0-9]* | ??????????*) ;; # not digits, or too many for bash's own numbers
        *) if [ "$2" -ge "$3" ] && [ "$2" -le "$4" ]; then return; fi ;;
    esac
    log "error: $1=$2 is not a whole number from $3 to $4: $5"
    exit 2
}

# read_size DEFAULT: sets SIZE to MP_SIZE, MPSIZE or DEFAULT, the number of ranks that share each layer
read_size() {
    local name=MP_SIZE
    SIZE=${MP_SIZE:-${MPSIZE:-$1}}
    [ -n "${MP_SIZE:-}" ] || [ -z "${MPSIZE:-}" ] || name=MPSIZE
    within "$name" "$SIZE" 1 99999 "give the ranks that share each layer"
    SIZE=$((10#$SIZE)) # a leading 0 would mean octal
}

launch() {
    local nodes
    within NNODES "${NNODES:-1}" 1 99999 "give the number of nodes"
    nodes=$((10#${NNODES:-1}))
    within NODE_RANK "${NODE_RANK:-0}" 0 $((nodes - 1)) "give the number of this node, below NNODES=$nodes"
    if [ -n "${GPUS_PER_NODE:-}" ]; then
        within GPUS_PER_NODE "$GPUS_PER_NODE" 1 99999 "give the ranks of this node, or unset it"
    fi
    find_python ""
    # With 0 ranks, the program starts one for each GPU.
    exec "$PYTHON" "$ROOT/$PROGRAM" --nproc-per-node $((10#${GPUS_PER_NODE:-0})) --nnodes "$nodes" \
        --node-rank $((10#${NODE_RANK:-0})) "$@"
}

launch_model_parallel() {
    read_size "$1"
    shift
    launch --tensor-model-parallel-size "$SIZE" "$@"
}

# find_checkpoint FLAGS...: sets LOAD to the flags that name the trained model: none if FLAGS have --load, otherwise
# CHECKPOINT_PATH or the newest checkpoint under checkpoints/
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
            log "error: no checkpoint is under checkpoints/: name one with CHECKPOINT_PATH=FOLDER"
            exit 2
        fi
        CHECKPOINT_PATH=${newest%/*}
        log "notice: using the newest checkpoint, in $CHECKPOINT_PATH"
    fi
    LOAD=(--load "$CHECKPOINT_PATH")
}
