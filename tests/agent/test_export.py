"""Exports: one kernel in one tile, loaded where nothing of this package can be imported."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from coda_agent.agent.cli import app
from coda_agent.agent.export import objects
from coda_agent.agent.export import repository as repository_module
from coda_agent.agent.export.inspection import inspected
from coda_agent.agent.export.objects import Wanted, choose
from coda_agent.agent.export.repository import write
from coda_agent.agent.workspace import Kernel, run_git
from coda_agent.generated import (
    gemm_bias_act,
    gemm_residual_partial_rmsnorm,
    gemm_residual_partial_rmsnorm_bwd,
    gemm_swiglu,
)
from coda_agent.primitives.errors import CodaError

GENERATED = Path(__file__).parents[2] / "generated"
H200 = "NVIDIA H200"
ONE = Wanted(H200, 1, ("bfloat16",))
NAMES = "gemm_swiglu", "gemm_residual_partial_rmsnorm"
KERNELS = [Kernel(name, GENERATED / name) for name in NAMES]

# Loads a repository as `kernels` does, in a process without quack, the DSL, Triton and this package.
LOAD = """
import importlib.util, sys
from pathlib import Path
# As if they were not installed: torch's builds for CUDA ask for Triton, and do without.
blocked = "quack", "cutlass", "nvidia_cutlass_dsl", "triton", "coda_agent"
sys.modules.update(dict.fromkeys(blocked))
import torch
folder = Path(sys.argv[1])
spec = importlib.util.spec_from_file_location("exported", folder / "__init__.py")
module = sys.modules["exported"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "kernels"
    write(KERNELS, out, ONE)
    return out


@pytest.fixture(scope="module")
def variant(repository: Path) -> Path:
    return next((repository / "build").glob("*cu130*"))


def run(folder: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LOAD + code, str(folder)], capture_output=True, text=True, timeout=60
    )
    return done.stdout or done.stderr.strip().splitlines()[-1]


def test_the_layout_is_that_of_a_kernel_repository(repository: Path, variant: Path) -> None:
    names = {path.name for path in (repository / "build").iterdir()}
    assert {name.split("-cu")[1] for name in names} == {"128-x86_64-linux", "130-x86_64-linux"}
    assert all(name.startswith("tvm-ffi0") for name in names)
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["python-depends"] == ["tvm-ffi"]
    assert metadata["backend"] == {"type": "cuda", "archs": ["9.0a"]}
    assert metadata["digest"]["algorithm"] == "sha256"
    found = {
        str(path.relative_to(variant)): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in variant.rglob("*")
        if path.is_file() and path.name != "metadata.json"
    }
    assert metadata["digest"]["files"] == found
    evidence = GENERATED / "gemm_swiglu" / "evidence.json"
    assert (variant / "kernels/gemm_swiglu/evidence.json").read_bytes() == evidence.read_bytes()
    page = (repository / "README.md").read_text()
    assert "passed: static, compile, numerics, performance)" in page and "4096×4096×4096" in page


def test_exporting_twice_gives_equal_bytes(repository: Path) -> None:
    def everything() -> dict[str, bytes]:
        files = (path for path in repository.rglob("*") if path.is_file())
        return {str(path.relative_to(repository)): path.read_bytes() for path in files}

    before = everything()
    write(KERNELS, repository, ONE)
    assert everything() == before
    assert [*repository.parent.iterdir()] == [repository]


