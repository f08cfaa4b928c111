"""After a bad batch the run loads the checkpoint before it, and skips the samples since then in any layout."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

from megatron.gpt2.checkpoint.folder import TRACKER
from megatron.gpt2.extensions.watch.spikes import MAX_REWINDS, WINDOW, SpikeDetector
from megatron.gpt2.monitor.incidents import read_incidents
from megatron.gpt2.train.loop import train
from tests.distributed import run_ranks
from tests.faults.injector import Fault, plant, spike
from tests.megatron.gpt2.train.training_runs import finish, start, write_text

FLAGS = (
    "--num-layers 1 --hidden-size 32 --micro-batch-size 1 --global-batch-size 4 --log-interval 1 "
    "--save-interval 3 --rewind-on-spike 1.2 --lr 1e-2 --check-replicas-interval 1"
).split()


def test_spike_threshold() -> None:
    spikes = SpikeDetector(1.5)
    assert [spikes.median_if_spike(loss) for loss in (9.0, 3.0, None, 3.1, 3.2, 4.6)] == [
        None
    ] * 6  # 9.0 is in the median
    assert spikes.median_if_spike(4.9) == 3.2 and spikes.median_if_spike(4.9) == 3.2  # it is not among them afterwards
    for _ in range(WINDOW):
        spikes.median_if_spike(2.0)
    assert spikes.median_if_spike(3.1) == 2.0
    spikes.rewinds = MAX_REWINDS
    assert spikes.median_if_spike(99.0) is None


def samples_read(rank: int, world: int, folder: str, flags: list[str], until: int) -> dict[int, list[int]]:
    """Return the samples that this rank read, by iteration. A repeated iteration has the samples of its last time."""
    trainer = start(rank, world, folder, [*FLAGS, *flags, "--exit-interval", str(until)])
    seen: dict[int, list[int]] = {}
    read = trainer.data.to_device

    def recording(text, samples=None):  # type: ignore[no-untyped-def]
        seen[trainer.progress.iteration + 1] = samples.tolist()
        return read(text, samples)

    with mock.patch.object(trainer.data, "to_device", recording):
        train(trainer)
    trainer.save()
    finish(trainer)
    return seen


def samples_read_with_spike(rank: int, world: int, folder: str) -> dict[int, list[int]]:
    plant(Fault(spike, rank, 16))  # each rank reads noise in the step after 16
    return samples_read(rank, world, folder, ["--use-distributed-optimizer"], 20)


def test_the_run_rewinds_and_skips_samples(tmp_path: Path) -> None:
    write_text(tmp_path, 4000)
    seen = run_ranks(samples_read_with_spike, 2, str(tmp_path))
    save = tmp_path / "save"
    (said,) = {record["text"] for record in read_incidents(save) if record["kind"] == "spike"}
    assert said.startswith("WARNING: at iteration 17 the loss is ") and said.endswith(
        ": the run is back at iteration 15 and skips 8 samples (--rewind-on-spike; 2 more rewinds, then none)"
    ), said
    assert said in [json.loads(line)["text"] for line in (save / "history.jsonl").read_text().splitlines()]

    def read(iteration: int) -> list[int]:
        return sorted(sum((of_rank[iteration] for of_rank in seen), []))

    assert read(15) == [56, 57, 58, 59]
    assert read(16) == [68, 69, 70, 71] and read(20) == [84, 85, 86, 87]  # 60 to 67 were in the window
    logged = [json.loads(line)["iteration"] for line in (save / "metrics.jsonl").read_text().splitlines()]
    assert logged == list(range(1, 21))
    assert (save / TRACKER).read_text() == "20\n"

    on_one = samples_read(
        0, 1, str(tmp_path), ["--model-parallel-size", "1"], 22
    )  # a different layout continues the run
    assert on_one == {21: [88, 89, 90, 91], 22: [92, 93, 94, 95]}
