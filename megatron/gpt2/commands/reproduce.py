"""Compare the validation losses of a run with published losses, or with the exact entropy of its text:

    python tools/reproduce.py checkpoints/gpt2_124m
    python tools/reproduce.py checkpoints/grammar --entropy 0.3988

docs/how-to/reproduce.md has both recipes. Exit codes: 0 if the losses are inside the bands, 1 if one is outside, 2 for
bad input.
"""

from pathlib import Path

import numpy as np

from data_utils.command_line import Parser, align_columns, require
from megatron.gpt2.monitor.html_report import METRICS
from megatron.gpt2.monitor.incidents import read_records
from megatron.gpt2.monitor.plots import curve_points

# {iteration: validation loss in nats per token} of llm.c's GPT-2 124M on FineWeb 10B: the log of 2024-10-13 in
# github.com/KellerJordan/modded-nanogpt, records/track_1_short/2024-10-13_llmc/main.log.
FINEWEB_124M = {
    250: 6.1710,
    500: 5.3743,
    1000: 4.3170,
    1500: 4.0060,
    2000: 3.8585,
    3000: 3.6973,
    4000: 3.6176,
    6000: 3.5069,
    8000: 3.4431,
    10000: 3.3924,
    12000: 3.3509,
    14000: 3.3149,
    16000: 3.2882,
    18000: 3.2746,
    19560: 3.2722,
}
# The same recipe ended at 3.29 in May 2024 (github.com/karpathy/llm.c/discussions/481) and at 3.2722 in llm.c's log.
# Early losses differ more, because the loss falls by 1 within 300 iterations.
LATE_BAND, EARLY_BAND, LATE = 0.03, 0.25, 2000
# A model's loss is above the entropy of its text, because a model never sees enough text, and because the first tokens
# of a sample lack context. In a small validation split, the loss can be below the entropy by chance.
ABOVE, BELOW = 0.1, 0.01


def compare_with_published(losses: dict[int, float]) -> list[tuple[str, str, str, bool]]:
    """Return (iteration, loss, band, whether the loss is in the band) for each loss within the published iterations.
    The band between two published iterations is interpolated over the logarithm of the iteration."""
    rows = []
    for iteration, loss in losses.items():
        if min(FINEWEB_124M) <= iteration <= max(FINEWEB_124M):
            center = float(np.interp(np.log(iteration), np.log(list(FINEWEB_124M)), list(FINEWEB_124M.values())))
            width = LATE_BAND if iteration >= LATE else EARLY_BAND
            inside = abs(loss - center) <= width
            rows.append((f"{iteration:,}", f"{loss:.4f}", f"{center - width:.3f} to {center + width:.3f}", inside))
    return rows


def compare_with_entropy(bits: dict[int, float], entropy: float) -> list[tuple[str, str, str, bool]]:
    """Compare the last loss with the entropy of the text. Return one row, as `compare_with_published` does.

    bits: {iteration: validation loss}. Losses and entropy are in bits per byte, which do not depend on the tokenizer.
    """
    iteration, loss = list(bits.items())[-1]
    low, high = entropy * (1 - BELOW), entropy * (1 + ABOVE)
    return [(f"{iteration:,}", f"{loss:.4f}", f"{low:.4f} to {high:.4f}", low <= loss <= high)]


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("save", metavar="SAVE", help="the --save folder of a run")
    parser.add_argument(
        "--entropy", type=float, metavar="BITS", help="of the text, in bits per byte, as examples/grammar.py prints it"
    )
    args = parser.parse_args(argv)
    require(args.entropy is None or args.entropy > 0, f"--entropy must be positive, not {args.entropy}")
    key = "bits_per_byte" if args.entropy else "lm_loss"
    losses = dict(curve_points(read_records(Path(args.save) / METRICS), key, "valid"))
    require(bool(losses), f"{args.save}: {METRICS} has no validation loss; train with --eval-interval")
    rows = compare_with_entropy(losses, args.entropy) if args.entropy else compare_with_published(losses)
    require(
        bool(rows), f"{args.save}: no validation loss between iterations {min(FINEWEB_124M)} and {max(FINEWEB_124M)}"
    )
    table = [("iteration", "loss", "band", ""), *((*row[:3], "inside" if row[3] else "OUTSIDE") for row in rows)]
    print("\n".join(align_columns(table, ">>><")))
    return 0 if all(row[3] for row in rows) else 1
