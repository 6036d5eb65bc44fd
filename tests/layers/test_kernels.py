"""The launches of layers/kernels.py by Triton's interpreter against what they are in PyTorch; and
that they compile for Hopper."""

import os
import subprocess
import sys

import pytest

CHECK = """
import torch
from coda_agent.layers import kernels, packing, passes

torch.manual_seed(0)


def same(mine, other, rounding):
    off = (mine.double() - other.double()).abs().max() / other.double().abs().max()
    assert mine.shape == other.shape and mine.is_contiguous() and off <= rounding, off


def heads(table, count, width):
    # As `packing.rotary_table` makes it: `count` heads alike, and nothing turned behind them.
    rest = torch.zeros_like(table[:, count * width :])
    rest[:, 0::2] = 1
    return torch.cat((table[:, :width].repeat(1, count), rest), dim=1)


for kind, rounding in ((torch.float32, 1e-6), (torch.float16, 2**-10)):
    x = torch.randn(70, 200).to(kind)[:, :130]
    assert torch.equal(kernels.turned([x]), x.T) and kernels.turned([x]).is_contiguous()
    for counts, places in (
        ((35, 35), ((0, 0, 35), (0, 35, 35))),
        ((48, 24, 12), ((0, 0, 12), (48, 0, 4), (72, 0, 0))),
    ):
        parts = [torch.arange(200.0 * n).view(n, 200).sin().to(kind)[:, :130] for n in counts]
        for one in (kernels, passes):
            assert torch.equal(one.turned(parts, places), kernels.packed(parts, places).T)

    rows, columns, width = 11, 1400, 48
    drawn = [torch.randn(rows, columns + 8).to(kind)[:, 8:] for _ in range(3)]
    grad, y, table = drawn
    bias = torch.randn(columns).to(kind)
    cases = [(table, None, (600, 1, 799)), (None, None, (columns,)), (None, (20, 48), (columns,))]
    for count in (0, 1, 20, 29):  # none, some of a part, one and some of the next, all that fit
        alike = heads(table, count, width)
        cases += [(alike, (count, width), sizes) for sizes in ((columns,), (480, 480, 440))]
    for turns, rotated, sizes in cases:
        parts = grad.split(sizes, dim=1)
        for given in (parts, [part.T.contiguous().T for part in parts]):
            for added in (bias, None):
                about = y, turns, rotated, added, 64
                mine, other = (way.put_back(given, *about) for way in (kernels, passes))
                same(mine[0], other[0], rounding)
                same(mine[1], other[1], 1e-4)
    wide = y.double().requires_grad_()  # what gave the rotated y, turned back
    lone = heads(table, 20, width)
    cos, sin = lone.double().unflatten(-1, (-1, 2)).unbind(-1)
    even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2)
    (truth,) = torch.autograd.grad(turned, wide, grad.double())
    same(kernels.put_back([grad], y, lone, (20, width), None, 1)[0], truth, 2 * rounding)

    for columns in (2570, 16400):
        logits = torch.randn(6, columns) * 3
        logits[3] = float("nan")
        logits[4] -= 300.0  # its log-sum-exp is far from 0
        logits[5, ::3] = float("-inf")
        targets = torch.randint(0, columns // 3, (6,)) * 3 + 1
        logits[0, targets[0]] = 60.0  # nearly sure
        weights = torch.tensor([0.5, 1.0, 0.25, 0.0, 2.0, 1.0])
        z, lse = logits.to(kind), logits.logsumexp(-1)
        for third in (-1, columns, int(targets[2])):  # no column: nothing is written beside the row
            targets[2] = third
            mine, other, given = z.clone(), z.clone(), (lse, targets, weights)
            totals = [w.logit_gradient(t, *given) for w, t in ((kernels, mine), (passes, other))]
            same(mine, other, rounding)
            same(*totals, 1e-5)
        wide = z.double().where(weights[:, None] > 0, 0).requires_grad_()
        lost = torch.nn.functional.cross_entropy(wide, targets, reduction="none")
        (truth,) = torch.autograd.grad((lost * weights).sum(), wide)
        same(mine, truth, 2 * rounding)
        assert not mine[3].any() and totals[0][3] == 0

    packing.on = lambda _: kernels
    packing._together = lambda *_: False
    plain = packing.interleave, packing.pack_qkv
    f, (q, k, v) = 37, (48, 24, 12)
    for name, counts, about in (
        ("interleave", (f, f), ()),
        ("pack_qkv", (q, k, v), ([2, 3],)),
        ("pack_qkv", (q, k, v), (None,)),
    ):
        weights = [torch.randn(n, 1100).to(kind)[:, :1050].requires_grad_() for n in counts]
        found = []
        for by_launch in (True, False):
            packing._together = lambda *_: by_launch
            packed = getattr(packing, name)(*weights, *about)
            parts, places = packing.made_of(packed)
            if by_launch and about != (None,):
                assert all(map(torch.equal, parts, weights))
                assert torch.equal(passes.turned(parts, places), packed.T)
            else:
                assert parts[0] is packed and places is None
            grad = torch.arange(packed.numel()).view(packed.shape).to(kind)
            found.append([packed, *torch.autograd.grad(packed, weights, grad)])
        assert all(map(torch.equal, *found))
        assert all(t.is_contiguous() for t in found[0])
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


def warmed(kernel, grid, on, *args, warps=8):
    seen.append(kernel.warmup(*args, grid=grid, num_warps=warps).asm["cubin"])


kernels._launched = warmed
x = torch.empty(128, 256, dtype=torch.bfloat16, device="meta")
row, whole = torch.empty(128, device="meta"), torch.empty(128, dtype=torch.int64, device="meta")
with _absent():
    kernels.turned((x, x), ((0, 0, 64), (128, 0, 0)))
    kernels.put_back(x.split((128, 64, 64), 1), x, x, (3, 64), None, 256)
    kernels.logit_gradient(x, row, whole, row)
    kernels.unpacked(x, (64, 64), ((0, 0, 64), (0, 64, 64)))
assert len(seen) == 4 and all(seen)
print("compiled")
"""


@pytest.mark.parametrize(("text", "interpret"), [(CHECK, "1"), (COMPILED, "0")])
@pytest.mark.one_in(2)
def test_they_are_what_they_are_in_pytorch(text: str, interpret: str) -> None:
    checked(text, interpret)


def checked(text: str, interpret: str) -> None:
    """Run a text that ends by saying what was shown, in a process of Triton's interpreter or not."""
    env = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run([sys.executable, "-c", text], env=env, text=True, capture_output=True)
    assert done.returncode == 0 and done.stdout.split()[-1] in ("same", "compiled"), done.stderr
