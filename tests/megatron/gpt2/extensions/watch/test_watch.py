"""Flipped bits, loss spikes and slow ranks. If a bit flips in weights, masters or moments, the run ends before the next
update and names the rank and the tensor. After a loss spike, the run loads an earlier checkpoint and skips the samples
since this checkpoint, in any layout. A warning names a slow rank and the slow part of its step, and not the ranks that
wait."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

import mpu
from megatron.gpt2.extensions.watch.replicas import ROW, StateCorrupted, hash_ranges
from megatron.gpt2.extensions.watch.spikes import MAX_REWINDS, WINDOW, SpikeDetector
from megatron.gpt2.extensions.watch.stragglers import StragglerDetector
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.incidents import read_incidents
from megatron.gpt2.monitor.timers import TIMER_ORDER
from megatron.gpt2.train.loop import train
from megatron.gpt2.train.train_step import train_step
from tests.distributed import run_ranks
from tests.faults.injector import Fault, flip, plant, slow, spike
from tests.megatron.gpt2.train.training_runs import finish, start, write_text

FLAGS = "--num-layers 1 --hidden-size 32 --micro-batch-size 1 --global-batch-size 6 --check-replicas-interval 2"
UP, NORM = "transformer.layers.0.mlp.dense_h_to_4h.weight", "transformer.final_layernorm.weight"


def test_each_bit_changes_only_the_hash_of_its_range() -> None:
    buffer, ranges = torch.randn(4 * ROW, dtype=torch.bfloat16), [(0, 70), (2 * ROW, 2 * ROW), (2 * ROW, 4 * ROW)]
    hashes = hash_ranges(buffer, ranges)
    for element, hash_index in ((69, 0), (4 * ROW - 1, 2)):
        for bit in range(16):
            flipped = buffer.clone()
            flipped.view(torch.int16)[element] ^= -1 << bit  # Flip the bit and all higher bits.
            assert (hash_ranges(flipped, ranges) != hashes).nonzero().tolist() == [[hash_index]]


def step(trainer: Any) -> None:
    train_step(trainer)
    trainer.progress.count_step(trainer.current_global_batch_size)
    trainer.hooks.call(Hook.on_step_end, trainer)


def errors_of_flips(
    rank: int, world: int, folder: Path, flags: str, cases: list[tuple[int, int, str, str]]
) -> list[str]:
    """Return the error of each case (rank, iteration after which a bit flips, kind, name)."""
    lines = []
    for number, (bad, iteration, kind, name) in enumerate(cases):
        trainer = start(rank, world, folder, f"{FLAGS} --save {folder}/save-{world}-{number} {flags}")
        line = ""
        try:
            for done in range(6):
                if rank == bad and done == iteration:
                    flip(trainer, kind, name)
                step(trainer)
        except StateCorrupted as error:
            line = f"{trainer.progress.iteration}: {error}"
        lines.append(line)
        finish(trainer)
    return lines


def expect(errors: list[list[str]], *patterns: str) -> None:
    """Check that all ranks raise the same errors, which match the patterns."""
    for other in errors[1:]:
        assert other == errors[0]
    for error, pattern in zip(errors[0], patterns, strict=True):
        assert re.match(pattern, error), error


def test_replicas_name_the_rank(tmp_path: Path):
    """If a bit flips while the rank's state is not hashed, the comparison with the replicas finds it."""
    write_text(tmp_path, 1000)
    expect(
        run_ranks(errors_of_flips, 3, tmp_path, "", [(1, 3, "exp_avg", UP), (2, 2, "weight", NORM)]),
        # The update of iteration 4 has used the flipped moment.
        f"4: rank 1 holds a different weight of {UP} and 1 other than the other replicas, since iteration 2, the last "
        "clean hash: ",
        f"2: rank 2 holds a different weight of {NORM} than the update of iteration 2 left, the last clean hash: the "
        "memory of a rank has changed by itself",
    )


def errors_of_layouts(rank: int, world: int, folder: Path) -> list[str]:
    tensor = "--model-parallel-size 2 --sequence-parallel"
    lines = errors_of_flips(rank, world, folder, tensor, [(1, 3, "weight", NORM), (1, 2, "exp_avg", UP)])
    sharded = f"--use-distributed-optimizer --precision bf16 --save {folder}/sharded"
    lines += errors_of_flips(rank, world, folder, sharded, [(1, 2, "master", ""), (0, 3, "weight", "")])
    stages = f"--num-layers 2 --pipeline-model-parallel-size 2 --save {folder}/stages"
    return lines + errors_of_flips(rank, world, folder, stages, [(1, 2, "exp_avg_sq", NORM)])


def test_split_sharded_and_staged_state(tmp_path: Path):
    write_text(tmp_path, 1000)
    expect(
        run_ranks(errors_of_layouts, 2, tmp_path),
        f"4: ranks 0-1 hold a different weight of {NORM} than each other, since iteration 2",
        f"2: rank 1 holds a different exp_avg of {UP} than the update",
        r"2: rank 1 holds a different master of \S+ than the update",
        "$",  # The update of iteration 4 has overwritten the flipped weight by its rounded master.
        f"2: rank 1 holds a different exp_avg_sq of {NORM} than the update",
    )