def test_doctor_says_what_was_exported_for_what_and_how_it_is_loaded(repository: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--exports", str(repository.parent)])
    assert done.exit_code == 0
    head, *lines, _, end = done.stdout.splitlines()
    assert re.split(r"  +", head)[:3] == ["kernel", "level", "tiles"]
    assert end == "1 of 1 exports are intact"
    for name, line in zip(NAMES, lines, strict=True):
        evidence = json.loads((GENERATED / name / "evidence.json").read_text())
        day = evidence["date"][:10]
        load = f'get_local_kernel(Path("{repository}")).{name}'
        machine = evidence["machine"]["gpu"]
        said = f"{evidence['level']} {day}, {machine}", f"tiles for {H200}", "sm_90a", "bfloat16"
        assert re.split(r"  +", line) == [name, *said, "intact", load]
    found = inspected(repository)
    assert found["id"] == json.loads(next(repository.rglob("metadata.json")).read_text())["id"]
    assert found["variants"] == sorted(path.name for path in (repository / "build").iterdir())


def test_provenance_says_of_every_kernel_whether_it_is_committed(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
        (folder / "kernel.py").touch()
    author = "-c", "user.name=a", "-c", "user.email=a@b"
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)

    def said() -> Any:
        return repository_module._metadata({}, ONE, folders)["provenance"]["kernel"]

    commit = run_git(tmp_path, "rev-parse", "HEAD").decode().strip()
    assert said() == {"commit": commit, "dirty": False}
    (folders[1] / "kernel.py").write_text("changed")
    assert said() == {"commit": commit, "dirty": True}


def test_documentation_says_what_is_chosen_and_what_is_overwritten() -> None:
    for kernel, lines in (
        (gemm_swiglu, []),
        (gemm_bias_act, [
            "activation: 'gelu_tanh' or 'relu' or 'silu', by default the first",
            "bias_per: 'column' or 'row', by default the first",
        ]),
        (gemm_residual_partial_rmsnorm_bwd, [
            "update: 'in_place' or 'out_of_place', by default the first",
            "O overwrites X where update='in_place'",
        ]),
    ):  # fmt: skip
        text = objects._documentation(kernel, ["bfloat16"])
        *_, parameters = text.partition("\n\nParameters:\n")
        assert [x.strip() for x in parameters.splitlines()[: len(lines)]] == lines
        assert text.startswith((kernel.__doc__ or "no").partition("\n\nSizes:")[0])
        assert "Sizes:" in text and "Gradients:" not in text and ".without(" not in text
        assert text.endswith("\n\nExported types of A: bfloat16")


def _another_id(path: Path) -> None:
    path.write_text(path.read_text().replace("_cuda_", "_cuda_0"))


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("objects/*.so", lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
         "is not what was exported: its SHA-256 differs"),
        ("kernels/gemm_swiglu/spec.md", Path.unlink, "cannot be read: No such file or directory"),
        ("kernels.json", lambda path: path.write_text("{"), "is not what was exported: its SHA-256 differs"),
        ("metadata.json", Path.unlink, "cannot be read: No such file or directory"),
        ("metadata.json", _another_id, "has digests that are not those of its id"),
        ("metadata.json", lambda path: path.write_text("[]"), "is not of a form that is known"),
    ],
)  # fmt: skip
def test_doctor_names_the_file_that_is_damaged(
    repository: Path, tmp_path: Path, name: str, damage: Any, said: str
) -> None:
    shutil.copytree(repository, copy := tmp_path / "copy")
    damage(path := next(copy.glob(f"build/*/{name}")))
    done = CliRunner().invoke(app, ["doctor", "--exports", str(repository), str(copy)])
    assert done.exit_code == 2
    _, *lines, fault, _, end = done.stdout.splitlines()
    assert end == "1 of 2 exports are intact"
    assert (str(path) in fault or str(path.parent) in fault) and said in fault
    assert [line.split()[0] for line in lines] == [*NAMES] * 2
    assert all("intact" in x for x in lines[:2]) and all("damaged" in x for x in lines[2:])


def test_doctor_finds_no_export_where_there_is_none(tmp_path: Path) -> None:
    for arguments, said in (
        (["--exports", str(tmp_path)], f"{tmp_path} is no export, and holds none"),
        ([str(tmp_path)], f"{tmp_path} is looked at with --exports"),
    ):
        done = CliRunner().invoke(app, ["doctor", *arguments])
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {said}") and done.stderr.count("\n") == 1


def test_what_is_no_export_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(CodaError, match="is not empty and holds no export"):
        write([Kernel("gemm_swiglu", GENERATED / "gemm_swiglu")], tmp_path, ONE)
    assert (tmp_path / "mine").read_text() == "kept"


@pytest.mark.parametrize("place", ["/proc/x", "/proc/x/y", "/dev/null/x"])
def test_what_cannot_be_written_is_refused_before_it_is_compiled(place: str) -> None:
    kernels = [Kernel("gemm_swiglu", GENERATED / "gemm_swiglu")]
    with pytest.raises(
        CodaError, match=f"^{place} cannot be written: .* \\(name another --out\\)$"
    ):
        write(kernels, Path(place), ONE, lambda *_: pytest.fail("it compiles"))


