"""Rewrite the report.html of a run from the other files in its --save folder:

    python tools/report.py checkpoints/gpt2_345m

Training writes the report automatically. Exit codes: 0; 2 for bad input.
"""

from pathlib import Path

from data_utils.command_line import Parser
from megatron.gpt2.monitor.html_report import METRICS, write_report


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("save", metavar="SAVE", help="the --save folder of a run")
    folder = Path(parser.parse_args(argv).save)
    if not (folder / METRICS).exists():
        raise FileNotFoundError(f"{folder} holds no {METRICS}: give the --save folder of a run")
    print(write_report(folder))
    return 0
