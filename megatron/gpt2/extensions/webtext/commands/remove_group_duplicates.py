"""Remove near-duplicates: of every group the documents that have an earlier one in it:

    python tools/openwebtext/remove_group_duplicates.py GROUPS INPUT OUTPUT

GROUPS is the file groups.jsonl that group_duplicate_url.py made of this INPUT.
"""

from pathlib import Path

from data_utils.command_line import Parser
from data_utils.files import hash_file
from megatron.gpt2.extensions.webtext.command_line import add_common, add_output, run, stage_program
from megatron.gpt2.extensions.webtext.near_duplicates import read_table, remove
from megatron.gpt2.extensions.webtext.shard_run import Stage


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's). ValueError or FileNotFoundError for bad input."""
    parser = Parser(description=__doc__)
    parser.add_argument("groups", metavar="GROUPS", type=Path)
    parser.add_argument("input", metavar="INPUT", help="the documents that were searched for duplicates")
    add_output(parser)
    add_common(parser)
    args = parser.parse_args(argv)
    read_table(args.groups)
    stage = Stage(
        "remove_group_duplicates",
        remove,
        {"groups": hash_file(args.groups)},
        {"path": args.groups},
        text_key=args.text_key,
    )
    run(args, stage)


cli = stage_program(main)

if __name__ == "__main__":
    cli()
