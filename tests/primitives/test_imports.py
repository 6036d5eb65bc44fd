"""What quack imports only when it is called."""

import subprocess
import sys

import pytest

QUACK = """
import sys, torch
from coda_agent.primitives.imports import _Dynamo, import_quack
asked = []
torch.compile = lambda function, *, recompile_limit=8, **options: asked.append(function) or function
given = torch.compile, torch.compiler.disable
import_quack()
import coda_agent.primitives.stores
assert asked == [] and given == (torch.compile, torch.compiler.disable)
assert not {"torch._inductor", "torch._dynamo", "sympy"} & set(sys.modules)
assert "_dynamo" not in vars(torch)
torch.__dict__["_dynamo"] = _Dynamo("torch._dynamo")
assert torch._dynamo.config.recompile_limit > 0
assert torch._dynamo is sys.modules["torch._dynamo"]
from quack.blockscaled import quantize
x = torch.randn(4, 64).bfloat16()
for one, other in zip(quantize.to_mx_compiled(x), quantize.to_mx(x), strict=True):
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
quantize.to_mx_compiled(x)
assert asked == [quantize.to_mx_compiled.__wrapped__]
from quack import autotuner, gemm_config
from quack.gemm_runtime import torch_op
assert torch_op.default_config._dynamo_marked_constant
ran = []
autotuner.Autotuner.check_disk_cache(None, (), (), lambda: ran.append(0))
assert ran == [0]
"""


@pytest.mark.slow
def test_quack_asks_torch_compile_for_what_it_has_when_that_is_called() -> None:
    done = subprocess.run([sys.executable, "-c", QUACK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
