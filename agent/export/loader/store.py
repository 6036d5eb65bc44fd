"""The files of an export, each checked when it is read."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
from pathlib import Path
from typing import Any, Callable

import torch


class KernelError(ValueError):
    """What cannot be run, on a line: arguments, machine or a file."""


class Store:
    """The files of a variant.

    Attributes:
        id: What the operators are registered under.
        library: Operators live as long as this.
        ran: The architectures that kernels were judged on.
        folds: Of `kernels.json`, by architecture.
    """

    library: torch.library.Library
    ran: list[str]
    folds: dict[str, list[dict[str, Any]]]

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        data = self._bytes("metadata.json")
        try:
            metadata = json.loads(data)
            self.id: str = metadata["id"]
            self._digests: dict[str, str] = dict(metadata["digest"]["files"])
        except (ValueError, LookupError, TypeError):
            path = folder / "metadata.json"
            raise KernelError(f"{path} is not what was exported; export it again") from None
        self._launcher: Any = None
        self._folds: dict[tuple[str, str], int] = {}

    def read(self, name: str) -> bytes:
        data = self._bytes(name)
        digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
        if self._digests.get(name) != digest:
            path = self._folder / name
            raise KernelError(
                f"{path} is not what was exported: its SHA-256 differs; export it again"
            )
        return data

    def check_modules(self) -> None:
        """Refuse Python sources that are not what was exported."""
        for name in self._digests:
            if name.endswith(".py"):
                self.read(name)

    def _bytes(self, name: str) -> bytes:
        path = self._folder / name
        try:
            return path.read_bytes()
        except OSError as error:
            raise KernelError(f"{path} cannot be read: {error.strerror}; export it again") from None

    def function(self, name: str) -> Callable[..., Any]:
        """Load the launch of a kernel's object."""
        return self._module(name)["func"]

    def fold(self, about: dict[str, Any]) -> tuple[Callable[..., int], int]:
        """Load what launches a fold, and the handle of its code."""
        if self._launcher is None:
            self._launcher = self._module("folds/launch.so")
        key = about["file"], about["name"]
        if key not in self._folds:
            code, name = (
                ctypes.create_string_buffer(x) for x in (self.read(key[0]), key[1].encode())
            )
            handle = self._launcher["load"](ctypes.addressof(code), ctypes.addressof(name))
            if handle <= 0:
                raise KernelError(f"{self._folder / key[0]} cannot be loaded: CUDA error {-handle}")
            self._folds[key] = handle
        return self._launcher["launch"], self._folds[key]

    def _module(self, name: str) -> Any:
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
        return tvm_ffi.load_module(str(self._folder / name))
