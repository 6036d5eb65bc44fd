"""The specs of a backward pass, and the PyTorch that calls their kernels one after the other."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coda_agent.agent.authors.composer.capture import capture
from coda_agent.agent.authors.composer.emit import emit
from coda_agent.agent.authors.composer.rewrite import rewrite
from coda_agent.agent.derive.kernel import Asked, Form, Kernel, Unfused, named
from coda_agent.agent.derive.scaling import scaled_first
from coda_agent.agent.derive.spelling import function
from coda_agent.agent.derive.steps import expanded, kernel
from coda_agent.primitives.errors import ProgramError, SpecError
from coda_agent.primitives.graph import Graph, Shape
from coda_agent.primitives.inspect import datasheet
from coda_agent.primitives.program import Program
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.resources import ColSum, RowMean, Tile, WideTile
from coda_agent.primitives.tables import Table
from coda_agent.specs import Spec
from coda_agent.specs.format import Draw
from coda_agent.specs.front_matter import Face, front_matter

WEIGHT_GRADIENT = "gemm_weight_gradient"
_DRAWN = Draw("normal", ("K**-0.5",))


@dataclass(frozen=True)
class Backward:
    """What was derived of a spec.

    Attributes:
        spec: The forward spec.
        binding: Its static parameters.
        asked: What was said of the layers around, as far as it was followed.
        files: Texts of specs, by name: the forward one that stores more, the backward kernel, the
            gradient of the weight.
        kernel: What the backward kernel computes.
        code: `backward(...)` in PyTorch, which calls the kernels by their names.
        notes: What was chosen and why, a sentence each.
        tables: Inputs that kernels here take as tiles, and how PyTorch makes those.
    """

    spec: Spec
    binding: Mapping[str, str]
    asked: Asked
    files: Mapping[str, str]
    kernel: Kernel
    code: str
    notes: tuple[str, ...]
    tables: Mapping[str, str]


def derive(spec: Spec, asked: Asked, binding: Mapping[str, str] | None = None) -> Backward:
    """The backward pass of one binding of `spec`.

    Raises:
        ProgramError: the forward cannot be expressed, or something has no derivative; says what.
        SpecError: a name in `asked` is not the spec's, or it has no such parameter.
    """
    bound = spec.bind(binding)
    outputs = [*asked.kept, *filter(None, (asked.into, asked.norm))]
    for names, known in ((outputs, spec.outputs), (asked.without, spec.inputs)):
        for name in (x for x in names if x not in known):
            raise SpecError(f"{spec.name} has no {name!r}; expected one of {', '.join(known)}")
    written = rewrite(capture(spec, bound))
    program = scaled_first(read_programs(emit(spec, [written]))[written.name])
    if asked.norm and (not asked.into or program.outputs[asked.norm] is not RowMean):
        raise SpecError(f"--norm {asked.norm} asks for --into, and for a row mean of squares")
    chosen, asked, notes = _chosen(program, spec, asked)
    return _Writer(spec, bound, program, asked, chosen, notes).backward()


def weight_gradient() -> str:
    """The spec of the gradient of any product's weight."""
    return Path(__file__).with_name("weight_gradient.md").read_text("utf-8")


def _chosen(program: Program, spec: Spec, asked: Asked) -> tuple[Kernel, Asked, list[str]]:
    """The form of the backward kernel, and why."""
    if asked.into:
        by = f"the product that brings the gradient of {asked.into}"
        try:
            found = kernel(program, spec, asked, Form.MERGED)
            if found.computes:
                return found, asked, [f"The backward is the epilogue of {by}."]
            reason = "nothing is left to compute"
        except Unfused as error:
            reason = error.message
        if asked.norm:
            raise ProgramError(f"the backward is no epilogue of {by}: {reason}")
        found, asked, notes = _chosen(program, spec, replace(asked, into=""))
        return found, asked, [f"The backward is no epilogue of {by}: {reason}.", *notes]
    apart = kernel(program, spec, asked, Form.ELEMENTWISE)
    if not apart.computes:
        return apart, asked, ["The product's gradient is one that is given."]
    try:
        again = kernel(program, spec, asked, Form.RECOMPUTED)
    except ProgramError as error:
        return apart, asked, [f"No kernel computes the product again: {error.message}."]
    m, n, k = (spec.bench_shapes[-1][d] for d in spec.gemm_dims)
    more = 2 * m * n * (apart.saved is not None)
    save, anew = bytes_of_tiles(apart, m, n) + more, bytes_of_tiles(again, m, n) + 2 * (m + n) * k
    peak = datasheet(2)
    slow, fast = save / peak.bytes_s, max(anew / peak.bytes_s, 2 * m * n * k / peak.flops_s)
    said = (
        f"at M = {m}, N = {n}, K = {k} an H200 takes {fast * 1e6:.0f} µs at least to compute the "
        f"product again and moves {anew / 1e6:.0f} MB; to save it takes {slow * 1e6:.0f} µs and "
        f"moves {save / 1e6:.0f} MB."
    )
    if fast < slow:
        return again, asked, [f"The product is computed again: {said}"]
    return apart, asked, [f"The product is saved, and the step is PyTorch's: {said}"]


