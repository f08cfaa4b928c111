"""Evaluation: the loss over a split, and a sample of generated text."""

import math
from dataclasses import replace

import numpy as np
import torch

from data_utils import GPT2Dataset, evaluation_batches, unigram_bits_per_byte, xz_bits_per_byte
from data_utils.samplers import SampleDataset
from megatron.gpt2.dist.gathering import all_reduce_over_data_and_pipeline, sum_losses
from megatron.gpt2.generate.generation import GenerationRequest, generate
from megatron.gpt2.generate.sampling import SamplingParams
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.log_lines import UNIGRAM, EvaluationRecord, evaluation_line
from megatron.gpt2.train.trainer import Trainer

# The temperature is low, because a small model often errs in unlikely words. The penalty prevents repetitions
# ("the class of the class of the class").
SAMPLING = SamplingParams(max_new_tokens=60, temperature=0.5, top_k=40, repetition_penalty=1.2)
# The largest text, in bytes, that is compressed at the end of a run. xz compresses about 2 MB/s.
XZ_LIMIT = 32 << 20
PROMPT_WORDS = 4
PROMPT_CHARACTERS = 40  # The maximum length of a prompt, for languages without spaces between words.


@torch.no_grad()
def evaluate(trainer: Trainer, dataset: SampleDataset, split: str, max_samples: int) -> EvaluationRecord:
    """Compute the mean loss per token over the first `max_samples` samples of `dataset`. Every rank must call this
    function. Raises DamagedData if ranks of a model-parallel group have read different text."""
    model, data, parallel = trainer.state.model, trainer.data, trainer.parallel
    model.eval()
    byte_lengths = torch.from_numpy(data.tokenizer.byte_lengths).to(trainer.device)
    nats, tokens, size = (torch.zeros((), dtype=torch.float64, device=trainer.device) for _ in range(3))
    micro_batch_size = trainer.config.train.micro_batch_size
    for token_ids in evaluation_batches(
        dataset,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=parallel.data_parallel_rank,
        data_parallel_size=parallel.data_parallel_size,
        max_samples=max_samples,
    ):
        batch = data.to_device(data.to_host_tensor(token_ids))
        (micro_batch,) = batch.split(micro_batch_size, batch.mask)
        # The losses are sums over a micro-batch, in nats, so `step` is larger than for nats per token.
        nats += sum_losses(trainer.forward_backward.evaluate(micro_batch), step=2.0**-20)
        if model.has_head:  # Only the last pipeline stage counts tokens.
            tokens += batch.mask.sum()
            size += (byte_lengths[batch.labels] * batch.mask).sum()
    model.train()
    data.check_batches_match(trainer.progress.iteration)
    nats_all, tokens_all, size_all = all_reduce_over_data_and_pipeline((nats, tokens, size), parallel).tolist()
    return EvaluationRecord(
        trainer.progress.iteration,
        split,
        nats_all / max(tokens_all, 1.0),
        nats_all / math.log(2) / size_all if size_all else None,
    )


def evaluate_and_log(trainer: Trainer, split: str, *, final: bool = False) -> EvaluationRecord | None:
    """Evaluate the split "valid" or "test" over --eval-iters global batches and log the result. With --keep-best, save
    a checkpoint if the loss is the lowest so far. Return None if the split has no samples or --eval-iters is 0.

    final: whether the evaluation follows the last step.
    """
    if split == "valid":
        trainer.hooks.call(Hook.on_evaluate, trainer)
    dataset = {"valid": trainer.data.splits.valid, "test": trainer.data.splits.test}[split]
    if dataset is None or trainer.config.train.eval_iters == 0:
        return None
    record = evaluate(trainer, dataset, split, trainer.config.train.eval_iters * trainer.context.global_batch_size)
    trainer.log.record(record)
    trainer.log.info(evaluation_line(record, final=final))
    if split == "valid" and trainer.config.checkpoint.keep_best:
        trainer.checkpoints.save_if_best(record.lm_loss)
    return record


def sample_text(trainer: Trainer, count: int = 1) -> str:
    """Generate a continuation of each prompt of `prompts_from_split`. Log and return the prompts, in brackets, with
    their continuations. Every rank must call this function. Only the first rank of each model-parallel group gets the
    continuations."""
    tokenizer, prompts = trainer.data.tokenizer, prompts_from_split(trainer, count)
    sampling = replace(SAMPLING, seed=trainer.config.train.seed)
    samples = [GenerationRequest([tokenizer.bos, *tokenizer.encode(prompt)], sampling) for prompt in prompts]
    # Wait for the weights here, because only a hook of the model's `forward` waits for them.
    trainer.state.param_gather.finish_param_sync()
    generate(trainer.state.model, tokenizer, samples)
    texts = [f"[{prompt}]{tokenizer.decode(sample.ids)}" for prompt, sample in zip(prompts, samples, strict=True)]
    for text in texts:
        trainer.log.sample(text)
    return "\n\n".join(texts)


def prompts_from_split(trainer: Trainer, count: int) -> list[str]:
    """Return `count` prompts: the first words of lines at equal distances in the validation split, or in the training
    split if there is no validation split."""
    splits, tokenizer = trainer.data.splits, trainer.data.tokenizer
    split = splits.valid or splits.train
    prompts: list[str] = []
    for row in split.rows(np.arange(count) * len(split) // count):
        lines = tokenizer.decode(row[(row >= 0) & (row != tokenizer.eod)]).splitlines()
        line = next((line for line in lines[bool(prompts) :] if len(line.split()) > PROMPT_WORDS), "\n".join(lines))
        prompts.append(" ".join(line.split()[:PROMPT_WORDS])[:PROMPT_CHARACTERS])
    return prompts


def baseline_bits_per_byte(trainer: Trainer) -> dict[str, float | None]:
    """Return {description: bits per byte} of simple compressors, to compare the model with. The compressors get the
    part of the validation split on which the run was evaluated. The values are None for long texts and blended data."""
    train_split, valid, tokenizer = trainer.data.splits.train, trainer.data.splits.valid, trainer.data.tokenizer
    if (
        not (isinstance(train_split, GPT2Dataset) and isinstance(valid, GPT2Dataset))
        or train_split.num_tokens > XZ_LIMIT
    ):
        return {UNIGRAM: None, "xz -9": None}
    samples = min(len(valid), trainer.config.train.eval_iters * trainer.context.global_batch_size)
    held_out = valid.tokens[: samples * trainer.config.data.seq_length]
    train_text = train_split.text(XZ_LIMIT)
    return {
        UNIGRAM: unigram_bits_per_byte(train_split.tokens, held_out, tokenizer.byte_lengths, tokenizer.vocab_size),
        "xz -9, given the training text": xz_bits_per_byte(train_text, tokenizer.decode_bytes(held_out))
        if train_text is not None
        else None,
    }
