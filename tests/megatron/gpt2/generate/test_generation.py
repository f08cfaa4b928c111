"""Generation with a cache equals generation without it, with transformers, and on several ranks. Continuations join and
leave a running batch, and the text of each equals that of a batch of one."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mpu
from data_utils import build_tokenizer
from megatron.gpt2.checkpoint.sharded_state import parameter_states, sharded_state_dict
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats.huggingface import write_huggingface
from megatron.gpt2.generate.generation import (
    ContinuousBatch,
    GenerationRequest,
    Generator,
    generate,
)
from megatron.gpt2.generate.load_model import load_for_inference
from megatron.gpt2.generate.model_runner import new_command_group
from megatron.gpt2.generate.sampling import Sampler, SamplingParams
from megatron.gpt2.model.gpt2 import GPT2Model, build_block_config
from tests.distributed import run_ranks
from tests.megatron.gpt2.checkpoint.saved_states import write

TOKENIZER = build_tokenizer("bytes")
CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    max_position_embeddings=32,
    vocab_size=TOKENIZER.vocab_size,
    init_method_std=0.2,
)
PROMPTS = [b"", b"O", b"Once upon a time", b"The", b"A prompt that is longer than the context of this model is."]
SETTINGS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5, seed=7),
    SamplingParams(top_p=0.8, repetition_penalty=1.3),
    SamplingParams(top_k=1),
]


@pytest.fixture
def model() -> Any:
    mpu.initialize_model_parallel(1)
    yield GPT2Model(CONFIG).eval()
    mpu.destroy_model_parallel()


def continued(
    model: GPT2Model, prompts: list[bytes], settings: list[SamplingParams], **options: Any
) -> list[list[int]]:
    made = [
        GenerationRequest(list(prompt), dataclasses.replace(sampling, max_new_tokens=70))
        for prompt, sampling in zip(prompts, settings, strict=True)
    ]
    generate(model, TOKENIZER, made, **options)
    return [c.ids for c in made]


@pytest.mark.usefixtures("model")  # The fixture `model` initializes the process groups of mpu.
def test_greedy_equals_transformers(tmp_path: Path) -> None:
    """Continue prompts of different lengths in one batch."""
    ours = endless(GPT2Model(dataclasses.replace(CONFIG, max_position_embeddings=160)))
    theirs = hugging_face(ours, tmp_path)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(256, size=size).tolist() for size in (1, 2, 3, 7, 16, 25, 41, 55)]
    mine = [GenerationRequest(prompt, SamplingParams(temperature=0, max_new_tokens=50)) for prompt in prompts]
    generate(ours, TOKENIZER, mine)
    for c in mine:
        made = theirs.generate(torch.tensor([c.prompt]), max_new_tokens=50, do_sample=False, eos_token_id=TOKENIZER.eod)
        assert made[0].tolist() == [*c.prompt, *c.ids] and len(c.ids) == 50


# (prompt, number of likely tokens to report at each position)
SCORED = [(b"Once upon a time", 3), (b"O", 1), (b"", 2), (PROMPTS[4], 0), (b"The", 5)]


def prompt_scores(model: GPT2Model, **options: Any) -> list[tuple[list[float], list[Any]]]:
    """Return the nats and the most likely tokens of each prompt, next to a prompt that is not scored."""
    made = [
        GenerationRequest(
            list(prompt), SamplingParams(alternatives=alternatives, max_new_tokens=i % 2, top_k=1), score_prompt=True
        )
        for i, (prompt, alternatives) in enumerate(SCORED)
    ]
    generate(model, TOKENIZER, [GenerationRequest([70] * 9, SamplingParams(max_new_tokens=2)), *made], **options)
    return [
        ([-math.log(token.probability) for token in c.prompt_tokens], [token.likeliest for token in c.prompt_tokens])
        for c in made
    ]


def ends_of_a_rank(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Return the errors on this rank when the driver fails between two forward passes, or is interrupted during a
    forward pass."""
    mpu.initialize_model_parallel(world_size)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell lets background jobs ignore SIGINT.
    model, ends = GPT2Model(CONFIG), list[tuple[str, str]]()
    for error in (ZeroDivisionError("divided"), FileNotFoundError("gone"), None):
        if error is None and rank == 0:
            model.transformer.final_layernorm.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        c = GenerationRequest([65], SamplingParams(temperature=0, max_new_tokens=30))
        with pytest.raises(BaseException) as raised, pytest.MonkeyPatch.context() as patch:
            if error is not None:
                patch.setattr(Sampler, "draw", mock.Mock(side_effect=[(65, 0.5), (65, 0.5), error]))
            generate(model, TOKENIZER, [c])
        ends.append((raised.type.__name__, str(raised.value)))
    mpu.destroy_model_parallel()
    return ends


