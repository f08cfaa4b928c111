"""The programs of tools/openwebtext. Each program parses its flags (default: sys.argv[1:]) and runs one step.

For bad input or a bad flag, a program raises ValueError or FileNotFoundError with a message of one line.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from data_utils.command_line import bounded_float, missing_package
from data_utils.corpora import TEXT_SUFFIX
from data_utils.files import hash_file
from data_utils.splits import parse_split
from data_utils.tokenizers import build_tokenizer
from megatron.gpt2.commands.preprocess_data import add_tokenizer_flags, tokenizer_arguments
from megatron.gpt2.extensions.webtext import filters, near_duplicates
from megatron.gpt2.extensions.webtext.runner import (
    add_number,
    output_folder,
    run_step,
    step_parser,
)
from megatron.gpt2.extensions.webtext.step import StepInput, WebtextStep, find_files, find_inputs, output_name

Argv = Sequence[str] | None
seconds = bounded_float(1e-3, 86400)


def blacklist_urls(argv: Argv = None) -> None:
    """Drop URLs without text (picture sites, files other than pages, malformed URLs, duplicates):

        python tools/openwebtext/blacklist_urls.py INPUT OUTPUT

    INPUT contains one URL per line. The URLs that remain are written to files of --urls-per-file URLs in OUTPUT.
    """
    parser = step_parser(blacklist_urls)
    add_number(parser, "--urls-per-file", 1000, "URLs in a file")
    args = parser.parse_args(argv)
    args.blacklist = hash_file(filters.BLACKLIST)
    step = WebtextStep(filters.filter_urls, args, ("urls_per_file", "blacklist"), ("tldextract",))
    # All files are one input, because duplicates may be in different files.
    run_step(step, [StepInput("urls", find_files([args.input]))], one_file=(TEXT_SUFFIX,))


def download_urls(argv: Argv = None) -> None:
    """Download pages and keep their text:

        python tools/openwebtext/download_urls.py INPUT OUTPUT

    INPUT contains one URL per line. A restart skips complete files and repeats incomplete files. OUTPUT/records
    contains the result of each URL. The program fetches only the listed pages, and does not read robots.txt.
    """
    parser = step_parser(download_urls)
    add_number(parser, "--max-bytes", 10_000_000, "largest size of a page; larger ones are dropped")
    add_number(
        parser,
        "--page-seconds",
        30.0,
        "time limit for a page, from the first connection to the last byte",
        kind=seconds,
    )
    add_number(parser, "--extract-seconds", 10.0, "time limit for extracting the text of a page", kind=seconds)
    add_number(parser, "--threads", 64, "pages fetched at the same time")
    add_number(parser, "--per-host", 4, "pages fetched from one host at the same time")
    args = parser.parse_args(argv)
    args.blacklist = hash_file(filters.BLACKLIST)
    args.processes, args.workers = args.workers, 1  # One file is downloaded at a time; the processes extract text.
    recorded = ("blacklist", "max_bytes", "page_seconds", "extract_seconds")
    try:
        from megatron.gpt2.extensions.webtext.download import download
    except ImportError as error:
        raise missing_package("this step", error.name, "curate") from None
    step = WebtextStep(download, args, recorded, ("tldextract", "trafilatura", "lxml", "aiohttp"))
    run_step(step, find_inputs(args.input, join_texts=False), one_file=())


def cleanup_dataset(argv: Argv = None) -> None:
    """Fix broken text (ftfy), keep one language, drop documents of fewer than 128 tokens:

    python tools/openwebtext/cleanup_dataset.py INPUT OUTPUT
    """
    parser = step_parser(cleanup_dataset)
    parser.add_argument("--language", default="en", metavar="CODE", help="two letters, or any (default: %(default)s)")
    add_number(parser, "--min-tokens", 128, "least tokens of a document")
    add_tokenizer_flags(parser, default="builtin", help="tokenizer that counts the tokens (default: %(default)s)")
    args = parser.parse_args(argv)
    args.tokenizer = tokenizer_arguments(args)
    args.fingerprint = build_tokenizer(**args.tokenizer).fingerprint
    libraries = ("ftfy",) if args.language == "any" else ("ftfy", "py3langid")
    run_step(WebtextStep(filters.cleanup, args, ("language", "min_tokens", "fingerprint"), libraries))


def find_duplicates(argv: Argv = None) -> None:
    """Find near-duplicates: pairs of documents whose character 5-grams have a Jaccard index of at least --min-jaccard:

        python tools/openwebtext/find_duplicates.py INPUT OUTPUT

    The MinHash signatures are written to OUTPUT/signatures, and the pairs to OUTPUT/pairs.jsonl. Two documents are
    candidates if they share one of 20 bands of 5 values. Candidates are compared exactly. A pair is written only if it
    connects two groups, so a group of k documents has k - 1 pairs.
    """
    parser = step_parser(find_duplicates)
    add_number(
        parser,
        "--min-jaccard",
        0.8,
        "least Jaccard index of a pair",
        kind=bounded_float(1e-9, 1),
    )
    args = parser.parse_args(argv)
    sources, folder = find_inputs(args.input), output_folder(args.output) / "signatures"
    sign_args = argparse.Namespace(**{**vars(args), "output": folder, "step": "find_duplicates, signatures"})
    manifests = run_step(WebtextStep(near_duplicates.write_signatures, sign_args), sources)
    if not manifests:
        return
    sources = sources[: len(manifests)]  # With --limit, only the first inputs were read.
    args.shards = [
        {"name": manifest["input"]["name"], "documents": manifest["left"], "sha256": manifest["input"]["sha256"]}
        for manifest in manifests
    ]
    args.document_files = [
        source.files[0] if near_duplicates.is_seekable(source) else folder / f"{source.name}.jsonl"
        for source in sources
    ]
    args.limit = args.executor = None  # The search for duplicates needs all inputs.
    signatures = StepInput("pairs", tuple(folder / f"{source.name}.signatures" for source in sources))
    run_step(WebtextStep(near_duplicates.find_pairs, args, ("shards", "min_jaccard")), [signatures])


def group_duplicate_url(argv: Argv = None) -> None:
    """Group the pairs that find_duplicates.py found:

        python tools/openwebtext/group_duplicate_url.py PAIRS OUTPUT

    PAIRS is the file pairs.jsonl. The groups are written to OUTPUT/groups.jsonl.
    """
    args = step_parser(group_duplicate_url).parse_args(argv)
    files = find_files([args.input])
    if len(files) != 1:
        raise ValueError(f"{args.input} names {len(files)} files: give one file, pairs.jsonl")
    run_step(WebtextStep(near_duplicates.group_pairs, args), [StepInput("groups", files)])


def remove_group_duplicates(argv: Argv = None) -> None:
    """Remove near-duplicates: keep only the first document of every group:

        python tools/openwebtext/remove_group_duplicates.py GROUPS INPUT OUTPUT

    GROUPS is the file groups.jsonl that group_duplicate_url.py wrote for this INPUT.
    """
    args = step_parser(remove_group_duplicates, ("groups", "input", "output")).parse_args(argv)
    args.groups_file, args.groups = args.groups, hash_file(args.groups)
    run_step(WebtextStep(near_duplicates.remove_duplicates, args, ("groups",)))


def filter_ngrams(argv: Argv = None) -> None:
    """Decontaminate: drop every document that shares 13 words in a row with an evaluation set:

    python tools/openwebtext/filter_ngrams.py INPUT OUTPUT --evaluation lambada_test.jsonl wikitext/*.txt
    """
    parser = step_parser(filter_ngrams)
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
    args.evaluation_files = find_files(args.evaluation, "--evaluation")
    args.evaluation = {path.name: hash_file(path) for path in args.evaluation_files}
    runs, too_short = filters.evaluation_ngrams(args.evaluation_files, args.evaluation_key)
    print(
        f"searching for {len(runs):,} runs of {filters.WORDS} words; {too_short:,} shorter evaluation texts are ignored"
    )
    run_step(WebtextStep(filters.decontaminate, args, ("evaluation", "evaluation_key")))


def merge_jsons(argv: Argv = None) -> None:
    """Merge all documents into one file of JSON lines:

    python tools/openwebtext/merge_jsons.py --data_path FOLDER --output_file OUTPUT/corpus.jsonl
    """
    parser = step_parser(merge_jsons, ())
    parser.add_argument("--data_path", "--data-path", required=True, metavar="INPUT", help="a file, a folder or a glob")
    parser.add_argument(
        "--output_file",
        "--output-file",
        dest="output",
        type=Path,
        default=Path("merged_output.json"),
        metavar="FILE",
        help="to write (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    source = StepInput(output_name(args.output), find_files([args.data_path], "--data_path"))
    run_step(WebtextStep(filters.merge, args), [source])


def split_dataset(argv: Argv = None) -> None:
    """Split documents into training, validation and test, and print the command that trains on these documents:

        python tools/openwebtext/split_dataset.py INPUT OUTPUT

    The hash of a document's text and of --seed decides its split, so a document stays in its split when the corpus
    grows.
    """
    parser = step_parser(split_dataset)
    parser.add_argument("--split", default="949,50,1", metavar="A,B,C", help="proportions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    args.shares = list(map(str, parse_split(args.split)))
    files = find_files([args.input])
    run_step(WebtextStep(filters.split, args, ("shares", "seed")), [StepInput("split", files)], one_file=())
    command = ["bash", "scripts/pretrain_gpt2.sh"]
    for name, share in zip(filters.SPLITS, args.shares, strict=True):
        path = args.output / f"{name}.jsonl"
        if path.exists():
            command += [f"--{name}-data", str(path)]
        elif name == "train":
            raise ValueError(f"--split {args.split}: the training split has no documents: give it a greater share")
        elif share != "0":
            print(f"notice: the {name} split has no documents: give it a greater share with --split")
    print(f"\nto train on it:\n\n  {shlex.join(command)}\n")
