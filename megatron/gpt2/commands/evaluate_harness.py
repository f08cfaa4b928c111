"""Score a trained model with the tasks of EleutherAI's lm-eval (extra [eval]), in one process or under torchrun:

    python tools/evaluate_harness.py --load checkpoints/gpt2_small --tasks lambada_openai,wikitext

Exit codes: 0; 2 for bad input.
"""

import argparse
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_utils import Tokenizer
from data_utils.command_line import Log, missing_package
from megatron.gpt2.commands.inference import (
    ModelParser,
    check_output,
    open_model_from_flags,
    score_metadata,
    write_scores,
)
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.dist.run_program import run_program
from megatron.gpt2.generate.generation import GenerationRequest, generate
from megatron.gpt2.generate.sampling import SamplingParams
from megatron.gpt2.generate.scoring import Window, score_windows
from megatron.gpt2.model.gpt2 import GPT2Model

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ImportError as error:
    raise missing_package("this program", error.name, "eval") from None

LoglikelihoodRequest = tuple[Any, list[int], list[int]]  # (request, ids of the context, ids of the continuation)


@register_model("gpt2-model-parallel")
class HarnessLM(TemplateLM):  # type: ignore[misc]
    """Wrap a model for lm-eval. Each rank makes all requests and gets all answers; `score_windows` divides the work
    over the ranks."""

    def __init__(self, model: GPT2Model, tokenizer: Tokenizer, batch_size: int = 4, **_: Any) -> None:
        super().__init__()
        self.model, self.own_tokenizer, self.batch_size = model, tokenizer, batch_size
        self.max_length = model.config.max_position_embeddings

    @property
    def eot_token_id(self) -> int:
        """The end-of-document id, which precedes every text."""
        return self.own_tokenizer.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenize a text."""
        return [int(i) for i in self.own_tokenizer.encode(string)]

    def _loglikelihood_tokens(
        self, requests: list[LoglikelihoodRequest], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        windows = []
        for _request, context, continuation in requests:
            ids = np.array((context + continuation)[-self.max_length - 1 :])  # Cut the beginning of a long context.
            windows.append(Window(ids, min(len(continuation), self.max_length)))
        scores = score_windows(self.model, windows, batch_size=self.batch_size)
        return list(zip((-scores.nats).tolist(), scores.greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return ln p of each whole text, in nats. Texts are scored in windows of the model's length."""
        pairs: list[LoglikelihoodRequest] = []
        for number, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                context_len=1,
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
            )
            pairs += [(number, *make_disjoint_window(window)) for window in rolling]
        totals = [0.0] * len(requests)
        for (number, _, _), (value, _) in zip(pairs, self._loglikelihood_tokens(pairs), strict=True):
            totals[number] += value
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each request, up to one of its stop strings."""
        answers = []
        for start in range(0, len(requests), self.batch_size):
            batch = [self._make_continuation(*request.args) for request in requests[start : start + self.batch_size]]
            # Only the first rank of each model-parallel group receives the text.
            generate(self.model, self.own_tokenizer, batch)
            answers += [
                postprocess_generated_text(self.own_tokenizer.decode(c.ids), [*c.sampling.stop], None) for c in batch
            ]
        return answers

    def _make_continuation(self, context: str, given: dict[str, Any]) -> GenerationRequest:
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(given))
        length, stops = wanted["max_gen_toks"], handle_stop_sequences(wanted["until"], eos=None)
        if length >= self.max_length:
            raise ValueError(f"a task asks for {length} new tokens; the model has {self.max_length} positions")
        return GenerationRequest(
            self.tok_encode(context)[length - self.max_length :],
            SamplingParams(
                temperature=wanted["temperature"],
                top_k=wanted.get("top_k", 0),
                top_p=wanted.get("top_p", 0.0),
                max_new_tokens=length,
                stop=tuple(filter(None, stops)),
            ),
        )


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags. Raises ValueError or FileNotFoundError if a flag is invalid."""
    parser = ModelParser(__doc__, scores=True)
    parser.add_argument("--tasks", required=True, metavar="NAMES", help="names of lm-eval, separated by commas")
    parser.add_argument("--include-path", metavar="DIR", help="a folder with your own tasks")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples before each question")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N examples of each task")
    args = parser.parse_args(argv)
    if args.include_path and not Path(args.include_path).is_dir():
        raise FileNotFoundError(f"--include-path: no such folder: {args.include_path}")
    check_output(args)
    return args


def evaluate(argv: Sequence[str], rank_info: RankInfo, log: Log) -> None:
    """Run the tasks that the flags name. Rank 0 prints lm-eval's table and writes its results."""
    args = parse_args(argv)
    manager = TaskManager(include_path=args.include_path)
    tasks_by_name = {name: manager.match_tasks([name]) for name in args.tasks.split(",")}  # A name may have wildcards.
    if unknown := [name for name, tasks in tasks_by_name.items() if not tasks]:
        raise ValueError(f"--tasks: lm-eval has no task {', '.join(unknown)}")
    loaded = open_model_from_flags(args, rank_info, log)
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as quiet:
        if rank_info.rank:
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
            quiet.enter_context(contextlib.redirect_stderr(nowhere))
        results = lm_eval.simple_evaluate(
            "gpt2-model-parallel",
            {"model": loaded.model, "tokenizer": loaded.tokenizer},
            tasks=[task for tasks in tasks_by_name.values() for task in tasks],
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            batch_size=args.micro_batch_size,
            task_manager=manager,
            log_samples=False,
        )
    if rank_info.rank:
        return
    print(make_table(results))
    scores = {key: results[key] for key in ("results", "n-shot", "versions")}
    write_scores(args.output, score_metadata(loaded, args.micro_batch_size) | scores)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    return run_program(evaluate, argv)