def test_torch_and_tvm_ffi_alone_load_it_trace_it_and_compile_it(variant: Path) -> None:
    said = run(
        variant,
        """
import tvm_ffi
print(module.__all__, tvm_ffi.load_module(str(next(folder.glob("objects/*.so"))))["func"])
from torch._subclasses.fake_tensor import FakeTensorMode
def call(a, b):
    return module.gemm_swiglu(a, b)
with FakeTensorMode():
    a = torch.empty(4, 64, 128, dtype=torch.bfloat16, device="cuda")
    b = torch.empty(256, 128, dtype=torch.bfloat16, device="cuda")
    print([(tuple(t.shape), str(t.dtype)) for t in call(a, b)])
    graph = torch.fx.experimental.proxy_tensor.make_fx(call)(a, b)
print([str(node.target).split(".")[1:] for node in graph.graph.nodes if "gemm" in str(node.target)])
a = torch.zeros(64, 128, dtype=torch.bfloat16, requires_grad=True)
b = torch.zeros(256, 128, dtype=torch.bfloat16)
def seen(graph, _):
    print([str(n.target).split(".")[1] for n in graph.graph.nodes if "gemm" in str(n.target)])
    return lambda *_: tuple(torch.zeros(1) for _ in graph.graph.output_node().args[0])
compiled = torch.compile(call, fullgraph=True, backend=seen, dynamic=True)
try:
    compiled(a, b)
except Exception as error:
    print(type(error).__name__)
with torch.no_grad():
    compiled(a, b)
""",
    )
    assert said.splitlines() == [
        "['KernelError', 'gemm_residual_partial_rmsnorm', 'gemm_swiglu'] ffi.Function",
        "[((4, 64, 256), 'torch.bfloat16'), ((4, 64, 128), 'torch.bfloat16')]",
        "[['gemm_swiglu', 'default']]",
        "Unsupported",  # no gradient is left out
        "['gemm_swiglu']",
    ]


@pytest.mark.slow
def test_an_export_may_be_loaded_from_two_places(variant: Path, tmp_path: Path) -> None:
    shutil.copytree(variant, tmp_path / "again")
    said = run(
        variant,
        f"""
folder = Path({str(tmp_path / "again")!r})
spec = importlib.util.spec_from_file_location("again", folder / "__init__.py")
again = sys.modules["again"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(again)
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    a, b = (torch.empty(64, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    print(again.gemm_swiglu is not module.gemm_swiglu, again.gemm_swiglu(a, b)[1].shape)
""",
    )
    assert said == "True torch.Size([64, 32])\n"


