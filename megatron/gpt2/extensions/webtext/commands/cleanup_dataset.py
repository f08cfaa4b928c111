"""Mend broken text (ftfy), keep one language, drop documents of fewer than 128 tokens:

python tools/openwebtext/cleanup_dataset.py INPUT OUTPUT
"""

from data_utils.tokenizers import build_tokenizer
from megatron.gpt2.extensions.webtext.cleanup import cleanup
from megatron.gpt2.extensions.webtext.command_line import positive, run, stage_parser, stage_program
from megatron.gpt2.extensions.webtext.shard_run import Stage


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's). ValueError or FileNotFoundError for bad input."""
    parser = stage_parser(__doc__)
    parser.add_argument("--language", default="en", metavar="CODE", help="two letters, or any (default: %(default)s)")
    parser.add_argument("--min-tokens", type=positive, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--tokenizer-type",
        choices=("builtin", "bytes", "GPT2BPETokenizer"),
        default="builtin",
        help="counts the tokens (default: %(default)s, which the project ships)",
    )
    parser.add_argument("--vocab-file", metavar="FILE", help="of GPT2BPETokenizer (default: the user's cache)")
    parser.add_argument("--merge-file", metavar="FILE")
    args = parser.parse_args(argv)
    tokenizer = {"kind": args.tokenizer_type, "vocab_file": args.vocab_file, "merge_file": args.merge_file}
    libraries = ("ftfy",) if args.language == "any" else ("ftfy", "py3langid")
    stage = Stage(
        "cleanup_dataset",
        cleanup,
        {
            "language": args.language,
            "min_tokens": args.min_tokens,
            "fingerprint": build_tokenizer(**tokenizer).fingerprint,
        },
        {"tokenizer": tokenizer},
        libraries=libraries,
        text_key=args.text_key,
    )
    run(args, stage)


cli = stage_program(main)

if __name__ == "__main__":
    cli()
