"""Kernels that were compiled ahead, as functions and torch operators.

- This file stands in an exported repository beside `kernels.json`, objects and their digests. It
  needs torch and apache-tvm-ffi, and reads all it knows of a kernel from that data.
- A call is checked once for each signature of its arguments; what was found is kept as a plan.
- An object is read, held against its digest and loaded when a call first needs it.
"""

# ruff: noqa: B905, UP045  (Python 3.9)
from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import math
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence  # noqa: UP035

import torch

_CAPABILITIES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}
_PLANS = 2048


class KernelError(ValueError):
    """What cannot be run: wrong arguments, another machine, or a changed file. One line."""


def load(folder: Path) -> dict[str, Kernel]:
    """The kernels of an exported variant, by name; their operators are in `torch.ops.<id>`.

    Raises:
        KernelError: a file is missing or changed, or torch is too old.
    """
    known = [
        hasattr(torch.Tensor, f"__{x}__")
        for x in ("dlpack_c_exchange_api", "c_dlpack_exchange_api")
    ]
    if not any(known):
        raise KernelError(
            f"torch {torch.__version__} is too old: its tensors have no DLPack exchange API"
        )
    store = Store(folder)
    about = json.loads(store.read("kernels.json"))
    store.library = library = torch.library.Library(store.id, "FRAGMENT")
    kernels = {x["name"]: Kernel(x, store) for x in about["kernels"]}
    for kernel in kernels.values():
        kernel.register(library)
    return kernels


