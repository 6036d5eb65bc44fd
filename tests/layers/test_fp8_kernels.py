"""The launches of layers/fp8_kernels.py by Triton's interpreter against what they are in PyTorch; and
that they compile for Hopper."""

import pytest

from tests.layers.test_kernels import checked

CHECK = """
import torch
from coda_agent.layers import fp8_kernels, fp8_products

torch.manual_seed(0)
# Triton's interpreter does not round to e4m3 as a GPU does: quotients are taken before that.
fp8_kernels._E4M3 = torch.float32


def same(mine, other):
    (values, scale), (found, of) = mine, other
    assert values.shape == found.shape and scale.shape == of.shape
    torch.testing.assert_close(scale, of, rtol=1e-6, atol=0)
    codes = [v.to(torch.float8_e4m3fn).view(torch.uint8).int() for v in (values, found)]
    # A quotient that is a tie may be rounded either way: to a neighbour, whose code is the next.
    off = (codes[0] - codes[1]).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 0.01


for columns in (16, 272, 2600):
    x = (torch.randn(5, columns + 8) * torch.logspace(-4, 4, 5)[:, None]).bfloat16()[:, :columns]
    x[1] = 0
    s, times = torch.rand(5), torch.tensor(0.3)
    for options in ((None, None, None), (s, None, times), (s, 1e-5, None), (None, None, times)):
        same(fp8_kernels.rows(x, *options), fp8_products.rows(x, *options))
    for weight in (x, -x.abs(), x.abs(), x * 0):
        same(fp8_kernels.whole(weight, *weight.aminmax()), fp8_products.whole(weight))
assert fp8_kernels.rows(x[:0], None, None, None)[0].shape == (0, 2600)
bad = x.clone()
bad[2, 7] = float("nan")
for values, _ in (fp8_kernels.rows(bad, None, None, None), fp8_kernels.whole(bad, *bad.aminmax())):
    assert values[2, 7].isnan()
print("the same")
"""
COMPILED = """
import torch
from coda_agent.layers import fp8_kernels
from coda_agent.primitives.fold import _absent

seen, kernel = [], fp8_kernels._quantise


class Warmed:
    def __getitem__(self, grid):
        return lambda *args, **options: seen.append(kernel.warmup(*args, grid=grid, **options))


fp8_kernels._quantise = Warmed()
torch.cuda.device_of = lambda _: torch.device("meta")
with _absent():
    for columns in (256, 8192, 28672):
        x = torch.empty(128, columns, dtype=torch.bfloat16, device="meta")
        row, one = torch.empty(128, device="meta"), torch.empty((), device="meta")
        fp8_kernels.rows(x, None, None, None)
        fp8_kernels.rows(x, row, None, one)
        fp8_kernels.rows(x, row, 1e-5, None)
        fp8_kernels.whole(x, x[0, 0], x[0, 0])
assert len(seen) == 12 and all(k.asm["cubin"] and "e4m3x2" in k.asm["ptx"] for k in seen)
print("compiled")
"""


@pytest.mark.parametrize(("text", "interpret"), [(CHECK, "1"), (COMPILED, "0")])
@pytest.mark.one_in(2)
def test_they_are_what_they_are_in_pytorch(text: str, interpret: str) -> None:
    checked(text, interpret)
