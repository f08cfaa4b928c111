"""Score a trained model on text files, in one process or under torchrun at any --tensor-model-parallel-size:

    python tools/evaluate_gpt2.py --load checkpoints/gpt2_small --valid-data wikitext-2/test.txt
    python tools/evaluate_gpt2.py --load checkpoints/gpt2_small --valid-data lambada_test.jsonl --strict-lambada

The checkpoint has the model and the tokenizer, so Megatron's flags for them are accepted, but not needed.
Exit codes: 0; 2 for bad input.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from data_utils.command_line import Log, positive_int, require
from data_utils.corpora import BUILTIN, expand_paths
from data_utils.files import hash_file
from megatron.gpt2.checkpoint.reader import NativeCheckpoint
from megatron.gpt2.commands.inference import (
    ModelParser,
    check_output,
    open_model_from_flags,
    score_metadata,
    write_scores,
)
from megatron.gpt2.config import flag_name
from megatron.gpt2.config.arguments import CHECKPOINT_KEYS, Arguments
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.dist.run_program import run_program
from megatron.gpt2.generate.evaluation import (
    TASKS,
    EvaluationTask,
    evaluate_task,
    guess_task,
    plausibility_warning,
    read_task,
)
from megatron.gpt2.generate.load_model import LoadedModel
from megatron.gpt2.monitor.log_lines import align_rows


def parse_args(argv: Sequence[str], log: Log) -> tuple[argparse.Namespace, Arguments]:
    """Parse the flags of evaluate_gpt2.py, and flags of training. Raises ValueError if a flag is invalid.
    log: called with notices."""
    parser = ModelParser(__doc__, scores=True)
    parser.add_argument("--valid-data", required=True, nargs="+", metavar="FILE", help="files to score the model on")
    parser.add_argument("--task", type=str.upper, choices=TASKS, help="kind of the files (default: by their names)")
    parser.add_argument(
        "--cloze-eval", dest="task", action="store_const", const="LAMBADA", help="the same as --task LAMBADA"
    )
    parser.add_argument(
        "--strict-lambada", action="store_true", help="count a passage only if the whole last word is right"
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
        type=positive_int,
        metavar="N",
        help="tokens of a window (default: all positions of the model)",
    )
    parser.add_argument("--text-key", metavar="NAME", help="field of JSON lines that holds the text")
    parser.add_argument(
        "--max-bad-fraction",
        type=float,
        default=0.0,
        metavar="X",
        help="part of a file's lines that may be unusable (default: 0)",
    )
    args, training = parser.parse_with_training_flags(argv, log)
    for path in args.valid_data:
        require(path != BUILTIN, f"--valid-data {path}: the built-in corpus is training data; give a file")
    args.valid_data = expand_paths(args.valid_data, "--valid-data")
    check_output(args)
    return args, training


def check_model_flags(training: Arguments, checkpoint: NativeCheckpoint) -> None:
    """Raise ValueError if a flag describes a different model than the checkpoint's."""
    model, differing = checkpoint.metadata["config"]["model"], []
    for key in filter(training.given.__contains__, CHECKPOINT_KEYS):
        given, saved = training.values[key], model.get(key.partition(".")[2])
        if saved not in (None, given):
            differing.append(f"{flag_name(key)}: here {given}, checkpoint {saved}")
    require(not differing, "; ".join(differing) + ": leave these flags out")


def score_file(task: EvaluationTask, path: str, loaded: LoadedModel, batch_size: int, log: Log) -> dict[str, Any]:
    """Score the file `path`. Return the file's entry for the JSON output."""
    metrics = evaluate_task(loaded.model, task, loaded.tokenizer, batch_size=batch_size)
    warning = plausibility_warning(task, metrics, loaded.tokenizer.vocab_size)
    if warning:
        log(f"WARNING: {path}: {warning}")
    return {
        "task": task.name,
        "file": path,
        "bytes": os.path.getsize(path),
        "sha256": hash_file(path),
        "settings": task.settings,
        "metrics": metrics,
        "warning": warning,
    }


def format_results(metadata: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """Format the results as text.

    metadata: the result of `score_metadata`.
    """
    layout = f"model-parallel {metadata['model_parallel_size']} × data-parallel {metadata['data_parallel_size']}"
    rows = [
        ("checkpoint", f"{metadata['checkpoint']}, manifest {metadata['manifest_sha256'][:12]}"),
        ("tokenizer", f"{metadata['tokenizer']}, {metadata['vocab_size']:,} ids"),
        ("computed", f"in {metadata['precision']} on {metadata['device']}, {layout}"),
    ]
    blocks = [rows]
    for result in results:
        settings = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in result["settings"].items())
        rows = [
            ("file", f"{result['file']}, {result['bytes']:,} bytes, sha256 {result['sha256'][:12]}"),
            ("task", f"{result['task']} ({settings})"),
        ]
        for name, value in result["metrics"].items():
            rows.append((name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:,.6f}"))
        blocks.append(rows)
    return "\n\n".join("\n".join(align_rows(rows)) for rows in blocks)


def evaluate(argv: Sequence[str], rank_info: RankInfo, log: Log) -> None:
    """Score the files that the flags name. Rank 0 prints and writes the results."""
    args, training = parse_args(argv, log)
    loaded = open_model_from_flags(args, rank_info, log)
    check_model_flags(training, loaded.checkpoint)
    positions = loaded.model.config.max_position_embeddings
    length = positions if args.seq_length is None else args.seq_length
    require(length <= positions, f"--seq-length {length}: the model has {positions} positions")
    tasks = [  # All files are read before the first one is scored, so that a bad file is found early.
        read_task(
            args.task or guess_task(path),
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
    results = [
        score_file(task, path, loaded, args.micro_batch_size, log)
        for task, path in zip(tasks, args.valid_data, strict=True)
    ]
    if rank_info.rank == 0:
        metadata = score_metadata(loaded, args.micro_batch_size)
        print(format_results(metadata, results))
        write_scores(args.output, {**metadata, "results": results})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    return run_program(evaluate, argv)