def test_an_error_of_the_driver_ends_all_ranks() -> None:
    driver, other = run_ranks(ends_of_a_rank, 2)
    assert driver == [("ZeroDivisionError", "divided"), ("FileNotFoundError", "gone"), ("KeyboardInterrupt", "")]
    assert other == [
        (kind, f"the first rank ended with {name}: {text}")
        for kind, (name, text) in zip(("RuntimeError", "OSError", "KeyboardInterrupt"), driver, strict=True)
    ]


def texts_of_a_rank(rank: int, world_size: int, sequence_parallel: bool) -> tuple[list[list[int]], list[Any]]:
    mpu.initialize_model_parallel(world_size)
    try:
        torch.manual_seed(rank)  # With different seeds, ranks that drew their own tokens would differ.
        model = GPT2Model(CONFIG, build_block_config(CONFIG, sequence_parallel=sequence_parallel)).train()
        # Only the prompts of the first rank are used.
        made = continued(model, PROMPTS if rank == 0 else [b"?"] * 5, SETTINGS)
        assert model.training, "as it was before"
        return made, prompt_scores(model)
    finally:
        mpu.destroy_model_parallel()


@pytest.mark.parametrize(
    "ranks, sequence_parallel", [(2, False), pytest.param(4, False, marks=pytest.mark.wide), (2, True)]
)
def test_the_same_text_on_any_number_of_ranks(model: GPT2Model, ranks: int, sequence_parallel: bool) -> None:
    alone = continued(model, PROMPTS, SETTINGS)
    assert all(0 <= i < TOKENIZER.vocab_size for ids in alone for i in ids)
    found = run_ranks(texts_of_a_rank, ranks, sequence_parallel)
    assert [made for made, _ in found] == [alone] + [[[]] * 5] * (ranks - 1)
    for (nats, likeliest), (nats_alone, likeliest_alone) in zip(found[0][1], prompt_scores(model), strict=True):
        assert nats == pytest.approx(nats_alone, abs=1e-5)
        assert [list(dict(others)) for others in likeliest] == [list(dict(others)) for others in likeliest_alone]


def seconds_of_waiting(rank: int, world_size: int) -> float:
    """Close a stream early, after a pause. Return the processor time of this rank."""
    mpu.initialize_model_parallel(world_size)
    generator = Generator(GPT2Model(CONFIG), TOKENIZER, group=new_command_group())
    dist.barrier()
    began = time.process_time()
    if not generator.is_driver:
        generator.execute_commands()
        return time.process_time() - began
    with generator.driving():
        time.sleep(2.0)
        c = GenerationRequest([65], SamplingParams(max_new_tokens=30, top_k=1))
        with contextlib.closing(generator.stream([c])) as stream:  # type: ignore[type-var]
            next(stream)
        assert c.finish == ""
    return time.process_time() - began


def test_a_stream_can_be_closed_and_a_waiting_rank_sleeps() -> None:
    assert run_ranks(seconds_of_waiting, 2)[1] < 1.0


def test_notices_of_the_context(model: GPT2Model) -> None:
    said: list[str] = []
    generator = Generator(model, TOKENIZER, log=said.append)
    made = [
        GenerationRequest([*range(200 - read, 200)], SamplingParams(max_new_tokens=length, top_k=1))
        for read, length in ((31, 2), (200, 40), (32, 40))
    ]
    for c, lines in zip(made, (0, 2, 3), strict=True):
        list(generator.stream([c]))
        assert len(said) == lines
    assert said[0].startswith("notice: ") and "200 tokens the last 32" in said[0] and "last 16" in said[1]
    assert made[1].ids == made[2].ids


def end_at_once(model: GPT2Model) -> GPT2Model:
    """Change `model` so that it always predicts the end of the document. The logits of padded ids are even higher."""
    with torch.no_grad():
        model.transformer.final_layernorm.weight.zero_()
        model.transformer.final_layernorm.bias.fill_(1)
        model.word_embeddings.weight[TOKENIZER.eod] = 5
        model.word_embeddings.weight[TOKENIZER.vocab_size :] = 9
    return model.eval()


def hugging_face(model: GPT2Model, folder: Path) -> Any:
    """Export the model to Hugging Face's format, and load the export with transformers."""
    from transformers import GPT2LMHeadModel

    from megatron.gpt2.formats import Hints, open_checkpoint

    save(model, folder / "ours")
    source = open_checkpoint(str(folder / "ours"), Hints(), log=lambda line: None)
    write_huggingface(source, folder / "theirs", log=lambda line: None)
    return GPT2LMHeadModel.from_pretrained(folder / "theirs").eval()


