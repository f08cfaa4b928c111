"""Text from a trained model, one token at a time.

Every rank of a model-parallel group calls `generate` with the same arguments; the first draws each token and sends
it to the others. Legend: s sequence, p model-parallel size, v padded vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import mpu
from data_utils import Tokenizer, load_tokenizer
from megatron.checkpoint_facts import check_facts
from megatron.checkpointing import Checkpoint, find_checkpoint, load_model
from megatron.model.gpt2 import GPT2Model


@torch.no_grad()
def generate(model: GPT2Model, tokenizer: Tokenizer, prompt_ids: Sequence[int] | np.ndarray, *, max_new_tokens: int,
             temperature: float = 1.0, top_k: int = 0, generator: torch.Generator | None = None) -> list[int]:
    """The ids that follow `prompt_ids` (none: a new document), up to `max_new_tokens` or the end of the document.

    temperature 0 takes the likeliest token; top_k > 0 draws among the k likeliest. `generator` is a CPU one. The
    context is the last `max_position_embeddings` tokens.
    """
    parameter = next(model.parameters())
    context = torch.tensor([tokenizer.eod] if len(prompt_ids) == 0 else [int(i) for i in prompt_ids])
    new: list[int] = []
    was_training = model.training
    model.eval()
    while len(new) < max_new_tokens:
        context = context[-model.config.max_position_embeddings:]
        logits = next_logits(model, context.to(parameter.device))
        logits = mpu.gather_from_model_parallel_region(logits)[0, 0, :tokenizer.vocab_size]  # without padding
        token = draw(logits.float().cpu(), temperature, top_k, generator).to(parameter.device)  # [1]
        group = mpu.get_model_parallel_group()
        if group is not None and group.size() > 1:
            dist.broadcast(token, mpu.get_model_parallel_src_rank(), group=group)
        if int(token) == tokenizer.eod:
            break
        new.append(int(token))
        context = torch.cat([context, token.cpu()])
    model.train(was_training)
    return new


def next_logits(model: GPT2Model, context: Tensor) -> Tensor:
    """context [s] int64 -> this rank's logits of the token after it, [1, 1, v/p]."""
    s = context.numel()
    if model.sequence_parallel:  # the group must divide the sequence; what is added comes after all that counts
        context = F.pad(context, (0, -s % mpu.get_model_parallel_world_size()))
    # A compiled layer would be compiled again for other lengths.
    with torch.compiler.set_stance("force_eager") if model.is_compiled else contextlib.nullcontext():
        return model(context.unsqueeze(0))[s - 1:s]  # type: ignore[no-any-return]


def draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> Tensor:
    """logits [v] float32 -> one id, int64 [1]."""
    if temperature == 0:
        return logits.argmax().view(1)
    if 0 < top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=generator)


def load_for_inference(directory: str | Path, device: torch.device, dtype: torch.dtype, *,
                       log: Callable[[str], None]) -> tuple[GPT2Model, Tokenizer, Checkpoint]:
    """The model and tokenizer of the newest checkpoint in `directory`, for this rank's place in the default groups.

    ValueError or FileNotFoundError, one line, where there is none or its tokenizer is another one.
    """
    checkpoint = find_checkpoint(directory, log=log)
    if checkpoint is None:
        raise FileNotFoundError(f"--load {directory}: holds no checkpoint; give the --save folder of a training run")
    config = check_facts(checkpoint)
    if checkpoint.facts.get("tokenizer") is None:
        raise ValueError(f"{checkpoint.path} came without a tokenizer: convert it again with --vocab-file and "
                         "--merge-file, or --tokenizer-model")
    tokenizer = load_tokenizer(Path(directory) / "tokenizer")
    if tokenizer.fingerprint != checkpoint.facts["tokenizer"]["fingerprint"]:
        raise ValueError(f"{Path(directory) / 'tokenizer'}: is not the tokenizer that {checkpoint.path} was trained "
                         "with; put that one back")
    model = GPT2Model(config, device=device)
    load_model(model.named_parameters(), mpu.partition_specs(model), checkpoint,
               mp_rank=mpu.get_model_parallel_rank(), mp_size=mpu.get_model_parallel_world_size())
    return model.to(dtype).eval(), tokenizer, checkpoint
