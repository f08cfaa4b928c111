"""How many samples each step takes over all ranks: a pure function of the samples that were consumed before it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

NEVER = 1 << 62  # samples that no run consumes


@dataclass(frozen=True)
class BatchSchedule:
    """`stages`: (samples, size), ascending from 0 samples on. A step before which so many samples were consumed takes
    `size`. A constant batch is one stage."""

    stages: tuple[tuple[int, int], ...]

    @staticmethod
    def constant(size: int) -> BatchSchedule:
        """The same size in every step."""
        return BatchSchedule(((0, size),))

    @staticmethod
    def rampup(start: int, increment: int, samples: int, final: int) -> BatchSchedule:
        """Megatron's --rampup-batch-size: `increments` of equally many samples, from `start` to `final`, which a step
        takes when more than `samples` are consumed."""
        increments = (final - start) // increment
        stages = {0: start}
        for number in range(1, increments + 1):
            first = -(-number * samples // increments)
            # Megatron divides floats: where this is below `number`, its step there is still smaller.
            late = samples > 0 and int(first / (samples / increments)) < number
            stages[first + late] = start + number * increment
        return BatchSchedule(tuple(stages.items()))

    @property
    def final(self) -> int:
        """The size of the last steps."""
        return self.stages[-1][1]

    def size(self, consumed: int) -> int:
        """The samples of the step before which `consumed` samples were consumed."""
        return self.stages[bisect.bisect_right(self.stages, (consumed, NEVER)) - 1][1]

    def spans(self, consumed: int = 0) -> Iterator[range]:
        """What was consumed before each of the steps from there on: a range for each size, the last without an end."""
        ends = [first for first, _ in self.stages[1:]] + [NEVER]
        for (_, size), end in zip(self.stages, ends, strict=True):
            if consumed < end:
                yield (span := range(consumed, end, size))
                consumed = span[-1] + size

    def after_steps(self, steps: int, consumed: int = 0) -> int:
        """What is consumed after so many more steps."""
        for span in self.spans(consumed):
            if steps < len(span):
                break
            steps -= len(span)
        return span[steps]

    def before_steps(self, steps: int) -> np.ndarray:
        """int64 [steps + 1]: what is consumed before each of the first steps, and after the last of them."""
        parts, left = [], steps + 1
        for span in self.spans():
            part = span[:left]
            parts.append(np.arange(part.start, part.stop, part.step))
            if not (left := left - len(part)):
                break
        return np.concatenate(parts)

    def steps_until(self, samples: int, consumed: int = 0) -> int:
        """The fewest steps after which at least `samples` are consumed."""
        steps = 0
        for span in self.spans(consumed):
            needed = max(0, -(-(samples - span.start) // span.step))
            if needed <= len(span):
                break
            steps += len(span)
        return steps + needed