class Store:
    """The files of a variant, each held against its digest when it is read.

    Attributes:
        id: What the operators are registered under.
        library: Operators live as long as this.
    """

    library: torch.library.Library

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        metadata = json.loads((folder / "metadata.json").read_text("utf-8"))
        self.id: str = metadata["id"]
        self._digests: dict[str, str] = metadata["digest"]["files"]

    def read(self, name: str) -> bytes:
        path = self._folder / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise KernelError(f"{path} cannot be read: {error.strerror}; export it again") from None
        digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
        if self._digests.get(name) != digest:
            raise KernelError(
                f"{path} is not what was exported: its SHA-256 differs; export it again"
            )
        return data

    def function(self, name: str) -> Callable[..., Any]:
        """The launch of a kernel's object."""
        self.read(name)
        try:
            import tvm_ffi
        except ImportError:
            raise KernelError("tvm_ffi is missing: pip install apache-tvm-ffi") from None
        major, minor = map(int, (torch.version.cuda or "0.0").split(".")[:2])
        if (major, minor) < (12, 8):
            cuda = torch.version.cuda
            raise KernelError(f"torch is built for CUDA {cuda}, expected 12.8 or later")
        try:  # an object's calls into CUDA are bound by name, among what is global
            ctypes.CDLL(f"libcudart.so.{major}", mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise KernelError(f"torch's CUDA runtime cannot be loaded: {error}") from None
        return tvm_ffi.load_module(str(self._folder / name))["func"]


class Kernel:
    """A kernel: a function of its inputs, which torch.compile traces and CUDA graphs capture.

    Its docstring says what it computes. Inputs are given in order or by name, static parameters by
    name. `block_size` None gives final reductions; an integer their raw float32 partials over
    blocks of so many columns, or rows.
    """

    def __init__(self, about: Mapping[str, Any], store: Store) -> None:
        self.__name__ = name = about["name"]
        self.__doc__ = about["doc"]
        self._id = store.id
        self._inputs: tuple[str, ...] = tuple(about["inputs"])
        self._parameters: dict[str, list[str]] = about["parameters"]
        self._scalars: tuple[int, ...] = tuple(about["scalars"])
        self.variants = {
            tuple(x["key"]): Variant(name, self._inputs, about, x, store) for x in about["variants"]
        }

    def __call__(self, *args: Any, block_size: Optional[int] = None, **inputs: Any) -> Any:
        key = tuple([self._chosen(p, inputs) for p in self._parameters])
        values = (
            list(args)
            if len(args) == len(self._inputs) and not inputs
            else self._named(args, inputs)
        )
        for i, value in enumerate(values):
            number = i in self._scalars and isinstance(value, (int, float))
            if not number and not isinstance(value, torch.Tensor):
                got = type(value).__name__
                raise KernelError(
                    f"{self.__name__}: input {self._inputs[i]!r} is {got}, expected a tensor"
                )
        in_memory = self._fill(values)
        variant = self.variants[key]
        if not _traced():
            results = variant(values, block_size)
        else:
            variant.refuse_gradients(values)  # what is compiled would leave them out
            op = getattr(getattr(torch.ops, self._id), self.__name__ + "_" * bool(variant.updated))
            static: dict[str, Any] = dict(zip(self._parameters, key))
            if block_size is not None:
                static["block_size"] = block_size
            results = (op.Tensor if in_memory else op.default)(*values, **static)
        if not variant.updated:
            return results
        others = (
            list(results) if isinstance(results, tuple) else [] if results is None else [results]
        )
        for place, i in variant.shown:
            others.insert(place, values[i])
        return tuple(others) if len(others) > 1 else others[0]

    def _chosen(self, parameter: str, inputs: dict[str, Any]) -> str:
        known = self._parameters[parameter]
        if (value := inputs.pop(parameter, known[0])) not in known:
            raise KernelError(
                f"{self.__name__}: {parameter} is {value!r}, expected one of {', '.join(known)}"
            )
        return value

    def _named(self, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> list[Any]:
        names = self._inputs
        rest = names[len(args) :]
        if len(args) > len(names) or set(inputs) != set(rest):
            given = ", ".join([*names[: len(args)], *inputs])
            raise KernelError(f"{self.__name__} takes {', '.join(names)}, given were {given}")
        return [*args, *(inputs[x] for x in rest)]

    def _fill(self, values: list[Any]) -> bool:
        """Whether scalars are in memory; then the others among `values` are brought there too."""
        numbers = [i for i in self._scalars if not isinstance(values[i], torch.Tensor)]
        if len(numbers) == len(self._scalars):
            return False
        device = next(x.device for i, x in enumerate(values) if i not in self._scalars)
        for i in numbers:
            values[i] = torch.full((), values[i], dtype=torch.float32, device=device)
        return True

    def register(self, library: torch.library.Library) -> None:
        """Register the operators: `<name>`, and `<name>_` of variants that overwrite an input."""
        for suffix in ("", "_"):
            some = {k: v for k, v in self.variants.items() if bool(v.updated) == bool(suffix)}
            for overload in ("", ".Tensor") if some and self._scalars else ("",) if some else ():
                self._define(library, self.__name__ + suffix, overload, some)

    def _define(
        self, library: torch.library.Library, name: str, overload: str, variants: dict[Any, Variant]
    ) -> None:
        first = next(iter(variants.values()))
        types = ["Tensor"] * len(self._inputs)
        for i in self._scalars:
            types[i] = "Tensor" if overload else "float"
        for _, i in first.updated:
            types[i] = "Tensor(a!)"
        arguments = ", ".join(f"{kind} {x}" for kind, x in zip(types, self._inputs))
        defaults = dict(zip(self._parameters, next(iter(variants))))
        keywords = ", ".join(
            [*(f'str {p}="{x}"' for p, x in defaults.items()), "int? block_size=None"]
        )
        results = ", ".join(["Tensor"] * len(first.returned))

        def body(
            call: Callable[..., Any], *args: Any, block_size: Optional[int] = None, **static: str
        ) -> Any:
            variant = variants[tuple([static.get(p, x) for p, x in defaults.items()])]
            return call(variant, args, block_size)

        schema = f"{name}{overload}({arguments}, *, {keywords}) -> ({results})"
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name + overload, partial(body, Variant.__call__), "CUDA")
        fake = partial(body, Variant.fake)
        torch.library.register_fake(f"{self._id}::{name}{overload}", fake, lib=library)


def _traced() -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


class Variant:
    """A kernel with its static parameters chosen.

    Attributes:
        updated: Places of outputs of the program that overwrite an input, and of that input.
        shown: The same places among the outputs that a caller gets.
        returned: Places of the other outputs.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        kernel: Mapping[str, Any],
        about: Mapping[str, Any],
        store: Store,
    ) -> None:
        self._name, self._inputs, self._store = name, inputs, store
        self._operands: list[dict[str, Any]] = about["operands"]
        self._outputs: list[dict[str, Any]] = about["outputs"]
        self._places: list[int] = about["places"]
        self._forms: dict[str, Any] = about["forms"]
        self._choices: dict[str, Any] = kernel["choices"]
        self._tiles: list[dict[str, Any]] = kernel["tiles"]
        self._kept: bool = about["kept"]
        self.updated: list[tuple[int, int]] = about["updated"]
        self.shown: list[tuple[int, int]] = about["shown"]
        self.returned: list[int] = about["returned"]
        self._plans: dict[Any, Callable[[Sequence[Any]], Any]] = {}

    def __call__(self, values: Sequence[Any], block_size: Optional[int] = None) -> Any:
        key: list[Any] = [block_size]
        for x in values:
            if isinstance(x, torch.Tensor):
                key += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.requires_grad)
        plan = self._plans.get(known := tuple(key))
        if plan is None or torch.is_grad_enabled():
            self.refuse_gradients(values)
        if plan is None:
            m, n, k, form = self._check(values)
            if m == 0:
                return self.fake(values, block_size)
            plan = self._plan(values, (m, n, k), form, block_size)
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[known] = plan
        return self._picked(plan(values))

    def fake(self, values: Sequence[Any], block_size: Optional[int] = None) -> Any:
        """What a call returns, in shapes, dtypes and strides alone."""
        m, n, _, form = self._check(values)
        a = values[self._places[0]]
        tile = next((x for x in self._tiles if block_size in (None, x["block"])), None)
        if tile is None:
            known = sorted({x["block"] for x in self._tiles if x["block"]})
            raise self._error(f"no tile of block_size {block_size} was exported, but {known}")
        results: list[torch.Tensor] = []
        for x, dtype in zip(self._outputs, form["outputs"]):
            kind, reduction = getattr(torch, dtype), x["reduction"]
            if x["accumulates"]:
                results.append(torch.empty_like(values[self._places[-1]]))
            elif reduction and block_size is None:
                shape = self._shape(x, m, n)
                results.append(a.new_full(shape, reduction["identity"], dtype=kind))
            else:
                t = a.new_empty(self._shape(x, m, n, tile), dtype=kind)
                results.append(t.mT if reduction and reduction["over_rows"] else t)
        return self._picked([self._led(x, t, a) for x, t in zip(self._outputs, results)])

    def _picked(self, results: Sequence[torch.Tensor]) -> Any:
        if len(self.returned) == 1:
            return results[self.returned[0]]
        return tuple([results[i] for i in self.returned]) or None

    def _led(self, about: Mapping[str, Any], t: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """An output with the leading dimensions of A."""
        if a.ndim == 2 or about["accumulates"] or about["dims"][0] != "M":
            return t
        return t.reshape(*a.shape[:-1], *t.shape[1:])

    def _error(self, message: str) -> KernelError:
        return KernelError(f"{self._name}: {message}")

    def refuse_gradients(self, values: Sequence[Any]) -> None:
        if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in values):
            raise self._error(
                "has no backward pass, but an input requires a gradient; use torch.no_grad()"
            )

    def _check(self, values: Sequence[Any]) -> tuple[Any, int, int, dict[str, Any]]:
        """M, N, K and what was exported for these types; nothing is asked of M, maybe a symbol."""
        a, b, *operands = [values[i] for i in self._places]
        names = [self._inputs[i] for i in self._places]
        dtype = str(a.dtype)[6:]
        if (form := self._forms.get(dtype)) is None:
            raise self._error(f"{names[0]} is {dtype}, but exported were {', '.join(self._forms)}")
        if a.ndim < 2 or b.ndim != 2 or a.shape[-1] != b.shape[-1] or a.dtype != b.dtype:
            raise self._error(
                f"{names[0]} is {tuple(a.shape)} {a.dtype} and {names[1]} {tuple(b.shape)} "
                f"{b.dtype}, expected (…, M, K) and (N, K) of one dtype"
            )
        (n, k), m = b.shape, math.prod(a.shape[:-1])
        n_step, k_step = form["steps"]
        if n == 0 or k == 0 or n % n_step or k % k_step:
            raise self._error(
                f"N, K = {n}, {k}, expected positive, N a multiple of {n_step} and K of {k_step}"
            )
        for x, name, kind, value in zip(self._operands, names[2:], form["operands"], operands):
            if not isinstance(value, torch.Tensor):
                continue
            sizes = {"M": tuple(a.shape[:-1]), "N": (n,), "2*N": (2 * n,)}
            expected = sum((sizes[d] for d in x["dims"]), ())
            if tuple(value.shape) != expected and (x["dims"] or value.numel() != 1):
                raise self._error(f"{name} has shape {tuple(value.shape)}, expected {expected}")
            if str(value.dtype)[6:] != kind:
                raise self._error(f"{name} is {str(value.dtype)[6:]}, but exported was {kind}")
        for name, value in zip(names, (a, b, *operands)):
            if isinstance(value, torch.Tensor) and value.device != a.device:
                raise self._error(f"{name} is on {value.device}, {names[0]} on {a.device}")
        return m, n, k, form

    def _shape(
        self, about: Mapping[str, Any], m: Any, n: int, tile: Optional[Mapping[str, Any]] = None
    ) -> tuple[Any, ...]:
        """Of an output: as the kernel of a tile writes it, or folded."""
        reduction = about["reduction"]
        if reduction and tile:
            if reduction["over_rows"]:
                return -(-m // tile["tile_m"]), n
            return m, -(-n // tile["tile_n"])
        sizes = {"M": m, "N": n, "2*N": 2 * n, "N/2": n // 2}
        return tuple([sizes[d] for d in about["dims"]])

    def _choose(
        self,
        form: Mapping[str, Any],
        objects: Mapping[str, Any],
        shape: tuple[int, int, int],
        block_size: Optional[int],
    ) -> dict[str, Any]:
        """The tile that the table has for a shape: measured there, or predicted near it."""
        table = self._choices[form["choice"]]
        found = table["exact"].get("x".join(map(str, shape)))
        if found is None:
            at = 0
            for size, axis in zip(shape, table["axes"]):
                near = min(range(len(axis)), key=lambda i: abs(math.log2(size / axis[i])))
                at = at * len(axis) + near
            found = table["near"][at]
        for i in (*table["orders"][found], *range(len(self._tiles))):
            tile = self._tiles[i]
            parts = tile["split_k"]  # a part without a K tile of its own never returns
            suits = tile["code"] in objects and (parts == 1 or shape[2] >= 256 * parts)
            if suits and block_size in (None, tile["block"]):
                return tile
        raise self._error(f"no tile was exported for block_size {block_size} at {shape}")

    def _plan(
        self,
        values: Sequence[Any],
        shape: tuple[int, int, int],
        form: Mapping[str, Any],
        block_size: Optional[int],
    ) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
        """What runs a call, and later ones with such arguments."""
        (m, n, _), places, raw = shape, self._places, block_size is not None
        device, batched = values[places[0]].device, values[places[0]].ndim > 2
        scalars = [not x["dims"] for x in self._operands]
        in_memory = any(
            x and isinstance(values[i], torch.Tensor) for x, i in zip(scalars, places[2:])
        )
        objects = self._objects(form, device)["memory" if in_memory else "number"]
        tile = self._choose(form, objects, shape, block_size)
        gemm, epilogue = objects[tile["code"]]["order"]
        call = self._store.function(objects[tile["code"]]["file"])
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        clusters = sms // (tile["cluster_m"] * tile["cluster_n"]) * tile["persistent"]
        scheduler = (clusters, None, tile["swizzle"], None, None, None)
        ready: list[tuple[int, int, bool]] = [(0, 2, True), (1, 2, False)]
        makes: list[tuple[int, Callable[[Any], Any]]] = []
        first = 3 + len(self._outputs)  # of the operands among all that is launched
        if tile["swap_ab"]:
            makes.append((first - 1, lambda t: t.mT))
        for i, x in enumerate(self._operands):
            if x["dims"]:
                ready.append((i + 2, len(x["dims"]), x["dims"][0] == "M"))
            else:
                makes.append((first + i, torch.Tensor.data_ptr if in_memory else float))
            if x["vector"]:
                makes.append((first + i, lambda t: t.unsqueeze(0)))
        made = [
            (self._shape(x, m, n, tile), getattr(torch, dtype))
            for x, dtype in zip(self._outputs, form["outputs"])
        ]
        added = [i for i, x in enumerate(self._outputs) if x["accumulates"]]
        reduced = [(i, x["reduction"]) for i, x in enumerate(self._outputs) if x["reduction"]]

        def run(values: Sequence[Any]) -> list[torch.Tensor]:
            inputs = [values[i] for i in places]
            for i, ndim, rows in ready:
                inputs[i] = _ready(inputs[i], ndim, rows)
            if self._kept:
                inputs[-1] = inputs[-1].clone(memory_format=torch.contiguous_format)
            outputs = [torch.empty(x, dtype=dtype, device=device) for x, dtype in made]
            for i in added:
                outputs[i] = inputs[-1]
            launched = [None, *outputs, *inputs]
            for i, make in makes:
                launched[i] = make(launched[i])
            if tile["split_k"] > 1:
                launched += _meeting(shape, tile, device)
            a, b, d, c = [launched[i] for i in gemm]
            call(a, b, d, c, tuple([launched[i] for i in epilogue]), scheduler, None, None, None)
            for i, reduction in reduced:
                turned = outputs[i].mT if reduction["over_rows"] else outputs[i]
                outputs[i] = turned if raw else _finished(reduction, turned, tile, n)
            for i in added:
                outputs[i] = self._added(outputs[i], values[places[-1]])
            if batched:
                a = values[places[0]]
                outputs = [self._led(x, t, a) for x, t in zip(self._outputs, outputs)]
            return outputs

        return run

    def _added(self, result: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """What was added to: the caller's tensor where it changes, and else the copy."""
        if self._kept:
            return result.reshape(given.shape)
        if result.data_ptr() != given.data_ptr():
            given.copy_(result.reshape(given.shape))
        else:  # or what autograd saved would not know
            torch.autograd.graph.increment_version(given)
        return given

    def _objects(self, form: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """The objects for a device.

        Raises:
            KernelError: none was exported for it.
        """
        known = ", ".join(form["objects"])
        if device.type != "cuda":
            raise self._error(f"tensors are on {device}, expected a GPU of {known}")
        found = torch.cuda.get_device_capability(device)
        arch = _CAPABILITIES.get(found, "")
        if arch not in form["objects"]:
            name = torch.cuda.get_device_name(device)
            raise self._error(
                f"{name} has compute capability {found[0]}.{found[1]}, but exported was {known}"
            )
        return form["objects"][arch]


def _ready(t: torch.Tensor, ndim: int, rows: bool) -> torch.Tensor:
    """`t` with one dimension of rows, copied where TMA cannot load its strides or its address."""
    if rows and t.ndim > ndim:
        t = t.flatten(0, t.ndim - ndim)
    step = 16 // t.element_size()
    strides = t.stride()
    suits = strides[-1] == 1 and t.data_ptr() % 16 == 0
    if suits and all([s > 0 and s % step == 0 for s in strides[:-1]]):
        return t
    # Not `contiguous()`: that keeps any stride of a dimension of extent 1.
    return t.clone(memory_format=torch.contiguous_format)


def _finished(
    reduction: Mapping[str, Any], raw: torch.Tensor, tile: Mapping[str, Any], n: int
) -> torch.Tensor:
    """The final values of partials over blocks of N columns, or of rows."""
    combine = reduction["combine"]
    if combine == "logsumexp":
        return raw.logsumexp(-1)
    if combine in ("max", "min"):
        return raw.amax(-1) if combine == "max" else raw.amin(-1)
    total = raw.sum(-1)
    return total * (tile["tile_n"] / n) if reduction["mean"] else total


# Flags by device and stream. The last CTA of a tile clears its flag, so they are zero between
# kernels, and kernels of one stream may share them.
_FLAGS: dict[tuple[Any, int], torch.Tensor] = {}


def _meeting(
    shape: tuple[int, int, int], tile: Mapping[str, Any], device: torch.device
) -> list[torch.Tensor]:
    """Where CTAs that share an output tile meet: a flag and float32 sums for each tile."""
    rows, columns = (shape[1], shape[0]) if tile["swap_ab"] else shape[:2]
    down = -(-rows // (tile["tile_m"] * tile["cluster_m"])) * tile["cluster_m"]
    across = -(-columns // (tile["tile_n"] * tile["cluster_n"])) * tile["cluster_n"]
    tiles, area = down * across, tile["tile_m"] * tile["tile_n"]
    key = device, torch.cuda.current_stream(device).cuda_stream
    flags = _FLAGS.get(key)
    if torch.cuda.is_current_stream_capturing():
        # A graph may run beside this stream, so it has its own, and clears them each time.
        flags = torch.zeros(tiles, dtype=torch.int32, device=device)
    elif flags is None or flags.numel() < tiles:
        flags = _FLAGS[key] = torch.zeros(max(tiles, 1024), dtype=torch.int32, device=device)
    sums = torch.empty(tiles * area, dtype=torch.float32, device=device)
    return [
        flags.as_strided((down, across, 1), (across, 1, tiles)),
        sums.as_strided((area, down, across, 1), (1, across * area, area, tiles * area)),
    ]
