#!/usr/bin/env bash
# Run one part of the GPU benchmark, under 9 minutes on one H200. All output is written to DIR:
#   bash benchmarks/gpu.sh PART DIR [flags of the part's program]
# PART 1: benchmarks/gpu_first_minutes.py. PART 2 to 5: benchmarks/train.py --preset gpu, with flags such as --nanogpt CHECKOUT;
# parts 3 and 4 use the fastest peer in the results of part 2 in DIR.
# The same command skips results in DIR, and measures them again with --again. --smoke tries a part on a CPU.
# Needs torch, numpy and safetensors, for the peers also transformers. $PYTHON is the interpreter (default: python3).
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
    set -- "$here/gpu_first_minutes.py" --output "$folder" "$@"
else
    name=train_gpu_part$part
    set -- "$here/train.py" --preset gpu --part "$part" --output "$folder" "$@"
fi
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The program has a budget of at most 515 s; this timeout is for a driver that hangs.
{
    echo "== $(date -u +%FT%TZ) part $part"
    nvidia-smi 2>/dev/null || echo "nvidia-smi is not here"
    timeout --kill-after=10 530 "${PYTHON:-python3}" "$@"
} 2>&1 | tee -a "$folder/$name.log"
exit "${PIPESTATUS[0]}"
