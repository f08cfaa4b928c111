"""Losses and gradients with --reset-position-ids, --reset-attention-mask and --eod-mask-loss equal those of Megatron's
dense masks, with every kind of recomputation and with sequence parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import mpu
from megatron.gpt2.model.gpt2 import GPT2Model, build_block_config, model_partition_specs
from megatron.gpt2.train.data import document_positions
from megatron.gpt2.train.evaluate import evaluate
from mpu.attention import PackedSeqParams
from mpu.grads import is_sequence_parallel
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import SHAPE, finish, start, steps

EOD = 0
FLAGS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"


def texts(b: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels [b, 32]. The first sample has no end of a document. The others have ends in the middle,
    at successive tokens and both edges, and at the last label."""
    text = torch.randint(1, 97, (4, 33), generator=torch.Generator().manual_seed(1))
    text[1, 10], text[2, [0, 5, 6, 31]], text[3, 32] = EOD, EOD, EOD
    rows = text if b == 4 else text[2:3]
    return rows[:, :-1], rows[:, 1:]


def masks_and_positions(data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Megatron's get_ltor_masks_and_position_ids, one row at a time: the mask [b, s, s] (True if the query sees the
    key), the weight of each loss [b, s], and positions [b, s]."""
    b, s = data.shape
    seen = torch.ones(b, s, s).tril()
    weight = torch.ones(b, s).masked_fill(data == EOD, 0.0)
    positions = torch.arange(s).repeat(b, 1)
    for row in range(b):
        before = 0
        for index in torch.arange(s)[data[row] == EOD].tolist():
            seen[row, index + 1 :, : index + 1] = 0
            positions[row, index + 1 :] -= index + 1 - before
            before = index + 1
    return seen.bool(), weight, positions


def dense_attention(seen: Tensor) -> Any:
    def attention(qkv: Tensor, dropout_p: float, bias: None) -> Tensor:
        q, k, v = qkv.permute(3, 1, 2, 0, 4)  # [b, n, s, d]
        scores = (q @ k.transpose(-1, -2) / qkv.size(-1) ** 0.5).masked_fill(~seen.unsqueeze(1), -torch.inf)
        return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)

    return attention


def loss_and_gradients(model: GPT2Model, b: int, *, dense: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, labels = texts(b)
    seen, weight, positions = masks_and_positions(tokens)
    weight = weight / weight.sum()
    model.zero_grad()
    if dense:
        with mock.patch("mpu.kernels.causal_attention", dense_attention(seen)):
            loss = model(tokens, labels, weight, positions)
    else:
        loss = model(
            tokens, labels, weight, document_positions(tokens, EOD), PackedSeqParams.from_tokens(tokens, EOD, "cpu")
        )
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def by_document(rank: int, world_size: int, b: int) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    mpu.initialize_model_parallel(world_size)
    layouts: dict[str, dict[str, Any]] = {
        granularity: {"recompute_granularity": granularity} for granularity in ("none", "selective", "full")
    }
    if world_size > 1:
        layouts["sequence parallel"] = {**layouts["full"], "sequence_parallel": True, "recompute_num_layers": 2}
        layouts["sequence parallel, hooks"] = layouts["sequence parallel"]
    results = {}
    for name, how in layouts.items():
        model = GPT2Model(SHAPE, build_block_config(SHAPE, **how)).train()
        marked = [parameter for parameter in model.parameters() if is_sequence_parallel(parameter)]
        if name.endswith("hooks"):
            for parameter in marked:
                parameter.register_hook(mpu.reduce_from_model_parallel_region)
        results[name] = loss_and_gradients(model, b)
        if name == "sequence parallel":
            before = marked[0].grad.clone()
            mpu.all_reduce_sequence_parallel_grads(model.parameters())
            assert not torch.allclose(before, marked[0].grad), "the gradient was a partial sum"
    return results


@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("world_size", [1, 2])
def test_loss_and_gradients_equal_the_dense_masks(world_size: int, b: int) -> None:
    mpu.initialize_model_parallel(1)
    model = GPT2Model(SHAPE).train()
    whole, specs = model_partition_specs(SHAPE, 1), model_partition_specs(SHAPE, world_size)
    if b == 4:
        documents = PackedSeqParams.from_tokens(texts(b)[0], EOD, "cpu")
        assert documents.lengths == [32, 11, 21, 1, 5, 1, 25, 32], "the text must have several documents"
        # tests/gpu tests the kernel that reads cu_seqlens_q.
        assert documents.cu_seqlens_q.diff().tolist() == documents.lengths and documents.cu_seqlens_q[0] == 0
    loss, gradients = loss_and_gradients(model, b, dense=True)
    assert abs(loss - model(*texts(b), torch.full((b, 32), 1 / (32 * b)))) > 1e-4, "the masks must matter"
    for rank, layouts in enumerate(run_ranks(by_document, world_size, b)):
        for name, (own_loss, own) in layouts.items():
            assert abs(own_loss - loss) <= 1e-5 * loss
            for parameter, gradient in gradients.items():
                expected = specs[parameter].split(whole[parameter].merge([gradient]), rank, world_size)
                assert (own[parameter] - expected).abs().max() <= 1e-5 * gradient.abs().max(), (name, parameter)


def write_documents(folder: Path) -> None:
    lines = [{"text": f"document {number} " + "of few or many words " * (number % 4)} for number in range(400)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def train(rank: int, world_size: int, folder: Path, flags: str) -> tuple[list[float], float]:
    save = f"{folder}/save_{world_size}_{abs(hash(flags))}"
    files = f"--train-data {folder}/text.jsonl --save {save}"
    trainer = start(rank, world_size, folder, f"{files} --eval-iters 2 --global-batch-size 8 {flags}")
    assert trainer.data.splits.valid is not None
    losses = steps(trainer, 3)["loss"]
    held_out = evaluate(trainer, trainer.data.splits.valid, "valid", 10).lm_loss
    finish(trainer)
    return losses, held_out


def test_training_is_the_same_under_every_layout(tmp_path: Path) -> None:
    write_documents(tmp_path)
    folder = str(tmp_path)
    ((expected, held_out),) = run_ranks(train, 1, folder, f"--micro-batch-size 8 {FLAGS}")
    ((without, _),) = run_ranks(train, 1, folder, "--micro-batch-size 8")
    assert all(abs(a - b) > 1e-4 for a, b in zip(expected, without, strict=True))
    for world_size, flags in (
        (1, "--micro-batch-size 1"),
        (2, "--micro-batch-size 2 --model-parallel-size 2 --sequence-parallel"),
        (2, "--micro-batch-size 4 --recompute-granularity full"),
    ):
        for losses, loss in run_ranks(train, world_size, folder, f"{flags} {FLAGS}"):
            assert losses == pytest.approx(expected, rel=1e-5) and loss == pytest.approx(held_out, rel=1e-5)
