"""The launches of layers/kernels.py by Triton's interpreter against what they are in PyTorch; and
that they compile for Hopper."""

import os
import subprocess
import sys

import pytest

CHECK = """
import torch
from coda_agent.layers import kernels, passes

torch.manual_seed(0)


def same(mine, other, rounding):
    off = (mine.double() - other.double()).abs().max() / other.double().abs().max()
    assert mine.shape == other.shape and mine.is_contiguous() and off <= rounding, off


for kind, rounding in ((torch.float32, 1e-6), (torch.float16, 2**-10)):
    x = torch.randn(70, 200).to(kind)[:, :130]
    assert torch.equal(kernels.turned(x), passes.turned(x))
    rows, columns = 3, 2600
    grad, part, table = (torch.randn(rows, columns + 8).to(kind)[:, 8:] for _ in range(3))
    bias = torch.randn(columns).to(kind)
    for rotated in (table, None):
        for added in (bias, None):
            found = []
            for way in (kernels, passes):
                total, into = torch.ones(rows), torch.zeros(rows, columns + 16).to(kind)
                way.put_back(into[:, 16:], grad, part, rotated, added, total)
                assert not into[:, :16].any()
                found.append((into, total))
            same(found[0][0], found[1][0], rounding)
            same(found[0][1], found[1][1], 1e-4)
    logits = torch.randn(5, 2570) * 3
    logits[3] = float("nan")
    targets = torch.randint(0, 2570, (5,))
    logits[0, targets[0]] = 60.0  # nearly sure
    z, weights = logits.to(kind), torch.tensor([0.5, 1.0, 0.25, 0.0, 2.0])
    lse, mine, other = logits.logsumexp(-1), z.clone(), z.clone()
    totals = [w.logit_gradient(t, lse, targets, weights) for w, t in ((kernels, mine), (passes, other))]
    same(mine, other, rounding)
    same(*totals, 1e-5)
    wide = z.double().nan_to_num().requires_grad_()
    lost = torch.nn.functional.cross_entropy(wide, targets, reduction="none")
    (truth,) = torch.autograd.grad((lost * weights).sum(), wide)
    same(mine, truth, 2 * rounding)
print("the same")
"""
COMPILED = """
from types import SimpleNamespace
import torch
import triton
from coda_agent.layers import kernels
from coda_agent.primitives.fold import _absent

assert not kernels._launched(None, (1,), torch.empty(0))
seen = []


def warmed(kernel, grid, on, *args):
    seen.append(kernel.warmup(*args, grid=grid, num_warps=8).asm["cubin"])


kernels._launched = warmed
x = torch.empty(128, 256, dtype=torch.bfloat16, device="meta")
row, whole = torch.empty(128, device="meta"), torch.empty(128, dtype=torch.int64, device="meta")
with _absent():
    kernels.turned(x)
    kernels.put_back(x, x, x, x, None, row)
    kernels.logit_gradient(x, row, whole, row)
assert len(seen) == 3 and all(seen)
print("compiled")
"""


@pytest.mark.parametrize(("text", "interpret"), [(CHECK, "1"), (COMPILED, "0")])
@pytest.mark.sampled(0.3)
def test_they_are_what_they_are_in_pytorch(text: str, interpret: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run([sys.executable, "-c", text], env=env, text=True, capture_output=True)
    assert done.returncode == 0 and done.stdout.split()[-1] in ("same", "compiled"), done.stderr
