"""Specs of tests: what matters of each, within what every spec has."""

import re
from collections.abc import Mapping
from pathlib import Path

from coda_agent.specs import Spec, load_spec


def spec(
    body: str,
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    *,
    name: str = "probe",
    gemm: str = "[A, B]",
    header: str = "",
    arguments: str = "",
) -> Spec:
    """A spec whose reference has the lines of `body`, apart by "; " or a line's end.

    Args:
        inputs: Beside A [M, K] and B [N, K], if it is these that are multiplied.
        outputs: By default O [M, N].
        header: Further lines of the front matter.
        arguments: Of the reference; by default the inputs.
    """
    held = {"A": "[M, K]", "B": "[N, K]"} if gemm == "[A, B]" else {}
    inputs = {**held, **(inputs or {})}

    def listed(tensors: Mapping[str, str]) -> str:
        return "".join(f"  {x}: {said}\n" for x, said in tensors.items())

    lines = "".join(f"    {line}\n" for line in re.split("; |\n", body))
    philox = "from coda_agent.primitives.placed import philox\n" * ("philox(" in body)
    text = (
        f"---\nname: {name}\ngemm: {gemm}\ninputs:\n{listed(inputs)}"
        f"outputs:\n{listed(outputs or {'O': '[M, N]'})}{header}---\n"
        f"```python reference\nimport math\nimport torch\nimport torch.nn.functional as F\n{philox}\n\n"
        f"def reference({arguments or ', '.join(inputs)}):\n{lines}```\n"
    )
    return load_spec(Path(f"{name}.md"), text=text)
