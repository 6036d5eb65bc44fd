"""A kernel's spec and programs without some of their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coda_agent.primitives.errors import LaunchError, ProgramError
from coda_agent.primitives.program import Program
from coda_agent.specs import Spec


def without(
    spec: Spec, programs: Mapping[str, Program], outputs: Sequence[str]
) -> tuple[Spec, dict[str, Program]]:
    """Leave out these outputs, as `Kernel.without` does.

    It raises a LaunchError where there is no such output, one may overwrite an input, or what is
    left reads less than all inputs.
    """
    for o in outputs:
        if o not in spec.outputs:
            known = ", ".join(spec.outputs)
            raise LaunchError(f"{spec.name} has no output {o!r}, expected {known}")
        if spec.in_place and o == spec.in_place.output:
            whose = spec.in_place.input
            raise LaunchError(f"{spec.name}: {o} overwrites {whose}, so it cannot be left out")
    try:
        less = {v: program.without(outputs) for v, program in programs.items()}
    except ProgramError as error:
        message = f"{spec.name} without {' and '.join(outputs)} reads less: {error.message}"
        raise LaunchError(message, hint="another kernel computes what is left") from None
    left = {o: x for o, x in spec.outputs.items() if o not in outputs}
    declared = {o: x for o, x in spec.declared.outputs.items() if o not in outputs}
    header = spec.declared.model_copy(update={"outputs": declared})
    return spec.model_copy(update={"outputs": left, "declared": header}), less