SPIKE_FLAGS = (
    "--num-layers 1 --hidden-size 32 --micro-batch-size 1 --global-batch-size 4 --log-interval 1 "
    "--save-interval 3 --rewind-on-spike 1.2 --lr 1e-2 --check-replicas-interval 1"
)


def test_spike_threshold() -> None:
    spikes = SpikeDetector(1.5)
    assert not any(map(spikes.median_if_spike, (9.0, 3.0, None, 3.1, 3.2, 4.6)))
    for _ in range(2):  # The first spike does not change the median of the other losses.
        assert spikes.median_if_spike(4.9) == 3.2
    for _ in range(WINDOW):
        spikes.median_if_spike(2.0)
    assert spikes.median_if_spike(3.1) == 2.0
    spikes.rewinds = MAX_REWINDS
    assert spikes.median_if_spike(99.0) is None


def samples_read(rank: int, world: int, folder: Path, flags: str, until: int) -> dict[int, list[int]]:
    """Return {iteration: samples that this rank read}. If an iteration is repeated, the last repetition counts."""
    trainer = start(rank, world, folder, f"{SPIKE_FLAGS} {flags} --exit-interval {until}")
    seen: dict[int, list[int]] = {}
    read = trainer.data.to_device

    def recording(text: Any, samples: Any) -> Any:
        seen[trainer.progress.iteration + 1] = samples.tolist()
        return read(text, samples)

    vars(trainer.data)["to_device"] = recording
    train(trainer)
    trainer.checkpoints.save()
    finish(trainer)
    return seen


def samples_read_with_spike(rank: int, world: int, folder: Path) -> dict[int, list[int]]:
    plant(Fault(spike, rank, 16))  # In step 17, random tokens cause a loss spike.
    return samples_read(rank, world, folder, "--use-distributed-optimizer", 20)


def test_the_run_rewinds_and_skips_samples(tmp_path: Path):
    write_text(tmp_path, 4000)
    seen = run_ranks(samples_read_with_spike, 2, tmp_path)
    save = tmp_path / "save"
    (warning,) = {record["text"] for record in read_incidents(save) if record["kind"] == "spike"}
    assert warning.startswith("WARNING: at iteration 17 the loss is ") and warning.endswith(
        ": the run is back at iteration 15 and skips 8 samples (--rewind-on-spike; 2 more rewinds, then none)"
    ), warning
    for iteration, first in ((15, 56), (16, 68), (20, 84)):  # Samples 60 to 67 are skipped.
        assert sorted(sum((of_rank[iteration] for of_rank in seen), [])) == list(range(first, first + 4))
    logged = [json.loads(line)["iteration"] for line in (save / "metrics.jsonl").read_text().splitlines()]
    assert logged == list(range(1, 21))

    # The run continues in a different layout with the next samples.
    on_one = samples_read(0, 1, tmp_path, "--model-parallel-size 1", 22)
    assert on_one == {21: [88, 89, 90, 91], 22: [92, 93, 94, 95]}


def test_a_warning_is_logged_once_after_two_lines() -> None:
    forward_ms = [100, 100, 160, 101]
    times = [[ms if name == "forward" else 1 for name in TIMER_ORDER] for ms in forward_ms]
    parallel = mpu.ParallelState(data_parallel_size=2, tensor_model_parallel_size=2)
    detector = StragglerDetector(parallel, dict(enumerate("aabb")))
    line = (
        'WARNING: rank 2 (b) takes 60 ms longer in "forward" than the other ranks of its stage, 160 ms per step '
        "instead of 100, for 2 log lines: check its machine"
    )
    assert [detector.warnings(times, 200.0) for _ in range(3)] == [[], [line], []]
    stages = StragglerDetector(mpu.ParallelState(pipeline_model_parallel_size=4), {})
    assert not any(stages.warnings(times, 200.0) for _ in range(2)), "each stage has different work"


def slow_optimizer(rank: int, world: int, folder: Path) -> list[str]:
    plant(Fault(partial(slow, part="optimizer", seconds=0.2), rank=1, step=0))
    flags = "--num-layers 1 --hidden-size 32 --micro-batch-size 1 --global-batch-size 3"
    trainer = start(rank, world, folder, f"{flags} --log-straggler --log-interval 2 --train-iters 6")
    train(trainer)
    finish(trainer)
    return [record["text"] for record in read_incidents(f"{folder}/save") if record["kind"] == "slow"]


def test_the_slow_rank_is_named(tmp_path: Path):
    write_text(tmp_path, 1000)
    texts = run_ranks(slow_optimizer, 3, tmp_path)[0]
    found = re.search(r'WARNING: rank 1 takes (\d+) ms longer in "optimizer"', "\n".join(texts))
    assert found and 190 < int(found[1]) < 2000, texts
