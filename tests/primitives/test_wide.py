"""Wide tiles in shared memory: every word where TMA expects it, and no bank asked twice."""

from collections import Counter
from itertools import product

import pytest

from coda_agent.primitives.wide import order

LANES, BANKS = 32, 32


def swizzled(row: int, word: int, words: int) -> int:
    """Where TMA puts a word of a sub-tile whose rows are one 128- or 64-byte swizzle span wide:
    16-byte chunks exchanged by three (two) bits of the 128-byte line they lie in."""
    at = row * words + word
    line, chunk = at // 32, at // 4 % 8
    return line * 32 + (chunk ^ line % (words // 4)) * 4 + at % 4


@pytest.mark.parametrize("words", [32, 16])
def test_wide_accesses_reach_their_words_and_meet_in_no_bank(words: int) -> None:
    groups = words // 8
    for warp, rows_below, step in product(range(4), (0, 8), range(groups)):
        touched = []
        for lane in range(LANES):
            thread = warp * LANES + lane
            row, column = warp * 16 + lane // 4, lane % 4 * 2
            moved, reversed_ = order(thread, words)
            half = words // 2
            at = swizzled(row, column + half * moved, words) + rows_below * words
            for bit, stride in enumerate((8, 16)[: groups // 2]):
                at += (step >> bit & 1) * stride * (-1 if reversed_[stride] else 1)
            group = step ^ (groups // 2) * moved
            assert at == swizzled(row + rows_below, column + 8 * group, words)
            touched.append((at % BANKS, (at + 1) % BANKS))
        # Eight bytes a lane go through in two halves of a warp.
        for lanes in (touched[:16], touched[16:]):
            assert set(Counter(bank for pair in lanes for bank in pair).values()) == {1}
