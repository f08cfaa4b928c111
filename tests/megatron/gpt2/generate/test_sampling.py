"""Test that the sampling distribution equals that of transformers, and that TextStream turns tokens into text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.gpt2.generate.generation import TextStream
from megatron.gpt2.generate.sampling import Sampler, SamplingParams, filter_logits

CPU = torch.device("cpu")


def of_transformers(logits: torch.Tensor, sampling: SamplingParams, context: torch.Tensor) -> torch.Tensor:
    from transformers.generation.logits_process import (
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    steps = [RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)] if sampling.repetition_penalty != 1 else []
    steps += [TemperatureLogitsWarper(sampling.temperature)] if sampling.temperature != 1 else []
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [TopPLogitsWarper(sampling.top_p)] if 0 < sampling.top_p < 1 else []
    scores = logits[None]
    for step in steps:
        scores = step(context[None], scores)
    return scores[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1e-3},
        {"top_k": 1},
        {"top_k": 10**6},
        {"top_p": 0.001},
        {"top_p": 0.92},
        {"top_p": 1.0},
        {"repetition_penalty": 0.8, "temperature": 1.4, "top_k": 500, "top_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_distributions_equal_those_of_transformers(settings: dict[str, Any], spread: float) -> None:
    sampling = SamplingParams(**settings)
    draw = torch.Generator().manual_seed(0)
    for size in (300, 50257):
        # In float32, the rounding of a sum of 50,000 values would decide which tokens belong to the nucleus.
        logits = spread * torch.randn(size, generator=draw, dtype=torch.float64)
        context = torch.randint(size, (50,), generator=draw)
        seen = torch.zeros(size, dtype=torch.bool).index_fill_(0, context, True)
        ours, theirs = filter_logits(logits, sampling, seen), of_transformers(logits, sampling, context)
        assert torch.equal(ours.isinf(), theirs.isinf())
        torch.testing.assert_close(ours.softmax(0), theirs.softmax(0), rtol=1e-9, atol=0)
        single = filter_logits(logits.float(), sampling, seen).softmax(0)
        torch.testing.assert_close(single.double(), theirs.softmax(0), rtol=1e-3, atol=1e-6)


def test_draws_follow_the_distribution_and_the_penalty() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    sampler = Sampler(SamplingParams(temperature=2.0, top_k=3), [], 4, CPU)
    drawn = torch.tensor([sampler.draw(logits, logits.logsumexp(0))[0] for _ in range(4000)])
    expected = filter_logits(logits, sampler.sampling).softmax(0)
    torch.testing.assert_close(drawn.bincount(minlength=4) / 4000, expected, rtol=0, atol=0.03)
    greedy = Sampler(SamplingParams(temperature=0, repetition_penalty=2.0), [0], 4, CPU)
    draws = [greedy.draw(logits, logits.logsumexp(0)) for _ in range(4)]
    assert [token for token, _ in draws] == [1, 3, 1, 1]
    assert draws[0][1] == pytest.approx(float(logits.softmax(0)[1]))


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", float("nan")),
        ("temperature", 1e-9),
        ("top_k", -1),
        ("top_p", 1.1),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", -1),
        ("seed", 2**63),
        ("stop", ("",)),
    ],
)
def test_bad_settings_name_their_flag(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^--{name.replace('_', '-')} must "):
        dataclasses.replace(SamplingParams(), **{name: value})


def pieces(stream: TextStream, data: bytes, size: int) -> Iterator[str]:
    """Feed `data` in steps of `size` bytes. Yield the text of each step, until a stop string ends the text."""
    for start in range(0, len(data), size):
        yield stream.add(data[start : start + size], last=start + size >= len(data))
        if stream.stopped:
            break


@pytest.mark.parametrize("size", [1, 2, 3])
def test_text_is_never_a_half_character(size: int) -> None:
    data = "añ€😀z".encode() + b"\xff" + "é".encode()[:1]
    made = list(pieces(TextStream(), data, size))
    assert "".join(made) == data.decode(errors="replace")
    assert "\ufffd" not in "".join(made[: len("añ€😀z".encode()) // size])


@pytest.mark.parametrize(
    "stop, text, expected",
    [
        (("END",), "one ENEND two", "one EN"),
        (("\n\n",), "a\nb\n\nc", "a\nb"),
        (("abc", "bc"), "xabcx", "x"),
        (("zz",), "a z", "a z"),
        (("aab",), "aaab", "a"),
        (("é!",), "ré!", "r"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_stop_strings(stop: tuple[str, ...], text: str, expected: str, size: int) -> None:
    stream, made = TextStream(stop), ""
    for piece in pieces(stream, text.encode(), size):
        made += piece
        assert expected.startswith(made), "text that was given out cannot be taken back"
    assert made == expected and stream.stopped == (expected != text)
