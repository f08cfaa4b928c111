"""The memory of a run, from its flags alone. These names are what the rest of the program may use; the rules for
`Setting` are in `sizes.py`."""

from megatron.gpt2.extensions.plan.pipelines import bubble
from megatron.gpt2.extensions.plan.report import (
    available,
    expected_peak,
    in_mb,
    out_of_memory,
    start_rows,
    warning,
)
from megatron.gpt2.extensions.plan.sizes import Setting
from megatron.gpt2.extensions.plan.step import CUDA_CONTEXT, Memory, expected

__all__ = [
    "CUDA_CONTEXT",
    "Memory",
    "Setting",
    "available",
    "bubble",
    "expected",
    "expected_peak",
    "in_mb",
    "out_of_memory",
    "start_rows",
    "warning",
]
