"""--exact-layouts is refused where it cannot hold, in one line that names the flags."""

from __future__ import annotations

import pytest

from megatron.gpt2.config.arguments import parse

SHAPE = "--num-attention-heads 8 --hidden-size 64 --ffn-hidden-size 256 --seq-length 64 --max-position-embeddings 96 "


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--exact-layouts 0", "--exact-layouts must be positive, not 0"),
        ("--exact-layouts 6", "--exact-layouts 6 is not a power of two"),
        ("--exact-layouts 2 --model-parallel-size 4", "--exact-layouts 2 is not divisible by --model-parallel-size 4"),
        (
            "--exact-layouts 4 --num-attention-heads 2",
            "--num-attention-heads 2 is not divisible by --exact-layouts 4: change one of them",
        ),
        ("--exact-layouts 4 --ffn-hidden-size 258", "--ffn-hidden-size 258 is not divisible by --exact-layouts 4"),
        ("--exact-layouts 4 --seq-length 66", "--seq-length 66 is not divisible by --exact-layouts 4"),
        (
            "--exact-layouts 4 --make-vocab-size-divisible-by 2",
            "--make-vocab-size-divisible-by 2 is not divisible by --exact-layouts 4",
        ),
        (
            "--exact-layouts 4 --compile",
            "--exact-layouts and --compile: a compiler chooses the order of sums; leave one ",
        ),
        ("--exact-layouts 4 --DDP-impl torch", "--exact-layouts and --DDP-impl torch: torch's DDP adds in an order of"),
        (
            "--exact-layouts 4 --grad-reduce-in-bf16",
            "--exact-layouts and --grad-reduce-in-bf16: another number of ranks ",
        ),
        (
            "--exact-layouts 4 --zero-stage 2",
            "--exact-layouts and --shard-gradients (--zero-stage 2): it adds up ranks ",
        ),
        (
            "--exact-layouts 4 --use-distributed-optimizer --shard-gradients",
            "--exact-layouts and --shard-gradients (--ze",
        ),
        (
            "--exact-layouts 4 --dropout-rng torch",
            "--exact-layouts and --dropout-rng torch: each rank would drop others; "
            "leave one out, or give --hidden-dropout 0 --attention-dropout 0",
        ),
    ],
)
def test_what_it_cannot_hold_for_is_one_line(flags: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(f"{SHAPE}{flags}".split()).config.batch_schedule(3)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--model-parallel-size 4 --zero-stage 1",
        "--sequence-parallel",
        "--dropout-rng torch --hidden-dropout 0 --attention-dropout 0",
        "--model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 12",
    ],
)
def test_what_it_holds_for(flags: str) -> None:
    parse(f"{SHAPE} --micro-batch-size 1 --exact-layouts 4 {flags}".split()).config.batch_schedule(8)
