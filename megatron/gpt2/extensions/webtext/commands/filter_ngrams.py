"""Decontaminate: drop every document that shares 13 words in a row with an evaluation set:

python tools/openwebtext/filter_ngrams.py INPUT OUTPUT --evaluation lambada_test.jsonl wikitext/*.txt
"""

from data_utils.files import hash_file
from megatron.gpt2.extensions.webtext.command_line import log, run, stage_parser, stage_program
from megatron.gpt2.extensions.webtext.decontamination import WORDS, decontaminate, index_of
from megatron.gpt2.extensions.webtext.documents import find_files
from megatron.gpt2.extensions.webtext.shard_run import Stage


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's). ValueError or FileNotFoundError for bad input."""
    parser = stage_parser(__doc__)
    parser.add_argument(
        "--evaluation",
        nargs="+",
        required=True,
        metavar="FILE",
        help="evaluation sets: JSON lines or .txt, files, folders or globs",
    )
    parser.add_argument(
        "--evaluation-key", default="text", metavar="KEY", help="the JSON field that holds their text (default: text)"
    )
    args = parser.parse_args(argv)
    paths = tuple(find_files(args.evaluation))
    index = index_of(paths, args.evaluation_key)
    log(
        f"{len(index.runs):,} runs of {WORDS} words to look for; {index.too_short:,} evaluation texts are shorter and "
        "are not looked for"
    )
    stage = Stage(
        "filter_ngrams",
        decontaminate,
        {"evaluation": {path.name: hash_file(path) for path in paths}, "evaluation_key": args.evaluation_key},
        {"paths": paths},
        text_key=args.text_key,
    )
    run(args, stage)


cli = stage_program(main)

if __name__ == "__main__":
    cli()
