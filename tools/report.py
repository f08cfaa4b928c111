#!/usr/bin/env python3
"""Make the report.html of a run anew, from the other files of its --save folder:

    python tools/report.py checkpoints/gpt2_345m

Training writes it by itself. Exit codes: 0; 2 for bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

from megatron.records.run_report import METRICS, write_report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("save", metavar="SAVE", help="the --save folder of a run")
    folder = Path(parser.parse_args(argv).save)
    try:
        if not (folder / METRICS).exists():
            raise FileNotFoundError(f"{folder} holds no {METRICS}: give the --save folder of a run")
        print(write_report(folder))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
