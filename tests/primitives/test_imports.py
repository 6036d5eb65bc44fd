"""What quack imports only when it is called."""

import subprocess
import sys

QUACK = """
import sys, torch
from coda_agent.primitives.imports import import_quack
asked = []
torch.compile = lambda function, *, recompile_limit=8, **options: asked.append(function) or function
given = torch.compile
import_quack()
import coda_agent.primitives.stores
assert asked == [] and torch.compile is given
assert "torch._inductor.compile_fx" not in sys.modules
from quack.blockscaled import quantize
x = torch.randn(4, 64).bfloat16()
for one, other in zip(quantize.to_mx_compiled(x), quantize.to_mx(x), strict=True):
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
quantize.to_mx_compiled(x)
assert asked == [quantize.to_mx_compiled.__wrapped__]
"""


def test_quack_asks_torch_compile_for_its_quantisers_when_they_are_called() -> None:
    done = subprocess.run([sys.executable, "-c", QUACK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
