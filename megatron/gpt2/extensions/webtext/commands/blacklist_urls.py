"""Drop the addresses that lead to no text (sites of pictures, files that are no pages, malformed ones, duplicates):

    python tools/openwebtext/blacklist_urls.py INPUT OUTPUT

INPUT holds an address a line. OUTPUT gets files of --urls-per-file addresses, each a shard of the download.
"""

from data_utils.corpora.documents import TEXT_SUFFIX
from data_utils.files import hash_file
from megatron.gpt2.extensions.webtext.command_line import positive, run, stage_parser, stage_program
from megatron.gpt2.extensions.webtext.documents import Shard, find_files
from megatron.gpt2.extensions.webtext.shard_run import Stage
from megatron.gpt2.extensions.webtext.urls import BLACKLIST, filter_urls


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's). ValueError or FileNotFoundError for bad input."""
    parser = stage_parser(__doc__)
    parser.add_argument("--urls-per-file", type=positive, default=1000, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    stage = Stage(
        "blacklist_urls",
        filter_urls,
        {"urls_per_file": args.urls_per_file, "blacklist": hash_file(BLACKLIST)},
        libraries=("tldextract",),
    )
    run(
        args,
        stage,
        [Shard("urls", tuple(find_files([args.input])))],  # one: duplicates are looked for in all
        one_file=(TEXT_SUFFIX,),
    )


cli = stage_program(main)

if __name__ == "__main__":
    cli()
