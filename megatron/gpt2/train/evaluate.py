"""The loss over a split, and a sample of text that the model writes."""

import math
from dataclasses import replace

import numpy as np
import torch

from data_utils import evaluation_batches
from data_utils.samplers import Samples
from megatron.gpt2.dist.gathering import sum_losses, sum_over_replicas
from megatron.gpt2.generate.generation import Continuation, generate
from megatron.gpt2.generate.sampling import Sampling
from megatron.gpt2.monitor.reporting import EvaluationRecord, evaluation_line
from megatron.gpt2.train.run import Run

# Cool, since a small model's unlikely words are often wrong; without the penalty it then repeats itself ("the class of
# the class of the class").
SAMPLING = Sampling(max_new_tokens=120, temperature=0.5, top_k=40, repetition_penalty=1.2)
PROMPT_WORDS = 4
PROMPT_CHARACTERS = 40  # no more, for a language that is written without spaces


@torch.no_grad()
def evaluate(run: Run, dataset: Samples, split: str, max_samples: int) -> EvaluationRecord:
    """The mean loss over the first `max_samples` samples of `dataset`, each target token counted once. Every rank
    calls it. DamagedData where ranks that share layers have read different text."""
    model, data, parallel = run.engine.model, run.data, run.parallel
    model.eval()
    byte_lengths = torch.from_numpy(data.tokenizer.byte_lengths).to(run.device)
    nats, tokens, size = (torch.zeros((), dtype=torch.float64, device=run.device) for _ in range(3))
    micro_batch_size = run.config.train.micro_batch_size
    for text in evaluation_batches(
        dataset,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=parallel.data_parallel_rank,
        data_parallel_size=parallel.data_parallel_size,
        max_samples=max_samples,
    ):
        batch = data.to_device(data.on_host(text))
        (whole,) = batch.micro_batches(micro_batch_size, batch.mask)
        nats += sum_losses(run.forward_backward.evaluate(whole), step=2.0**-20)  # nats of a micro-batch
        if model.has_head:  # of a pipeline's stages one alone counts
            tokens += batch.mask.sum()
            size += (byte_lengths[batch.labels] * batch.mask).sum()
    model.train()
    data.check_ranks_agree(run.progress.iteration)
    nats_all, tokens_all, size_all = sum_over_replicas((nats, tokens, size), parallel).tolist()
    return EvaluationRecord(
        run.progress.iteration,
        split,
        nats_all / max(tokens_all, 1.0),
        nats_all / math.log(2) / size_all if size_all else None,
    )


def evaluate_and_log(run: Run, split: str, *, final: bool = False) -> EvaluationRecord | None:
    """Evaluate "valid" or "test" over --eval-iters global batches, log it, and keep the checkpoint under --keep-best.
    None where the split has no samples or nothing is evaluated. final: at the end of training."""
    dataset = {"valid": run.data.splits.valid, "test": run.data.splits.test}[split]
    if dataset is None or run.config.train.eval_iters == 0:
        return None
    record = evaluate(run, dataset, split, run.config.train.eval_iters * run.prepared.global_batch_size)
    run.log.record(record)
    run.log.info(evaluation_line(record, final=final))
    if split == "valid" and run.config.checkpoint.keep_best:
        run.save_if_best(record.lm_loss)
    return record


def sample_text(run: Run) -> str:
    """The first words of held-out text, in brackets, and how the model goes on. Every rank calls it. The first rank of
    each model-parallel group gets the text; the others get the prompt alone. The log keeps the text."""
    tokenizer, prompt = run.data.tokenizer, first_words(run)
    sample = Continuation([tokenizer.start, *tokenizer.encode(prompt)], replace(SAMPLING, seed=run.config.train.seed))
    run.engine.gatherer.wait()  # generation does not call the model itself, whose hooks would wait
    generate(run.engine.model, tokenizer, [sample])
    text = f"[{prompt}]{tokenizer.decode(sample.ids)}"
    run.log.sample(text)
    return text


def first_words(run: Run) -> str:
    """The first words of the validation split, or of the training split where there is no other."""
    splits, tokenizer = run.data.splits, run.data.tokenizer
    tokens = (splits.valid or splits.train).rows(np.zeros(1, dtype=np.int64))[0, :PROMPT_CHARACTERS]
    text = tokenizer.decode(tokens[(tokens >= 0) & (tokens != tokenizer.eod)])
    return " ".join(text.split()[:PROMPT_WORDS])[:PROMPT_CHARACTERS]
