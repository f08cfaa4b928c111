#!/usr/bin/env bash
# One part of the GPU benchmark, under 9 minutes on one H200; everything it writes lies in DIR:
#   bash benchmarks/gpu.sh PART DIR [flags of benchmarks/train.py, such as --nanogpt CHECKOUT]
# PART is 1, 2, 3 or 4. Parts 2 and 3 take the fastest peer from part 1's results where DIR holds them.
# Needs torch, numpy, safetensors and, for the peers, transformers; $PYTHON names the interpreter (default: python3).
set -u
if [ $# -lt 2 ] || ! [[ "$1" =~ ^[1-4]$ ]]; then
    echo "usage: bash benchmarks/gpu.sh PART DIR [flags of benchmarks/train.py]   (PART: 1 to 4)" >&2
    exit 2
fi
part=$1 folder=$2
shift 2
mkdir -p "$folder" || exit 2
program="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/train.py"
if command -v nvidia-smi > /dev/null; then
    nvidia-smi > "$folder/nvidia_smi_part$part.txt" 2>&1
else
    echo "nvidia-smi is not here" | tee "$folder/nvidia_smi_part$part.txt"
fi
# The program keeps its own budget of 500 s; the limit here is for a driver that hangs.
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
timeout --kill-after=5 530 "${PYTHON:-python3}" "$program" --preset gpu --part "$part" --output "$folder" "$@" 2>&1 \
    | tee "$folder/train_gpu_part$part.log"
exit "${PIPESTATUS[0]}"
