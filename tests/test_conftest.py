"""Tests of tests/conftest.py: what is drawn and what is left out is the same at each run."""

import random
import secrets
import zlib

import pytest
import torch


@pytest.fixture(scope="module")
def drawn() -> int:
    return secrets.randbits(62)


def test_what_is_drawn_follows_from_the_name_of_the_test(
    drawn: int, request: pytest.FixtureRequest
) -> None:
    name = request.node.nodeid
    assert drawn == random.Random(name.partition("::")[0]).getrandbits(62)
    assert secrets.randbits(62) == random.Random(name).getrandbits(62)
    assert random.random() == random.Random(name).random()
    seed = zlib.crc32(name.encode())
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", range(7))
def test_every_third_case_from_the_first_on_is_not_slow(
    case: int, request: pytest.FixtureRequest
) -> None:
    assert (request.node.get_closest_marker("slow") is None) is (case in (0, 3, 6))