@pytest.mark.slow
def test_the_recipe_for_servers_registers_an_operator(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("kernels", reason="Hugging Face kernels is not installed")
    page = (GENERATED.parent / "docs" / "doors.md").read_text()
    (recipe,) = re.findall(r"```python no-run\n(from pathlib.*?)```", page, re.DOTALL)
    (packed,) = re.findall(r"`(torch.stack.*?)`", page)
    (tmp_path / "kernels").symlink_to(repository)
    code = f"""
import torch
torch.version.cuda, torch.cuda.get_device_capability = "13.0", lambda *_, **__: (9, 0)
{recipe}
op = torch.ops.coda.swiglu
print(op.default._schema)
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    a, b = (torch.empty(x, dtype=torch.bfloat16, device="cuda") for x in ((4, 64, 128), (256, 128)))
    print(tuple(op(a, b).shape), op(a, b).dtype, tuple(exported.gemm_swiglu(a, b)[1].shape))
from coda_agent.generated import gemm_swiglu
swiglu.register_kernel("cpu")(lambda x, w: gemm_swiglu(x, w)[1])
x, w = torch.randn(64, 128).bfloat16(), torch.randn(256, 128).bfloat16() / 16
packed = {packed}
gate, up = (x.float() @ half.float().T for half in w.chunk(2))
got = torch.compile(op, fullgraph=True, backend="aot_eager")(x, packed)
print(torch.allclose(got.float(), torch.nn.functional.silu(gate) * up, rtol=2**-7, atol=1e-3))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "coda::swiglu(Tensor x, Tensor gate_up) -> Tensor",
        "(4, 64, 128) torch.bfloat16 (4, 64, 128)",
        "True",
    ], done.stderr


def test_wrong_calls_other_machines_and_changed_files_are_one_line(
    variant: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(variant, copy)
    file = next(copy.glob("objects/*.so"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    gemm = "gemm_swiglu: "
    cases = {
        "call(a, b)": f"{gemm}tensors are on cpu, expected a GPU of sm_90a",
        "call(a.half(), b.half())": f"{gemm}A is float16, but exported were bfloat16",
        "call(a)": "gemm_swiglu takes A, B, given were A",
        "call(a, 1)": f"{gemm}input 'B' is int, expected a tensor",
        "call(a, b[:7])": f"{gemm}N, K = 7, 128, expected positive, N a multiple of 16 and K of 8",
        "call(a.clone().requires_grad_(), b)": f"{gemm}has no backward pass, but an input requires a gradient; use torch.no_grad()",
        "one._arch(form, torch.device('cuda'))": f"{gemm}A100 has compute capability 8.0, but exported was sm_90a",
        "(form['objects'].update(sm_100a={}), one._arch(form, torch.device('cuda:1')))": f"{gemm}what was exported for sm_100a compiles, and was never run",
        "one._choose(form, {}, (64, 32, 128), None)": f"{gemm}no tile was exported for block_size None at (64, 32, 128)",
        "one.fake((a, b), 7)": f"{gemm}no tile of block_size 7 was exported, but [128]",
        f"one._store.function('objects/{file.name}')": f"{file} is not what was exported: its SHA-256 differs; export it again",
        "one._store.read('none')": f"{copy / 'none'} cannot be read: No such file or directory; export it again",
        "changed('_loader/call.py', '')": f"{copy / '_loader/call.py'} is not what was exported: its SHA-256 differs; export it again",
        "changed('metadata.json', '[]')": f"{copy / 'metadata.json'} is not what was exported; export it again",
        "(folder / 'metadata.json').unlink() or load(folder)": f"{copy / 'metadata.json'} cannot be read: No such file or directory; export it again",
        "exchange()": "is too old: its tensors have no DLPack exchange API, which those of 2.10 have",
    }  # fmt: skip
    code = f"""
a, b = torch.zeros(64, 128, dtype=torch.bfloat16), torch.zeros(32, 128, dtype=torch.bfloat16)
call = module.gemm_swiglu
one = call.variants[()]
form = one._forms["bfloat16"]
torch.cuda.get_device_capability = lambda x: (10, 0) if x.index else (8, 0)
import warnings
warnings.simplefilter("error")
torch.cuda.get_device_name = lambda _: "A100"
load = module._loader.kernel.load
def changed(name, text):
    (folder / name).write_text(text)
    load(folder)
def exchange():
    for name in ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"):
        if hasattr(torch.Tensor, name):
            delattr(torch.Tensor, name)
    load(folder)
for case in {[*cases]!r}:
    try:
        eval(case)
    except (module.KernelError, UserWarning) as error:
        print(error)
    else:
        print("no error")
"""
    lines = run(copy, code).splitlines()
    assert len(lines) == len(cases)
    assert all(line.endswith(said) for line, said in zip(lines, cases.values(), strict=True)), lines


# The CUDA runtime where there is none: a launch sums rows of partials on the CPU.
RUNTIME = r"""
typedef struct { unsigned grid[3], block[3]; unsigned long shared; void *stream, *attributes; unsigned count; } Launch;
static unsigned long seen;
int cudaLibraryLoadData(void **library, const char *code, ...) { *library = 0; return code[1] != 'E'; }
int cudaLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = &seen; return name[0] != '_'; }
int cudaLaunchKernelExC(const Launch *launch, const void *kernel, void **given) {
  const float *raw = *(float **)given[0];
  float *out = *(float **)given[1], weight = *(float *)given[5];
  int kept = *(int *)given[2], folded = *(int *)given[3], stride = *(int *)given[4];
  if (kernel != &seen || launch->count != 1 || launch->block[0] != 128 || *(int *)launch->attributes != 6) return 9;
  if (*(float *)given[6] || *(void **)given[7] || *(void **)given[8]) return 10;
  for (int i = 0; i < kept; i++, out++) {
    *out = 0;
    for (int j = 0; j < folded; j++) *out += raw[i * stride + j] * weight;
  }
  return launch->grid[0] * 128 < kept;
}
"""


def test_a_call_launches_an_object_and_a_fold_with_what_each_takes(
    variant: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cuda.c").write_text(RUNTIME)
    cuda = tmp_path / "libcudart.so.13"
    # PyTorch for CUDA needs the real one, too, in front of which this one's functions are found.
    soname = "libcuda-runtime.so" if torch.version.cuda else cuda.name
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{soname}", tmp_path / "cuda.c"]
    subprocess.run([*command, "-o", cuda], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(cuda))
    said = run(
        variant,
        """
