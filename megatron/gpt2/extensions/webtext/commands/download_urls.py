"""Download pages and keep their text:

    python tools/openwebtext/download_urls.py INPUT OUTPUT

INPUT holds an address a line, in files that are the unit of a restart. OUTPUT/records says what became of each
address. It does not read robots.txt: it fetches the single pages of a list, and follows no link.
"""

from data_utils.files import hash_file
from megatron.gpt2.extensions.webtext.command_line import positive, run, stage_parser, stage_program
from megatron.gpt2.extensions.webtext.documents import file_shards
from megatron.gpt2.extensions.webtext.download import download
from megatron.gpt2.extensions.webtext.shard_run import Stage
from megatron.gpt2.extensions.webtext.urls import BLACKLIST


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's). ValueError or FileNotFoundError for bad input."""
    parser = stage_parser(__doc__)
    parser.add_argument(
        "--max-bytes",
        type=positive,
        default=10_000_000,
        metavar="N",
        help="size of a page at most; a larger one is dropped (default: %(default)s)",
    )
    parser.add_argument(
        "--page-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="time for a page, from the first connection to the last byte (default: %(default)s)",
    )
    parser.add_argument(
        "--extract-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="time to find the text of a page (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=positive, default=64, metavar="N", help="pages fetched at once (default: %(default)s)"
    )
    parser.add_argument(
        "--per-host",
        type=positive,
        default=4,
        metavar="N",
        help="pages fetched from one host at once (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    for flag, value in (("--page-seconds", args.page_seconds), ("--extract-seconds", args.extract_seconds)):
        if not 0 < value < 86400:
            raise ValueError(f"{flag} {value:g} is not a number of seconds between 0 and a day")
    names = ("max_bytes", "page_seconds", "extract_seconds")
    stage = Stage(
        "download_urls",
        download,
        {"blacklist": hash_file(BLACKLIST), **{name: getattr(args, name) for name in names}},
        {"threads": args.threads, "per_host": args.per_host, "processes": args.workers},
        libraries=("tldextract", "trafilatura", "lxml"),
    )
    args.workers = 1  # a shard at a time has processes of its own
    run(args, stage, file_shards([args.input]), one_file=())


cli = stage_program(main)

if __name__ == "__main__":
    cli()
