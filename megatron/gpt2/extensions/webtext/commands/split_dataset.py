"""Split documents into training, validation and test, and print the command that trains on them:

    python tools/openwebtext/split_dataset.py INPUT OUTPUT

The hash of a document's text and of --seed says where it goes, so that it stays there when the corpus grows.
"""

import shlex

from data_utils.splits import parse_split
from megatron.gpt2.extensions.webtext.command_line import log, run, stage_parser, stage_program
from megatron.gpt2.extensions.webtext.documents import Shard, find_files
from megatron.gpt2.extensions.webtext.shard_run import Stage
from megatron.gpt2.extensions.webtext.splitting import NAMES, split


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's). ValueError or FileNotFoundError for bad input."""
    parser = stage_parser(__doc__)
    parser.add_argument("--split", default="949,50,1", metavar="A,B,C", help="proportions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    shares = parse_split(args.split)
    stage = Stage("split_dataset", split, {"shares": list(map(str, shares)), "seed": args.seed}, text_key=args.text_key)
    run(args, stage, [Shard("split", tuple(find_files([args.input])))], one_file=())
    command = ["bash", "scripts/pretrain_gpt2.sh"]
    for name, share in zip(NAMES, shares, strict=True):
        path = args.output / f"{name}.jsonl"
        if path.exists():
            command += [f"--{name}-data", str(path)]
        elif name == "train":
            raise ValueError(f"--split {args.split}: none of these documents fell into the training split")
        elif share:
            log(f"notice: the {name} split got none of these documents: give it a greater share with --split")
    log(f"\nto train on it:\n\n  {shlex.join(command)}\n")


cli = stage_program(main)

if __name__ == "__main__":
    cli()
