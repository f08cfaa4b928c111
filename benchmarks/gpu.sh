#!/usr/bin/env bash
# One part of the GPU benchmark, under 9 minutes on one H200; everything that it writes lies in DIR:
#   bash benchmarks/gpu.sh PART DIR [flags of the part's program]
# PART 1: benchmarks/first_minutes.py. PART 2 to 5: benchmarks/train.py --preset gpu, such as --nanogpt CHECKOUT; parts 3
# and 4 take the fastest peer from part 2's results where DIR holds them.
# The same command goes on after what DIR holds already, and measures it anew with --again. --smoke tries a part on a CPU.
# Needs torch, numpy, safetensors, and for the peers transformers; $PYTHON names the interpreter (default: python3).
set -u
if [ $# -lt 2 ] || ! [[ "$1" =~ ^[1-5]$ ]]; then
    echo "usage: bash benchmarks/gpu.sh PART DIR [flags of the part's program]   (PART: 1 to 5)" >&2
    exit 2
fi
part=$1 folder=$2
shift 2
mkdir -p "$folder" || exit 2
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [ "$part" = 1 ]; then
    name=first_minutes
    set -- "$here/first_minutes.py" --output "$folder" "$@"
else
    name=train_gpu_part$part
    set -- "$here/train.py" --preset gpu --part "$part" --output "$folder" "$@"
fi
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The program keeps its own budget of 515 s or less; the limit here is for a driver that hangs.
{
    echo "== $(date -u +%FT%TZ) part $part"
    nvidia-smi 2>/dev/null || echo "nvidia-smi is not here"
    timeout --kill-after=10 530 "${PYTHON:-python3}" "$@"
} 2>&1 | tee -a "$folder/$name.log"
exit "${PIPESTATUS[0]}"
