"""From a spec's text to a checked `Spec`, or its first fault."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from coda_agent.primitives.errors import SpecError
from coda_agent.primitives.objects import text_of
from coda_agent.specs.canonical import canonical
from coda_agent.specs.defaults import completed
from coda_agent.specs.faults import declared_faults, faults
from coda_agent.specs.format import Dim, Header, InPlace, Input, Output, Spec, Tolerance
from coda_agent.specs.layout import shown

_FRONT = re.compile(r"---[ \t]*\n(.*?)^---[ \t]*\n", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"^```python reference[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


def load_spec(path: Path | str, *, text: str | None = None) -> Spec:
    """Read and check a spec; with `text`, `path` only names it.

    Raises:
        SpecError: Unreadable, malformed or contradictory; names the file and the first fault.
    """
    path = Path(path)
    text = text_of(path, "expected a spec in Markdown", SpecError) if text is None else text
    try:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        front, prose, source, line = _split(text)
        header = _header(front)
        header = header.model_copy(update=completed(header, source))
        for fault in declared_faults(header):
            raise ValueError(fault)
        changed, layout = canonical(header)
        spec = Spec(
            **{**{name: getattr(header, name) for name in Header.model_fields}, **changed},
            declared=header,
            layout=layout,
            path=path,
            text=text,
            prose=prose,
            reference_source=source,
            reference_line=line,
            digest=f"sha256:{hashlib.sha256(text.encode()).hexdigest()}",
        )
        for fault in faults(spec):
            raise ValueError(fault)
    except (ValueError, SpecError) as error:
        raise SpecError(f"{path}: {error}") from None
    return spec


def _split(text: str) -> tuple[str, str, str, int]:
    """Split off front matter, prose, reference and the reference's first line."""
    front = _FRONT.match(text)
    if not front:
        raise ValueError("no front matter; expected YAML between two `---` lines at the top")
    blocks = list(_BLOCK.finditer(text, front.end()))
    if len(blocks) != 1:
        raise ValueError(f"expected one closed ```python reference block, found {len(blocks)}")
    block = blocks[0]
    prose = text[front.end() : block.start()] + text[block.end() :]
    return front[1], prose.strip() + "\n", block[1], text.count("\n", 0, block.start(1)) + 1


# With libyaml a spec takes 0.4 ms and not 2.6.
_Base: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class _Loader(_Base):
    """YAML in which a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        for key, count in Counter(str(key.value) for key, _ in node.value).items():
            if count > 1:
                fault = f"key {key!r} is given {count} times"
                raise yaml.MarkedYAMLError(problem=fault, problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _header(front: str) -> Header:
    try:
        return Header.model_validate(_read_yaml(front))
    except ValidationError as error:
        raise ValueError(_first(error, front)) from None


def _read_yaml(front: str) -> dict[str, Any]:
    try:
        data = yaml.load(front, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        line = f"line {mark.line + 2}: " if mark else ""
        raise ValueError(f"{line}front matter is not YAML: {reason}") from None
    if not isinstance(data, dict):
        raise ValueError(f"front matter is a {type(data).__name__}; expected keys and values")
    return data


_EXPECTED = {
    "string": "text",
    "literal": "one of ",
    "float": "a number",
    "int": "a whole number",
    "tuple": "a list",
    "dict": "keys and values",
    "model": "keys and values",
}
"""What is expected where pydantic says that it is not, by the first word of its error's type."""
_WITHIN = {
    "dims": Dim, "inputs": Input, "outputs": Output, "in_place": InPlace, "tolerance": Tolerance
}  # fmt: skip
_FORMS = {
    "gemm": "[A, B]", "inputs": "{A: [M, K], B: [N, K]}", "outputs": "{D: [M, N]}",
    "shape": "[M, N]", "multiple": "2.0",
}  # fmt: skip
"""What is expected where a key is missing, if not a name."""


def _first(error: ValidationError, front: str) -> str:
    # A misspelt key is also a missing one; the misspelling is what the reader must see.
    faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    fault = faults[0]
    where = ".".join(str(part) for part in fault["loc"] if part != "[key]")
    line = f"line {_line(front, fault['loc'])}: "
    context = fault.get("ctx", {})
    if fault["type"] == "extra_forbidden":
        model = _WITHIN[str(fault["loc"][0])] if len(fault["loc"]) > 1 else Header
        return f"{line}unknown key {where!r}; expected {', '.join(model.model_fields)}"
    if fault["type"] == "missing":
        key = fault["loc"][-1]
        return f"missing key {where!r}; expected {key}: {_FORMS.get(str(key), 'NAME')}"
    if fault["type"] == "value_error":
        return f"{line}{where}: {context['error']}"
    if fault["type"] in ("too_short", "too_long"):
        bound = "at most {max_length}" if "max_length" in context else "at least {min_length}"
        return f"{line}{where}: expected {bound}, got {{actual_length}}".format(**context)
    expected = _EXPECTED.get(fault["type"].partition("_")[0], "")
    expected += str(context.get("expected", ""))
    for bound, words in (("gt", "a number greater than"), ("ge", "a number of at least")):
        expected = f"{words} {context[bound]:g}" if bound in context else expected
    return f"{line}{where}: expected {expected}, got {shown(fault['input'])}"


def _line(front: str, loc: tuple[int | str, ...]) -> int:
    """Find the line on which a value of the front matter begins."""
    node = yaml.compose(front, _Loader)
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            found = [value for key, value in node.value if key.value == str(part)]
        else:
            found = node.value[part : part + 1] if isinstance(part, int) else []
        if not found:
            break
        node = found[0]
    return node.start_mark.line + 2
