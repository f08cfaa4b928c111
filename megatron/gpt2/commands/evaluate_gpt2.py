"""Score a trained model on text files, alone or under torchrun at any --model-parallel-size:

    python tools/evaluate_gpt2.py --load checkpoints/gpt2_small --valid-data wikitext-2/test.txt
    python tools/evaluate_gpt2.py --load checkpoints/gpt2_small --valid-data lambada_test.jsonl --strict-lambada

Model and tokenizer come from the checkpoint. Megatron's flags for them are accepted and not needed.
Exit codes: 0; 2 for bad input.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_utils.corpora.documents import BUILTIN, files_of
from data_utils.files import hash_file
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.commands.inference import ModelParser, check_output, open_model, record, write_record
from megatron.gpt2.config import flag, require
from megatron.gpt2.config.arguments import SAVED, Arguments, parse
from megatron.gpt2.config.flags import dashed
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.dist.run_program import Log, run_program
from megatron.gpt2.generate.evaluation import TASKS, Task, evaluate_task, plausibility_warning, read_task, task_of
from megatron.gpt2.generate.load_model import LoadedModel
from megatron.gpt2.monitor.reporting import aligned


def arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, Arguments]:
    """The flags of this program, and those that training knows. ValueError where one cannot be."""
    parser = ModelParser(__doc__, precision="fp32")  # in which a score depends on no device
    parser.add_argument("--valid-data", required=True, nargs="+", metavar="FILE", help="files to score the model on")
    parser.add_argument("--task", type=str.upper, choices=TASKS, help="what the files are (default: by their names)")
    parser.add_argument(
        "--cloze-eval", dest="task", action="store_const", const="LAMBADA", help="the same as --task LAMBADA"
    )
    parser.add_argument(
        "--strict-lambada", action="store_true", help="count a passage only where the whole last word is right"
    )
    parser.add_argument(
        "--overlapping-eval",
        type=int,
        metavar="N",
        help="targets of each window after the first (default: 32 for WIKITEXT103 and PTB, else the whole window)",
    )
    parser.add_argument(
        "--seq-length",
        "--eval-seq-length",
        type=int,
        metavar="N",
        help="tokens of a window (default: all positions of the model)",
    )
    parser.add_argument(
        "--micro-batch-size",
        "--batch-size",
        "--eval-batch-size",
        "--eval-micro-batch-size",
        type=int,
        default=4,
        metavar="N",
        help="windows computed together (default: 4)",
    )
    parser.add_argument("--text-key", metavar="NAME", help="field of JSON lines that holds the text")
    parser.add_argument(
        "--max-bad-fraction",
        type=float,
        default=0.0,
        metavar="X",
        help="part of a file's lines that may be unusable (default: 0)",
    )
    parser.add_argument("--output", metavar="FILE", help="write the result there, as JSON")
    args, rest = parser.parse_known_args([dashed(word) for word in argv])
    for name, value in (("--seq-length", args.seq_length), ("--micro-batch-size", args.micro_batch_size)):
        require(value is None or value >= 1, f"{name} must be positive, not {value}")
    for path in args.valid_data:
        require(path != BUILTIN, f"--valid-data {path}: the built-in corpus is trained on; give a file")
    args.valid_data = [file for path in args.valid_data for file in files_of(path, "--valid-data")]
    check_output(args.output)
    return args, parse(rest)


def check_shape(given: Arguments, checkpoint: Checkpoint) -> None:
    """ValueError where a flag describes another model than the checkpoint's."""
    saved = checkpoint.facts["config"]["model"]
    differing = [
        f"{flag(key)}: here {given.values[key]}, checkpoint {saved[name]}"
        for key in SAVED
        if key in given.given
        for name in [key.partition(".")[2]]
        if saved.get(name) is not None and given.values[key] != saved[name]
    ]
    require(not differing, "; ".join(differing) + ": leave these flags out")


def read(args: argparse.Namespace, loaded: LoadedModel, log: Log) -> list[Task]:
    """Read all files before the first is scored, so that a bad one is found at once."""
    positions = loaded.model.config.max_position_embeddings
    length = positions if args.seq_length is None else args.seq_length
    require(length <= positions, f"--seq-length {length}: the model has {positions} positions")
    return [
        read_task(
            args.task or task_of(path),
            path,
            loaded.tokenizer,
            length=length,
            overlapping_eval=args.overlapping_eval,
            strict_lambada=args.strict_lambada,
            text_key=args.text_key,
            max_bad_fraction=args.max_bad_fraction,
            log=log,
        )
        for path in args.valid_data
    ]


def scored(task: Task, path: str, loaded: LoadedModel, batch_size: int, log: Log) -> dict[str, Any]:
    """The result for the file `path`, as it stands in the JSON."""
    metrics = evaluate_task(loaded.model, task, loaded.tokenizer, batch_size=batch_size)
    warning = plausibility_warning(task, metrics, loaded.tokenizer.vocab_size)
    if warning:
        log(f"WARNING: {path}: {warning}")
    return {
        "task": task.name,
        "file": path,
        "bytes": os.path.getsize(path),
        "sha256": hash_file(Path(path)),
        "settings": task.settings,
        "metrics": metrics,
        "warning": warning,
    }


def report(facts: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """The results as text. facts: of `record`."""
    blocks = [
        [
            ("checkpoint", f"{facts['checkpoint']}, manifest {facts['manifest_sha256'][:12]}"),
            ("tokenizer", f"{facts['tokenizer']}, {facts['vocab_size']:,} ids"),
            (
                "computed",
                f"in {facts['precision']} on {facts['device']}, model-parallel "
                f"{facts['model_parallel_size']} × data-parallel {facts['data_parallel_size']}",
            ),
        ]
    ]
    for result in results:
        settings = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in result["settings"].items())
        blocks.append(
            [
                ("file", f"{result['file']}, {result['bytes']:,} bytes, sha256 {result['sha256'][:12]}"),
                ("task", f"{result['task']} ({settings})"),
                *(
                    (name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:,.6f}")
                    for name, value in result["metrics"].items()
                ),
            ]
        )
    return "\n\n".join("\n".join(aligned(rows)) for rows in blocks)


def evaluate(argv: Sequence[str], ranks: Ranks, log: Log) -> None:
    """Score the files that the flags name; rank 0 prints and writes the result."""
    args, given = arguments(argv)
    if given.given:
        log(f"notice: {', '.join(sorted(map(flag, given.given)))}: not needed here")
    for note in given.notes:
        log(f"notice: {note}")
    loaded = open_model(args, ranks, log)
    check_shape(given, loaded.checkpoint)
    results = [
        scored(task, path, loaded, args.micro_batch_size, log)
        for task, path in zip(read(args, loaded, log), args.valid_data, strict=True)
    ]
    if ranks.rank:
        return
    facts = record(loaded, args.micro_batch_size)
    print(report(facts, results))
    if args.output:
        write_record(args.output, {**facts, "results": results})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    return run_program(evaluate, argv)
