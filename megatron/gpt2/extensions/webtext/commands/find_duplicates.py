"""Find near-duplicates: pairs of documents whose character 5-grams have a Jaccard index of at least --min-jaccard:

    python tools/openwebtext/find_duplicates.py INPUT OUTPUT

OUTPUT/signatures gets the MinHash signatures of every shard, OUTPUT/pairs.jsonl the pairs: candidates share one of 20
bands of 5 values, and are then compared in full. Pairs are those that join a document to a group, not all of a group.
"""

from megatron.gpt2.extensions.webtext.command_line import run, shards_beside, stage_parser, stage_program
from megatron.gpt2.extensions.webtext.documents import Shard, document_shards, is_seekable
from megatron.gpt2.extensions.webtext.near_duplicates import search, sign
from megatron.gpt2.extensions.webtext.shard_run import Stage


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's). ValueError or FileNotFoundError for bad input."""
    parser = stage_parser(__doc__)
    parser.add_argument("--min-jaccard", type=float, default=0.8, metavar="J", help="default: %(default)s")
    args = parser.parse_args(argv)
    if not 0 < args.min_jaccard <= 1:
        raise ValueError(f"--min-jaccard {args.min_jaccard:g} is not between 0 and 1")
    shards, output = document_shards([args.input]), args.output
    args.output = shards_beside(output) / "signatures"
    manifests = run(args, Stage("find_duplicates, signatures", sign, text_key=args.text_key), shards)
    if not manifests:
        return
    shards = shards[: len(manifests)]  # all, or those that --limit reached
    table = [
        {"name": manifest["input"]["name"], "documents": manifest["left"], "sha256": manifest["input"]["sha256"]}
        for manifest in manifests
    ]
    copies = [args.output / f"{shard.name}.jsonl" for shard in shards]
    sources = [shard.files[0] if is_seekable(shard) else copy for shard, copy in zip(shards, copies, strict=True)]
    signatures = tuple(args.output / f"{shard.name}.signatures" for shard in shards)
    stage = Stage(
        "find_duplicates",
        search,
        {"shards": table, "min_jaccard": args.min_jaccard},
        {"sources": sources, "text_key": args.text_key},
    )
    args.output, args.limit, args.executor = output, None, None  # all shards at once
    run(args, stage, [Shard("pairs", signatures)])


cli = stage_program(main)

if __name__ == "__main__":
    cli()
