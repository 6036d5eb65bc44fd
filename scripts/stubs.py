"""Write generated/__init__.pyi, by which editors and type checkers know each kernel's call."""

import json
import textwrap
from pathlib import Path

from coda_agent import generated
from coda_agent.specs import Spec

_ROOT = Path(generated.__file__).parent
_HEAD = '''"""The types of accepted kernels, which `python scripts/stubs.py` writes."""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
from typing import Literal

from torch import Tensor

from coda_agent.runtime.kernel import Kernel
'''


def stubs() -> str:
    """Write the types of all accepted kernels."""
    return _HEAD + "".join(_kernel(getattr(generated, name).spec) for name in dir(generated))


def _kernel(spec: Spec) -> str:
    """Write a kernel's type: its call, and what it returns."""
    inputs = [f"{x}: {_type(spec, x)}," for x in spec.declared.inputs]
    static = [
        f"{x}: Literal[{', '.join(map(json.dumps, values))}] = ...,"
        for x, values in spec.parameters.items()
    ]
    lines = ["self,", *inputs, "*,", *static, "block_size: int | None = ...,"]
    count = len(spec.declared.outputs)
    result = f"tuple[{', '.join(['Tensor'] * count)}]" if count > 1 else "Tensor"
    call = f"def __call__(\n{textwrap.indent(chr(10).join(lines), '    ')}\n) -> {result}: ..."
    said = textwrap.fill(f'"""{spec.summary}"""', 96)
    body = textwrap.indent(f"{said}\n\n{call}", "    ")
    return f"\nclass _{spec.name}(Kernel):\n{body}\n\n{spec.name}: _{spec.name}\n"


def _type(spec: Spec, name: str) -> str:
    scalar = all(not shape for shape in spec.declared.inputs[name].shape.cases.values())
    return "Tensor | float" if scalar else "Tensor"


if __name__ == "__main__":
    (_ROOT / "__init__.pyi").write_text(stubs())
