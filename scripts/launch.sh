# Sourced by the scripts that start several ranks. `launch FLAGS...` runs PROGRAM on every rank of this node through
# torchrun; `launch_model_parallel FLAGS...` also splits each layer. A value that cannot be ends the script in
# one line and status 2. From the environment:
#   GPUS_PER_NODE  ranks on this node (default: the visible GPUs, 2 on a CPU)
#   NNODES         nodes (1); with more, run the script on each, with
#   NODE_RANK      the node's own number (0 to NNODES-1)
#   MASTER_ADDR    host of node 0 (localhost)
#   MASTER_PORT    a free port there (6000; where it is not set and 6000 is taken on the only node, another)
#   MP_SIZE        model-parallel ranks (2; also MPSIZE), of launch_model_parallel alone; divides all nodes' ranks
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

# free_port WANTED EXACT: WANTED where nothing listens there, else a port that the system picks; with EXACT "yes", fail
# and say why
free_port() {
    "$PYTHON" -c '
import errno, os, socket, sys
for port in [int(sys.argv[1])] + [0] * (sys.argv[2] != "yes"):
    try:
        with socket.create_server(("", port)) as server:
            print(server.getsockname()[1])
            break
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "is taken" if taken else f"cannot be listened on ({os.strerror(error.errno or 0)})"
else:
    sys.exit(f"error: MASTER_PORT={sys.argv[1]} {why}: unset it, or name a free one")
' "$1" "$2"
}

# Sets PYTHON, NODES and RANKS (those of this node). 10# because a leading 0 would mean octal.
read_layout() {
    within NNODES "${NNODES:-1}" 1 99999 "give the number of nodes"
    NODES=$((10#${NNODES:-1}))
    within NODE_RANK "${NODE_RANK:-0}" 0 $((NODES - 1)) "give this node's own number, below NNODES=$NODES"
    within MASTER_PORT "${MASTER_PORT:-6000}" 1 65535 "give a port of node 0, or unset it"
    if [ -n "${GPUS_PER_NODE:-}" ]; then
        within GPUS_PER_NODE "$GPUS_PER_NODE" 1 99999 "give the ranks of this node, or unset it"
    fi
    find_python ""
    RANKS=${GPUS_PER_NODE:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')}
    RANKS=$((10#$RANKS))
}

# The rest of both: FLAGS... of $PROGRAM
start() {
    local port=${MASTER_PORT:-6000} cores
    if [ "$NODES" = 1 ]; then
        port=$(free_port "$port" "${MASTER_PORT:+yes}") || exit 2
    fi
    if [ -z "${OMP_NUM_THREADS:-}" ]; then
        cores=$(getconf _NPROCESSORS_ONLN)
        export OMP_NUM_THREADS=$((cores > RANKS ? cores / RANKS : 1))
    fi
    exec "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$RANKS" \
        --master-addr "${MASTER_ADDR:-localhost}" --master-port "$port" "$ROOT/$PROGRAM" "$@"
}

launch() {
    read_layout
    start "$@"
}

launch_model_parallel() {
    local name=MP_SIZE size=${MP_SIZE:-${MPSIZE:-2}}
    [ -n "${MP_SIZE:-}" ] || [ -z "${MPSIZE:-}" ] || name=MPSIZE
    within "$name" "$size" 1 99999 "give the ranks that share each layer"
    size=$((10#$size))
    read_layout
    case " ${*//_/-}" in
        *" --model-parallel-size"* | *" --tensor-model-parallel-size"*) ;; # the user's flag wins, and is checked there
        *)
            if [ $((NODES * RANKS % size)) != 0 ]; then
                say "error: $name=$size does not divide NNODES=$NODES x GPUS_PER_NODE=$RANKS: give a size that does"
                exit 2
            fi
            ;;
    esac
    start --model-parallel-size "$size" "$@"
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
