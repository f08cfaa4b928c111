# Sourced by the scripts that start several ranks. `launch FLAGS...` runs pretrain_gpt2.py on every rank of this node
# through torchrun. From the environment:
#   GPUS_PER_NODE  ranks on this node (default: the visible GPUs, 2 on a CPU)
#   NNODES         nodes (1); with more, run the script on each, with
#   NODE_RANK      the node's own number (0 to NNODES-1)
#   MASTER_ADDR    host of node 0 (localhost)
#   MASTER_PORT    a free port there (6000; where it is not set and 6000 is taken on the only node, another)
#   OMP_NUM_THREADS  threads of a rank (default: cores / ranks)

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# free_port WANTED EXACT: WANTED where nothing listens there, else a port that the system picks; with EXACT "yes", fail
free_port() {
    "$PYTHON" -c '
import socket, sys
for port in [int(sys.argv[1])] + [0] * (sys.argv[2] != "yes"):
    try:
        with socket.create_server(("", port)) as server:
            print(server.getsockname()[1])
            break
    except OSError:
        continue
else:
    sys.exit(1)
' "$1" "$2"
}

launch() {
    find_python ""
    local nodes=${NNODES:-1} port=${MASTER_PORT:-6000} ranks=${GPUS_PER_NODE:-} cores
    [ -n "$ranks" ] || ranks=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')
    if [ "$nodes" = 1 ]; then
        port=$(free_port "$port" "${MASTER_PORT:+yes}") || {
            say "error: MASTER_PORT=$MASTER_PORT is taken; unset it, or name a free one"
            exit 2
        }
    fi
    if [ -z "${OMP_NUM_THREADS:-}" ]; then
        cores=$(getconf _NPROCESSORS_ONLN)
        export OMP_NUM_THREADS=$((cores > ranks ? cores / ranks : 1))
    fi
    exec "$PYTHON" -m torch.distributed.run --nnodes "$nodes" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$ranks" \
        --master-addr "${MASTER_ADDR:-localhost}" --master-port "$port" "$ROOT/pretrain_gpt2.py" "$@"
}