import types
torch.version.cuda, torch._C._cuda_getCurrentRawStream = "13.0", lambda _: 0
torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(multi_processor_count=132)
call = module.gemm_residual_partial_rmsnorm
one = call.variants[()]
one._arch = lambda form, _: next(iter(form["objects"]))
launched = []
def launch(a, b, d, c, epilogue, *_):
    launched.append((a, b))
    partials = next(t for t in epilogue if t is not None and t.dtype == torch.float32)
    partials.copy_(torch.arange(partials.numel()).reshape(partials.shape) % 7)
one._store.function = lambda _: launch
m, n, k = 2 * 150, 1160, 64
a, b, c, gamma = (torch.randn(x).bfloat16() for x in ((2, 150, k), (n, k), (2, 150, n), (n,)))
with torch.no_grad():
    for x in (a, a, a.mT.contiguous().mT, torch.randn(m * k + 1).bfloat16()[1:].view(2, 150, k)):
        d, o, s = call(x, b, c, gamma)
        tile = one._choose(one._forms["bfloat16"], {x["code"]: 0 for x in one._tiles}, (m, n, k), None)
        blocks = -(-n // tile["tile_n"])
        want = (torch.arange(m * blocks).reshape(2, 150, blocks) % 7).float().sum(-1) * tile["tile_n"] / n
        print(tuple(d.shape), s.dtype, torch.allclose(s, want), launched[-1][0].equal(x.reshape(m, k)),
              launched[-1][0].data_ptr() == x.data_ptr(), len(one.calls))
    raw = call(a, b, c, gamma, block_size=tile["block"])[2]
    print(tuple(raw.shape) == (2, 150, blocks), raw.flatten()[:8].tolist())
""",
    )
    kept, copied = (f"(2, 150, 1160) torch.float32 True True {same} " for same in ("True", "False"))
    assert said.splitlines() == [
        *(kept + "1", kept + "1", copied + "2", copied + "3"),
        "True [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0]",
    ]


@pytest.mark.parametrize("over_rows", [False, True])
def test_a_fold_has_the_order_of_the_one_that_runs_in_place(over_rows: bool) -> None:
    """How many rows are kept changes no layout of threads, by which a sum has its order."""
    import torch

    from coda_agent.primitives.fold import compiled

    def layouts(kept: int, folded: int) -> list[str]:
        strides = (1, kept) if over_rows else (folded, 1)
        raw = torch.empty_strided((kept, folded), strides, device="meta")
        return re.findall(r"#blocked\d* = (.*)", compiled(raw, "add", 90).asm["ttgir"])

    few = (4096, 64, 208) if over_rows else (4096, 8191, 1, 40)
    for folded in (1, 16, 31, 48):
        assert all(layouts(kept, folded) == layouts(few[0], folded) for kept in few[1:])


def test_a_table_has_the_tile_that_a_measured_shape_dispatches() -> None:
    choices = choose(gemm_residual_partial_rmsnorm, Wanted(H200, 6))
    for dtype, table in choices.tables.items():
        for line in gemm_residual_partial_rmsnorm.tiles.tuned[H200][dtype]:
            shape = line["m"], line["n"], line["k"]
            at = 0
            for size, axis in zip(shape, table["axes"], strict=True):
                at = at * len(axis) + axis.index(size)
            first = choices.tiles[table["orders"][table["near"][at]][0]]
            assert first == gemm_residual_partial_rmsnorm.tiles.choose(*shape, dtype, None, H200)


def test_a_type_and_a_gpu_that_nothing_is_known_of() -> None:
    with pytest.raises(CodaError, match="takes no float32, expected bfloat16 or float16"):
        choose(gemm_swiglu, Wanted(H200, 1, ("float32",)))
    said = r"nothing was measured of gemm_swiglu on a 'RTX' \(known: NVIDIA H100 80GB HBM3, NVIDIA H200; coda-agent fit"
    with pytest.raises(CodaError, match=said):
        choose(gemm_swiglu, Wanted("RTX", 1))
