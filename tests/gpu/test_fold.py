"""Folding partials on a GPU, the first time and by the launch that was kept."""

from __future__ import annotations

import pytest
import torch

from coda_agent.primitives.fold import fold, folding

pytestmark = pytest.mark.gpu

SHAPES = [(16, 1), (16, 2), (77, 16), (128, 17), (1000, 300), (1, 40), (3, 5, 7)]


def expected(raw: torch.Tensor, combine: str) -> torch.Tensor:
    raw = raw.double()
    if combine == "logsumexp":
        return raw.logsumexp(-1)
    if combine == "max":
        return raw.amax(-1)
    total = raw.sum(-1) * 0.25
    return total if combine == "add" else (total + 1e-3).rsqrt()


@pytest.mark.parametrize("combine", ["add", "max", "logsumexp", "rstd"])
def test_each_shape_and_layout_twice(combine: str) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    for _ in range(2):
        for shape in SHAPES:
            raw = torch.rand(*shape, generator=g, device="cuda")
            across = torch.rand(*reversed(shape), generator=g, device="cuda").permute(
                *reversed(range(len(shape)))
            )
            shifted = torch.rand(raw.numel() + 1, generator=g, device="cuda")[1:].view(shape)
            for given in (raw, across, shifted):
                got = fold(given, combine, 0.25, 1e-3)
                assert got.shape == shape[:-1]
                torch.testing.assert_close(
                    got.double(), expected(given, combine), rtol=1e-5, atol=1e-5
                )


def test_several_in_one_launch_twice() -> None:
    g = torch.Generator("cuda").manual_seed(0)
    ways = [("add", 0.25, 0.0), ("max", 1.0, 0.0), ("logsumexp", 1.0, 0.0), ("min", 1.0, 0.0)]
    layouts = (77, 3), (300, 5), (1000, 300), (16, 1)
    for _ in range(2):
        raws = [torch.rand(*shape, generator=g, device="cuda") for shape in layouts]
        raws[1] = raws[1].mT.contiguous().mT
        for t, raw, way in zip(folding(raws, ways)(raws), raws, ways, strict=True):
            assert torch.equal(t, fold(raw, *way))
            want = raw.double().amin(-1) if way[0] == "min" else expected(raw, way[0])
            torch.testing.assert_close(t.double(), want, rtol=1e-5, atol=1e-5)


def test_on_another_stream() -> None:
    stream = torch.cuda.Stream()
    raw = torch.rand(77, 16, device="cuda")
    want = fold(raw, "add", 1.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        raw += 1.0
        found = fold(raw, "add", 1.0)
    torch.cuda.synchronize()
    torch.testing.assert_close(found, want + 16.0)
