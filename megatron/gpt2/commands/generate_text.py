"""Generate text with a trained model, in one process or under torchrun with each layer split over the ranks:

    python tools/generate_text.py --load checkpoints/gpt2_small                                   # type prompts
    python tools/generate_text.py --load checkpoints/gpt2_small --prompt "Once upon a time"
    python tools/generate_text.py --load checkpoints/gpt2_small --sample-input-file prompts.txt > answers.jsonl
    python tools/generate_text.py --load checkpoints/gpt2_small --num-samples 10 --genfile samples.jsonl

The checkpoint has the model and the tokenizer, so Megatron's flags for them are accepted, but not needed.
Exit codes: 0; 2 for bad input.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from data_utils.command_line import Log, positive_int, progress_bar, require
from data_utils.corpora import check_exists
from megatron.gpt2.commands.inference import ModelParser, open_model_from_flags
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.dist.run_program import run_program
from megatron.gpt2.generate.generation import GenerationRequest, Generator
from megatron.gpt2.generate.model_runner import new_command_group
from megatron.gpt2.generate.sampling import SamplingParams

# {field of `SamplingParams` that becomes a flag: (metavar, help)}
SAMPLING_FLAGS = {
    "temperature": ("T", "below 1, likely tokens become likelier; 0 takes the likeliest token"),
    "top_k": ("K", "sample from the K likeliest tokens; 0: from all"),
    "top_p": ("P", "sample from the likeliest tokens whose total probability is P; 0: from all"),
    "repetition_penalty": ("R", "above 1, tokens that are already in the text become less likely"),
    "seed": ("SEED", "random seed of the first text; text number i has SEED + i"),
}


def parse_args(argv: Sequence[str], log: Log) -> argparse.Namespace:
    """Parse and check the flags. Raises ValueError or FileNotFoundError if a flag is invalid.

    log: a function for notices.
    """
    parser = ModelParser(__doc__, scores=False)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="text to continue; empty: a new document (default: ask for prompts)")
    source.add_argument("--sample-input-file", metavar="FILE", help="a prompt on each line; answers are JSON lines")
    source.add_argument("--num-samples", type=positive_int, metavar="N", help="write N new documents as JSON lines")
    parser.add_argument(
        "--sample-output-file", "--genfile", metavar="FILE", help="for the JSON lines (default: standard output)"
    )
    parser.add_argument(
        "--max-new-tokens", "--out-seq-length", type=positive_int, default=200, metavar="N", help="default: 200"
    )
    for name, (metavar, help) in SAMPLING_FLAGS.items():
        default = getattr(SamplingParams, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, metavar=metavar, help=help)
    parser.add_argument("--greedy", dest="temperature", action="store_const", const=0.0, help="--temperature 0")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end a text before TEXT; may be given several times"
    )
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="compute the whole context for each token, without a cache: slower, with less memory",
    )
    parser.add_argument(
        "--batch-size", type=positive_int, default=8, metavar="N", help="texts generated together (default: 8)"
    )
    args, _ = parser.parse_with_training_flags(argv, log)
    args.sampling = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        stop=tuple(args.stop),
        **{name: getattr(args, name) for name in SAMPLING_FLAGS},
    )
    prompts, output = args.sample_input_file, args.sample_output_file
    if prompts:
        check_exists(prompts, "--sample-input-file")
    if output:
        require(
            prompts or args.num_samples,
            "--sample-output-file and --genfile need --sample-input-file or --num-samples",
        )
        same = os.path.realpath(output) == os.path.realpath(prompts or "")
        require(not same, f"--sample-output-file {output} is also the file of the prompts: give a different one")
    if args.sampling.is_full:
        log(
            "notice: top-k 0 with top-p 0 is full sampling, which also draws very unlikely tokens; use --top-k 40, "
            "--top-p 0.9 or --greedy to exclude them"
        )
    return args


def stream_text(generator: Generator, prompt: str, sampling: SamplingParams) -> None:
    """Print the prompt, and its continuation token by token. Ctrl-C ends the continuation between two tokens. Raises
    ValueError for a prompt that is not valid text."""
    c = GenerationRequest(generator.tokenizer.encode(prompt), sampling)
    sys.stdout.write(prompt)
    before = signal.signal(signal.SIGINT, lambda number, frame: c.cancel())
    try:
        for generated in generator.stream([c]):
            sys.stdout.write(generated.text)
            sys.stdout.flush()
    finally:
        signal.signal(signal.SIGINT, before)
    print(flush=True)


def run_interactive(generator: Generator, sampling: SamplingParams, log: Log) -> None:
    """Ask for prompts until the user types `stop`, Ctrl-D or Ctrl-C."""
    with contextlib.suppress(ImportError):  # readline gives input() line editing. Some systems lack readline.
        import readline  # noqa: F401
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # stream_text() refuses invalid text
    log("Type a prompt. To end, type `stop`, Ctrl-D or Ctrl-C. Ctrl-C during a text ends only the text.")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (prompt := input("\nprompt> " if sys.stdin.isatty() else "")) != "stop":
            try:
                require(prompt != "", "the prompt is empty: type some text")
                stream_text(generator, prompt, sampling)
            except ValueError as error:
                log(f"error: {error}")


def read_prompts(path: str) -> Iterator[str | ValueError]:
    """Yield the prompt on each line of the file `path`, or a ValueError that describes the problem of the line."""
    with open(path, "rb") as lines:
        for line in lines:
            try:
                yield line.rstrip(b"\r\n").decode("utf-8") or ValueError("the line is empty")
            except UnicodeDecodeError as error:
                yield error


def generate_entries(
    generator: Generator, prompts: Iterable[str | ValueError], sampling: SamplingParams, batch_size: int
) -> Iterator[dict[str, Any]]:
    """Yield an entry for each prompt, in order. The text depends only on the prompt, the seed and the prompt's number.

    batch_size: texts generated together.
    """
    numbered = enumerate(prompts)
    while batch := list(itertools.islice(numbered, batch_size)):
        made = {
            number: GenerationRequest(
                generator.tokenizer.encode(prompt), dataclasses.replace(sampling, seed=sampling.seed + number)
            )
            for number, prompt in batch
            if isinstance(prompt, str)
        }
        texts = dict.fromkeys(made, "")
        for generated in generator.stream(list(made.values())) if made else ():
            texts[list(made)[generated.number]] += generated.text
        for number, prompt in batch:
            if number in made:
                c = made[number]
                yield {"prompt": prompt, "text": texts[number], "length": len(c.ids), "finish": c.finish}
            else:
                yield {"line": number + 1, "error": str(prompt)}


def generate_text(argv: Sequence[str], rank_info: RankInfo, log: Log) -> None:
    """Load the model and continue the prompts that the flags name. Only the first rank writes."""
    args = parse_args(argv, log)
    loaded = open_model_from_flags(args, rank_info, log)
    generator = Generator(loaded.model, loaded.tokenizer, recompute=args.recompute, group=new_command_group(), log=log)
    if not generator.is_driver:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # The first rank handles Ctrl-C for all ranks.
        return generator.execute_commands()
    with generator.driving():
        if args.num_samples or args.sample_input_file:
            prompts = [""] * args.num_samples if args.num_samples else read_prompts(args.sample_input_file)
            entries = generate_entries(generator, prompts, args.sampling, args.batch_size)
            path = args.sample_output_file
            with open(path, "w", encoding="utf-8") if path else contextlib.nullcontext(sys.stdout) as file:
                escapes = str(file.encoding).lower() != "utf-8"  # Other encodings lack some characters.
                for entry in progress_bar(entries, total=args.num_samples, unit="text"):
                    print(json.dumps(entry, ensure_ascii=escapes), file=file, flush=True)
        elif args.prompt is not None:
            stream_text(generator, args.prompt, args.sampling)
        else:
            run_interactive(generator, args.sampling, log)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    return run_program(generate_text, argv)
