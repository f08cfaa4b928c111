"""Make groups of the pairs that find_duplicates.py found; the first document of a group is the one to keep:

    python tools/openwebtext/group_duplicate_url.py PAIRS OUTPUT

PAIRS is the file pairs.jsonl; OUTPUT gets groups.jsonl.
"""

from megatron.gpt2.extensions.webtext.command_line import run, stage_parser, stage_program
from megatron.gpt2.extensions.webtext.documents import Shard, find_files
from megatron.gpt2.extensions.webtext.near_duplicates import group, read_table
from megatron.gpt2.extensions.webtext.shard_run import Stage


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's). ValueError or FileNotFoundError for bad input."""
    args = stage_parser(__doc__).parse_args(argv)
    files = find_files([args.input])
    if len(files) != 1:
        raise ValueError(f"{args.input} names {len(files)} files: name the one pairs.jsonl")
    read_table(files[0])
    run(args, Stage("group_duplicate_url", group), [Shard("groups", tuple(files))])


cli = stage_program(main)

if __name__ == "__main__":
    cli()