def bytes_of_tiles(x: Kernel, m: int, n: int) -> int:
    """Bytes of its tiles."""
    widths = {Shape.TILE: 2, Shape.HALF: 1, Shape.WIDE: 4}
    stored = sum({Tile: 2, WideTile: 4}.get(kind, 0) for kind in x.kinds.values())
    return m * n * (stored + sum(widths.get(shape, 0) for shape in x.leaves.values()))


class _Writer:
    """The texts of one backward pass."""

    def __init__(
        self, spec: Spec, binding: Mapping[str, str], program: Program, asked: Asked,
        chosen: Kernel, notes: list[str],
    ) -> None:  # fmt: skip
        self.spec, self.binding, self.program, self.asked = spec, binding, program, asked
        self.chosen, self.notes = chosen, notes
        self.stem = spec.variant(binding).replace("__", "_")
        self.first, self.second = spec.gemm
        self.eight = spec.inputs[self.first].dtype.startswith("float8")
        self.saved = named(spec, "P")
        self.next = tuple(named(spec, x) for x in ("dY", "W"))
        self.tables = {
            name: expanded(kind, name, self.first, self.second)
            for name, kind in program.operands.items()
            if issubclass(kind, Table)
        }

    def backward(self) -> Backward:
        x, files, name = self.chosen, dict[str, str](), f"{self.stem}_bwd"
        head = ""
        if x.saved is not None:
            files[f"{self.stem}_fwd"] = self._forward(x.saved)
            self.notes.append(f"{self.stem}_fwd stores {self.saved} as well, 2·M·N bytes.")
        given: dict[str, str] = {}
        if x.form is Form.ELEMENTWISE:
            tile = next(n for n, s in x.leaves.items() if s not in (Shape.COL, Shape.SCALAR))
            columns = f"{tile}.shape[-1]"
            head = function(name, x.graph, x.leaves, x.kinds, [*x.leaves], tile, columns) + "\n\n"
        else:
            files[name] = self._spec(name)
            merged = x.form is Form.MERGED
            given = dict(zip("AB", self.next if merged else self.spec.gemm, strict=True))
        files[WEIGHT_GRADIENT] = weight_gradient()
        given |= {leaf: self._argument(leaf) for leaf in x.leaves}
        code = head + self._code(f"out = {name}({', '.join(f'{n}={g}' for n, g in given.items())})")
        if "torch." in code and not code.startswith("import torch"):
            code = f"import torch\n\n\n{code}"
        self._remark()
        return Backward(
            self.spec, self.binding, self.asked, files, x, code, tuple(self.notes), self.tables
        )  # fmt: skip

    def _remark(self) -> None:
        x = self.chosen
        if x.again:
            self.notes.append(
                f"{x.again} is computed again for the next weight's gradient: 2·M·N bytes fewer are"
                " kept, and as many are written."
            )
        if x.scale:
            self.notes.append(
                f"Rows of {x.target} are not scaled by {x.scale} yet: the product with "
                f"{self.second} scales its own, as --norm has it, and the gradient of {x.scale} is "
                "a row mean here."
            )
        if self.tables:
            listed = " and ".join(self.tables)
            self.notes.append(f"Kernels take {listed} as tiles here, 2·M·N bytes each.")

    def _code(self, call: str) -> str:
        """`backward` from the call of the kernel on."""
        x, a, b = self.chosen, self.first, self.second
        forward = [n for n in self.spec.inputs if n not in (a, b)]
        saved = [n for n in x.leaves if n == self.saved or n in self.spec.outputs]
        taken = [a, b, *forward, *saved, *(self.next if self.asked.into else ()), *x.leaves]
        own, scaled = f".to({x.target}.dtype)", f" * {x.scale}[:, None]" if x.scale else ""
        left, right = (f"{side}{own}" if self.eight else side for side in (b, a))
        left = f"({x.target} @ {left}){scaled}" if scaled else f"{x.target} @ {left}"
        right = f"({right}{scaled}){own}" if scaled else right
        body = [call, *(f'{o} = out["{o}"]' for o in x.kinds if o != x.again), "return {"]
        if x.form is Form.ELEMENTWISE and not self.eight:
            body[1] += f".to({a}.dtype)"
        body += [
            f'    "{a}": {left},',
            f'    "{b}": {x.target}.T @ {right},  # {WEIGHT_GRADIENT} adds it to .grad',
            *(f'    "{name}": {text},' for name, text in x.gradients.items()),
            "}",
        ]
        if self.asked.into:
            body.insert(0, f"# {self.next[0]} is the gradient of {self.asked.into} {self.next[1]}ᵀ")
        line = ", ".join(dict.fromkeys(taken))
        return f"def backward({line}):\n" + textwrap.indent("\n".join(body), "    ") + "\n"

    def _argument(self, leaf: str) -> str:
        """What the backward kernel is given: an index as a number, and a mean's gradient as that of
        each element."""
        known, output = self.spec.inputs.get(leaf), leaf.removeprefix("d")
        if leaf in self.tables:
            return self.tables[leaf]
        if known is not None:
            return f"{leaf}.float()" if known.dtype.startswith("int") else leaf
        if leaf == output or self.program.outputs.get(output) is not RowMean:
            return leaf
        graph = self.program.graph
        half = graph.nodes[graph.outputs[output]].shape is Shape.HALF
        return f"{leaf} / {self.second}.shape[0]" + " * 2" * half

    def _face(self, name: str, shape: Shape) -> Face:
        """An operand of the backward kernel."""
        dims = {
            Shape.COL: ("M",), Shape.ROW: ("N",), Shape.SCALAR: (), Shape.WIDE: ("M", "2*N"),
            Shape.TILE: ("M", "2*N" if self.chosen.half else "N"), Shape.HALF: ("M", "N"),
        }[shape]  # fmt: skip
        vector = shape in (Shape.COL, Shape.ROW)
        known = self.spec.inputs.get(name)
        if known is None:
            # z is drawn larger than it would be, so that a program without it shows.
            own = {"r": Draw("uniform", (0.5, 1.5)), "z": Draw("normal", (0.25,))}
            draw = (
                own.get(name.rstrip("_"), Draw("normal", (1,))) if vector else Draw("normal", (1,))
            )
            return Face(dims, "float32" if vector else "T", _drawn(draw))
        index = known.dtype.startswith("int")
        draw = Draw("integers", (0, "N")) if index else known.draw
        return Face(dims, "float32" if index or known.dtype == "float32" else "T", _drawn(draw))

    def _spec(self, name: str) -> str:
        """The backward kernel's spec."""
        x, n = self.chosen, self.spec.gemm_dims[1]
        merged = x.form is Form.MERGED
        inputs = {"A": Face(("M", "K"), "T", "normal")}
        inputs["B"] = Face(("K", "N") if merged else ("N", "K"), "T", _drawn(_DRAWN))
        inputs |= {leaf: self._face(leaf, shape) for leaf, shape in x.leaves.items()}
        shapes = {Tile: ("M", "N"), WideTile: ("M", "2*N"), ColSum: ("N",)}
        outputs = {
            o: Face(shapes.get(kind, ("M",)), "T" if kind in (Tile, WideTile) else "float32")
            for o, kind in x.kinds.items()
        }
        unit = max(16, self.spec.dims[n].multiple_of // (2 if x.half else 1))
        stream, update = self._stream(), ""
        if stream:
            update = (
                "parameters:\n  update: [in_place, out_of_place]\n"
                f"in_place: {{output: {x.target}, input: {stream}, when: {{update: in_place}}}}\n"
            )
        how = "the product computed again"
        words = [f"{x.target} is the gradient of {f'{x.scale} ⊙ ' * bool(x.scale)}A Bᵀ there."]
        if merged:
            how = "the product that brings its gradient"
            words[0] += f" Here A B is that of {self.asked.into}: B is the next weight."
        if self.asked.norm:
            words.append(
                f"r is rsqrt({self.asked.norm} + ε), and z the mean of a row of the next product "
                "times its gradient, over N."
            )
        block = function(
            "reference", x.graph, x.leaves, x.kinds, [*inputs, *(["update"] if stream else [])],
            "A", f"B.shape[{int(merged)}]", "(A @ B).float()" if merged else "(A @ B.T).float()",
        )  # fmt: skip
        return self._text(
            name, f"Backward of {self.spec.name}, with {how}.", {"M": 1, "N": unit, "K": 8},
            ("A", "B"), inputs, outputs, update, words, block,
        )  # fmt: skip

    def _stream(self) -> str:
        """The given gradient that the target is the sum of and may overwrite."""
        x = self.chosen
        top = x.graph.nodes[x.graph.outputs[x.target]]
        if x.form is not Form.MERGED or x.kinds[x.target] is not Tile or top.op != "add":
            return ""
        name = x.graph.nodes[top.args[1]].name
        once = sum(top.args[1] in n.args for n in x.graph.nodes) == 1
        return name if once and name in {f"d{o}" for o in self.program.outputs} else ""

    def _forward(self, saved: int) -> str:
        """The forward spec with one output more."""
        spec, (m, n, _) = self.spec, self.spec.gemm_dims
        forward = self.program.graph
        graph = Graph(forward.nodes, dict(forward.outputs) | {self.saved: saved}).prune()
        inputs, outputs = (
            {x: Face(spec.symbolic_shape(x, self.binding), tensors[x].dtype) for x in tensors}
            for tensors in (spec.inputs, spec.outputs)
        )
        inputs = {x: f._replace(draw=_drawn(spec.inputs[x].draw)) for x, f in inputs.items()}
        inputs |= {x: inputs[x]._replace(shape=(m, n)) for x in self.tables}
        outputs[self.saved] = Face((m, n), "T")
        a, b = spec.gemm
        own = ("T", spec.inputs[a].dtype)
        types = {x: f"torch.{f.dtype}" for x, f in outputs.items() if f.dtype not in own}
        product = f"{a}.float() @ {b}.float().T" if self.eight else f"({a} @ {b}.T).float()"
        block = function(
            "reference", graph, {x.name: x.shape for x in graph.nodes if x.op == "operand"},
            dict(self.program.outputs) | {self.saved: Tile}, [*inputs], a, f"{b}.shape[0]", product,
            "torch.bfloat16" if self.eight else "", types,
        )  # fmt: skip
        return self._text(
            f"{self.stem}_fwd", f"{spec.name} that also stores {self.saved} for its backward.",
            {x: dim.multiple_of for x, dim in spec.dims.items()}, spec.gemm, inputs, outputs, "",
            [], block,
        )  # fmt: skip

    def _text(
        self, name: str, summary: str, units: Mapping[str, int], gemm: Sequence[str],
        inputs: Mapping[str, Face], outputs: Mapping[str, Face], more: str, words: list[str],
        block: str,
    ) -> str:  # fmt: skip
        """A spec."""
        types = next(iter(self.spec.types.values()), ())
        first, second = gemm
        front = front_matter(name, summary, types, units, ([first], [second]), [], inputs, outputs)
        prose = "".join(f"{textwrap.fill(w, 120)}\n\n" for w in (f"# {summary[:-1]}", *words))
        return f"---\n{front}{more}---\n\n{prose}```python reference\n{block}```\n"


def _drawn(draw: Draw) -> str:
    """How values are drawn, as a spec says it."""
    listed = ", ".join(map(str, draw.args))
    forms = {"normal": f"{{normal: {{std: {listed}}}}}", "constant": f"{{constant: {listed}}}"}
    return forms.get(draw.kind, f"{{{draw.kind}: [{listed}]}}")
