"""The data side measured against its peers, section by section, into benchmarks/results/data.json:

    python benchmarks/data.py                     # all sections, some minutes
    python benchmarks/data.py --only preprocess loading
    python benchmarks/data.py --smoke             # tiny sizes: does it run?

Sections: `preprocess` (text to tokens), `loading` (tokens to batches).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report

SECTIONS = {"preprocess": "data_preprocessing", "loading": "data_loading"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; writes nothing unless --output is given")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/data.json")
    args = parser.parse_args(argv)
    output = args.output or (None if args.smoke else report.RESULTS / "data.json")
    results = json.loads(output.read_text(encoding="utf-8")) if output and output.exists() else {}
    for section in args.only:
        measured = importlib.import_module(f"benchmarks.{SECTIONS[section]}").measure(args.smoke)
        results[section] = {**report.header(section), **measured}
        if output:
            report.write(output, results)


if __name__ == "__main__":
    main()
