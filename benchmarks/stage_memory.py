#!/usr/bin/env python3
"""The expected memory of each stage of a pipeline beside the measured one: benchmarks/memory.py, of stages.

python benchmarks/stage_memory.py                        # about 5 minutes on 2 cores, 3 GB at most at once
python benchmarks/stage_memory.py --smoke --output DIR   # a small model on two stages: does it run?
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

from benchmarks.memory import main

if __name__ == "__main__":
    raise SystemExit(main(of_stages=True))
