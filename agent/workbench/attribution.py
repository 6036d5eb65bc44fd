"""Why a kernel takes its time: it without each of its parts.

A part is an output, an operand or a statistic of groups. What a kernel gains without one is what
that one costs, with all that it alone needs. It asks for no right to hardware counters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from coda_agent.agent import execution
from coda_agent.agent.execution.answers import Ok, Refused, answered, read_answer
from coda_agent.agent.execution.child import Child, ChildError, serve
from coda_agent.agent.execution.device import environment, exclusive
from coda_agent.agent.judge.job import CompileJob
from coda_agent.agent.judge.records import JsonObject, Timed
from coda_agent.agent.judge.samples import Samples, different, speedup
from coda_agent.agent.workbench.feedback import resources
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import CodaError, CompileError, MachineError
from coda_agent.primitives.graph import Graph, Node, Shape, Value
from coda_agent.primitives.groups import spans
from coda_agent.primitives.objects import use_cache
from coda_agent.primitives.pairwise import pairs
from coda_agent.primitives.program import Program, finish
from coda_agent.primitives.ptx import operation
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.tiles import TileConfig
from coda_agent.specs import Spec, draw_inputs, load_spec

WHOLE, PRODUCT = "the kernel", "product"
ROUNDS = 20
_LIMIT_S = 300.0
LEVERS = {
    "output": "store less of it: a narrower kind or type, or what a reader can compute again",
    "operand": "read less: a vector for a tile, or what acc, column_index and row_index give",
    "group": "a narrower group, one statistic for two, or its argument in a cheaper form",
    "rest": "order and form: use a value soon after it is made, so that fewer are alive (inspect "
    "what=tiles shows what spills), and write cheaper operations",
}  # fmt: skip
"""What the language lets an author change, by what costs most."""


def parts(program: Program) -> dict[str, Program]:
    """Take each part away from a program; and its bare product."""
    groups = dict.fromkeys(program.graph.nodes[i].op for i in spans(program.graph))
    wanted: dict[str, Callable[[], Program]] = {PRODUCT: lambda: _product(program)}
    if len(program.outputs) > 1:
        for o in program.outputs:
            wanted[f"output {o}"] = lambda o=o: _without(program, output=o)
    for name in program.operands:
        wanted[f"operand {name}"] = lambda name=name: _without(
            program, lambda node: node.name == name
        )
    for op in groups:
        wanted[op] = lambda op=op: _without(program, lambda node: node.op == op)
    found = dict[str, Program]()
    for part, make in wanted.items():
        try:
            made = make()
        except CodaError:  # what is left is no program
            continue
        if made.digest != program.digest:
            found[part] = made
    return found


def _without(
    program: Program, gone: Callable[[Node], bool] = lambda _: False, output: str = ""
) -> Program:
    """The program without an output, or nodes: operands become 1, operations arguments.

    What only an operand that is gone was computed with goes, too.
    """
    graph, values = Graph(), list[Value]()
    for node in program.graph.nodes:
        args = [values[a] for a in node.args]
        left_over = node.shape is not Shape.SCALAR and all(a.shape is Shape.SCALAR for a in args)
        if gone(node) or (args and left_over):
            values.append(args[0] if args else graph.const(1.0))
        else:
            values.append(operation(node.op).call(*args) if args else graph.add(node))
    left = {o: values[i] for o, i in program.graph.outputs.items() if o != output}
    return _closed(program, graph, left)


def _product(program: Program) -> Program:
    """The product alone, stored as the first output that can take it."""
    kinds = sorted(program.outputs.items(), key=lambda item: issubclass(item[1], Reduction))
    for name, kind in kinds:
        graph = Graph()
        acc = graph.add(Node("acc", (), Shape.TILE))
        if Shape.TILE in kind.values:
            return _closed(program, graph, {name: acc})
        if Shape.HALF in kind.values:
            return _closed(program, graph, {name: pairs(acc)[0]})
    raise CodaError(f"{program.name} stores nothing of the product's shape")


def _closed(program: Program, graph: Graph, outputs: Mapping[str, Value]) -> Program:
    """A program of these outputs, with the operands that they read."""
    live = Graph(graph.nodes, {o: value.index for o, value in outputs.items()}).prune()
    read = {node.name for node in live.nodes}
    kinds = {o: kind for o, kind in program.outputs.items() if o in outputs}
    operands = {o: kind for o, kind in program.operands.items() if o in read}
    return finish(replace(program, operands=operands, outputs=kinds, graph=graph), dict(outputs))


def said(samples: Mapping[str, Samples], floor_us: float) -> str:
    """Say what a time is made of, and what could shorten it.

    Raises:
        MachineError: the whole kernel has no times.
    """
    whole = samples[WHOLE].median_us
    costs, little = dict[str, float](), list[str]()
    for part, found in samples.items():
        if part in (WHOLE, PRODUCT) or found.fault:
            continue
        gained = whole - found.median_us
        if gained > 0 and different(speedup(found, samples[WHOLE])):
            costs[part] = gained
        else:
            little.append(part)
    terms = [(part, us) for part, us in sorted(costs.items(), key=lambda item: -item[1])]
    if PRODUCT in samples and not samples[PRODUCT].fault:
        terms = [(PRODUCT, samples[PRODUCT].median_us), *terms]
    costs["rest"] = whole - sum(us for _, us in terms)
    made = " + ".join(f"{part} {us:.0f}" for part, us in terms)
    sign, name = ("-", "shared") if costs["rest"] < 0 else ("+", "rest")
    line = f"{whole:.0f} us = {made} {sign} {name} {abs(costs['rest']):.0f}; floor {floor_us:.0f}"
    line += f"\nwithin the noise: {', '.join(little)}" * bool(little)
    most = max(costs, key=costs.__getitem__)
    lever = LEVERS.get(most.partition(" ")[0], LEVERS["group"])
    return f"{line}\ncosts most: {most}. To try: {lever}" if costs[most] > 0 else line


def attributed(spec: Spec, program: Program, cell: Timed) -> str:
    """Time a program and its parts on a GPU, in one cell.

    Raises:
        CompileError: the program does not compile.
        MachineError: the GPU did not answer, or its clocks disagree.
    """
    wanted = {WHOLE: program, **parts(program)}
    jobs = [CompileJob.of(p, cell.config, "sm_90a", spec, cell.dtype) for p in wanted.values()]
    built = execution.executor().map(jobs, lambda *_: None)
    if isinstance(built[0], CompileError):
        raise built[0]
    kept = {
        part: wanted[part].to_dict()
        for part, object in zip(wanted, built, strict=True)
        if not isinstance(object, CompileError)
    }
    work = {
        "spec": str(spec.path), "programs": kept, "tile": cell.config.to_dict(),
        "sizes": cell.sizes, "element": cell.dtype,
    }  # fmt: skip
    with exclusive([execution.hopper()]) as gpu:
        child = Child(__name__, environment=environment(gpu))
        try:
            answer = read_answer(child.call(work, timeout_s=_LIMIT_S))
        except ChildError as error:
            raise MachineError(f"the timing of its parts was lost: {error.detail}") from error
        finally:
            child.close()
    match answer:
        case Ok(result=times):
            samples = {part: _samples(*found) for part, found in times.items()}
            return f"{said(samples, cell.floor_us)}\n{resources(built[0])}"
        case Refused() as refused:
            raise refused.raised()
    raise MachineError(f"the timing of its parts answered {answer.kind}")


def _samples(times: Sequence[float], fault: str, rounds: Sequence[int]) -> Samples:
    return Samples(tuple(times), fault=fault, rounds=tuple(rounds))


def _times(work: JsonObject) -> JsonObject:
    """Body of the process on the GPU: each program's samples."""
    from coda_agent.agent.judge.machine import require_idle
    from coda_agent.agent.judge.timing import Contender, interleave
    from coda_agent.agent.judge.tuner import Launched

    use_cache()
    require_idle()
    spec = load_spec(Path(work["spec"]))
    binding = spec.bindings()[0]
    types = dict.fromkeys(spec.types, str(work["element"]))
    inputs = [
        draw_inputs(spec, work["sizes"], types, seed=seed, device="cuda", binding=binding)
        for seed in range(2)
    ]
    dtypes = {o: getattr(torch, spec.dtype_of(o, types)) for o in spec.outputs}
    config = TileConfig(**work["tile"])
    runs = {
        part: Launched(spec, Program.from_dict(data), inputs, dtypes, config)
        for part, data in work["programs"].items()
    }
    found = interleave({part: Contender(x, x.restore) for part, x in runs.items()}, ROUNDS)
    return {part: (s.times_us, s.fault, s.rounds) for part, s in found.items()}


if __name__ == "__main__":
    serve(lambda work, _: answered(lambda: _times(work)).model_dump())
