"""Put all documents in one file of JSON lines:

python tools/openwebtext/merge_jsons.py --data_path FOLDER --output_file OUTPUT/corpus.jsonl
"""

from pathlib import Path

from data_utils.command_line import Parser
from megatron.gpt2.extensions.webtext.command_line import add_common, run, stage_program
from megatron.gpt2.extensions.webtext.documents import Shard, find_files, stem
from megatron.gpt2.extensions.webtext.shard_run import Stage
from megatron.gpt2.extensions.webtext.splitting import merge


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's). ValueError or FileNotFoundError for bad input."""
    parser = Parser(description=__doc__)
    parser.add_argument("--data_path", "--data-path", required=True, metavar="INPUT", help="a file, a folder or a glob")
    parser.add_argument("--output_file", "--output-file", required=True, type=Path, metavar="FILE", help="to write")
    add_common(parser)
    args = parser.parse_args(argv)
    args.output = args.output_file.parent
    files = find_files([args.data_path])
    if args.output_file in files:
        raise ValueError(f"--output_file {args.output_file} is one of the files to merge: name it elsewhere")
    stage = Stage("merge_jsons", merge, {"name": args.output_file.name}, text_key=args.text_key)
    run(args, stage, [Shard(stem(args.output_file), tuple(files))], alone=False)


cli = stage_program(main)

if __name__ == "__main__":
    cli()