def save(model: GPT2Model, folder: Path) -> None:
    shards = sharded_state_dict(
        parameter_states(model.named_parameters()), mpu.partition_specs(model), tp_rank=0, tp_size=1
    )
    metadata = {
        "config": {"model": dataclasses.asdict(model.config)},
        "vocab_size": TOKENIZER.vocab_size,
        "tokenizer": {"fingerprint": TOKENIZER.fingerprint},
    }
    write(folder, 3, {"mp_rank_00/model.safetensors": shards}, metadata=metadata)
    TOKENIZER.save(folder / "tokenizer")


def save_tiny(folder: Path) -> Path:
    """Save an untrained model in `folder`."""
    mpu.initialize_model_parallel(1)
    save(GPT2Model(CONFIG), folder)
    mpu.destroy_model_parallel()
    return folder


def test_a_foreign_checkpoint_is_refused_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "ckpt.pt").touch()
    with pytest.raises(ValueError, match="tools/checkpoint.py convert .*--vocab-file FILE.*format nanogpt"):
        load_for_inference(tmp_path, torch.device("cpu"), torch.float32, log=pytest.fail)


ROWS = 5


def endless(model: GPT2Model) -> GPT2Model:
    """Change `model` so that it never generates the end-of-document token."""
    with torch.no_grad():
        model.word_embeddings.weight[TOKENIZER.eod] = 0
    return model.eval()


def requests() -> list[GenerationRequest]:
    """Return random requests. Some prompts and texts are longer than the context, and some requests ask for no new
    tokens."""
    dice = random.Random(3)
    return [
        GenerationRequest(
            [dice.randrange(256) for _ in range(dice.choice([0, 1, 3, 9, 20, 32, 40]))],
            dataclasses.replace(
                dice.choice([SamplingParams(temperature=0), *SETTINGS]),
                seed=i,
                max_new_tokens=dice.choice([0, 1, 2, 10, 30, 60]),
            ),
        )
        for i in range(60)
    ]


def served(batch: ContinuousBatch, made: list[GenerationRequest]) -> list[list[int]]:
    """Run the requests, which must begin in the order of their arrival. A request arrives after every sixth event, or
    when all earlier requests have ended. Return the ids of each request, collected from the events."""
    arriving, ids, begun = iter(made), [list[int]() for _ in made], dict[int, None]()
    for first in arriving:
        batch.add(first)
        for count, event in enumerate(batch.events()):
            begun[event.number] = None
            if event.id not in (-1, TOKENIZER.eod):
                ids[event.number].append(event.id)
            assert event.finish == made[event.number].finish
            if count % 6 == 0 and (c := next(arriving, None)):
                batch.add(c)
    assert all(c.finish for c in made) and [c.ids for c in made] == ids
    assert list(begun) == sorted(begun)
    return ids


def test_each_text_equals_that_of_a_single_request(model: GPT2Model) -> None:
    generator, tokens_read = Generator(endless(model), TOKENIZER), list[int]()
    prefill = generator.prefill

    def counted_prefill(contexts: list[list[int]], *others: Any) -> Any:
        tokens_read.append(len(contexts) * max(map(len, contexts)))
        return prefill(contexts, *others)

    generator.prefill = counted_prefill  # type: ignore[method-assign, assignment]
    with mock.patch.object(generator, "decode", wraps=generator.decode) as decode, generator.batch(ROWS) as batch:
        found = served(batch, requests())
    for c, ids in zip(requests(), found, strict=True):
        generate(model, TOKENIZER, [c])
        assert c.ids == ids
    assert {len(ids) for ids in found} >= {0, 1, 2, 10, 30, 60}
    assert decode.call_count < 0.5 * sum(map(len, found)), "they ran concurrently"
    assert max(tokens_read) <= CONFIG.max_position_embeddings
    with Generator(model, TOKENIZER, recompute=True).batch(ROWS) as batch:
        assert served(batch, requests()) == found


def test_ends_without_a_token(model: GPT2Model) -> None:
    """A continuation can be cancelled while it waits and while it runs. The next continuation takes its row."""
    with Generator(endless(model), TOKENIZER).batch(1) as batch:
        made = [GenerationRequest([65], SamplingParams(max_new_tokens=n)) for n in (9, 9, 0, 2)]
        for c in made:
            batch.add(c)
        seen = []
        for event in batch.events():
            seen.append((event.number, event.finish))
            if len(seen) == 3:
                made[0].cancel()
                made[1].cancel()
    assert seen == [(0, "")] * 3 + [(1, "cancelled"), (0, "cancelled"), (2, "length"), (3, ""), (3, "length")]
