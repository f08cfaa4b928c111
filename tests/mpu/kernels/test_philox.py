"""The counter-based generator: its published numbers, and every part of a stream by itself."""

from __future__ import annotations

import torch

from mpu.kernels.philox import ELEMENTS, WORD, Philox, dropped_draws, factor, zero_dropped

# Of Random123's known answers, philox4x64 with 10 rounds: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Four words by the definition."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (second // WORD ^ c1 ^ k0, second % WORD, first // WORD ^ c3 ^ k1, first % WORD)
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % WORD, (k1 + 0xBB67AE8584CAA73B) % WORD
    return c0, c1, c2, c3


def draws(counter: tuple[int, ...], seed: int) -> list[int]:
    """The 16 signed draws of a block, by the definition."""
    numbers = [word >> 16 * lane & 0xFFFF for word in philox(counter, (seed, 0)) for lane in range(4)]
    return [number - 65536 if number >= 32768 else number for number in numbers]


def test_the_definition_gives_the_published_numbers():
    assert all(philox(counter, key) == words for counter, key, words in KNOWN)


def test_a_block_is_what_the_definition_says():
    stream, seed = (7, 5 << 8 | 2, 1 << 32 | 3), 1234
    drawn = Philox(seed).draws(stream, 40, 3)
    expected = [draw for block in (41, 42, 43) for draw in draws((block, *stream), seed)]
    assert drawn.dtype == torch.int16 and drawn.tolist() == expected


def test_a_part_of_a_stream_is_the_same_by_itself_and_other_streams_are_not():
    philox_of = Philox.of(3)
    whole = philox_of.draws((1, 2, 3), 0, 64)
    assert torch.equal(philox_of.draws((1, 2, 3), 20, 10), whole[20 * ELEMENTS : 30 * ELEMENTS])
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(philox_of.draws(other, 0, 64), whole)
    assert not torch.equal(Philox.of(4).draws((1, 2, 3), 0, 64), whole)


def test_what_is_dropped_becomes_zero_in_every_dtype():
    limit = dropped_draws(0.3) - 32768
    drawn = torch.tensor([limit, limit - 1, 32767, -32768], dtype=torch.int16)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x = torch.tensor([1.5, -2.5, -torch.inf, torch.nan], dtype=dtype)
        zero_dropped(x, drawn, 0.3, out=(out := torch.empty_like(x)))
        assert out.tolist() == [1.5, 0.0, -torch.inf, 0.0]
        zero_dropped(x, drawn, 1e-6, out=(out := torch.empty_like(x)))
        assert torch.equal(out.nan_to_num(5.0), x.nan_to_num(5.0)), "a probability that is rounded to none"
    assert factor(0.25) == 4 / 3 and dropped_draws(0.9999999) == 65535
