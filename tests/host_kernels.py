"""Build a kernel source of cuda/ for the CPU and run it on NumPy arrays (or CPU tensors), with no NVIDIA package.

`build` compiles with g++ in front of `tests/host/cuda_host.h`; builds are kept by content, so a file is compiled once.
Environment variables turn a whole test run into a search for hidden faults:
GRAPHKV_HOST_SANITIZE=1 builds with AddressSanitizer and UndefinedBehaviorSanitizer (libasan must be preloaded),
GRAPHKV_HOST_BACKWARDS=1 runs the threads of every block, and the blocks, in reverse order.
GRAPHKV_HOST_LOG names a file that the name of each kernel that ran is appended to.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ROOT / "tests" / "host"
CUDA = ROOT / "cuda"
BUILDS = ROOT / ".pytest_cache" / "host_kernels"
ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:\w+\s*\([^)]*\)\s+)*(\w+)\s*\(')
FLAGS = ("-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-gnu-unique", "-g1", "-Wl,-Bsymbolic")
WARNINGS = ("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter", "-Wno-sign-compare", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")


class HostKernelError(RuntimeError):
    """A kernel deadlocked or overran a stack."""


class HostModule:
    """One kernel source, built for the CPU. `signature(entry)` is in the letters of `graphkv.kernels.load`."""

    def __init__(self, library: Path, entries: Sequence[str]) -> None:
        self.entries = tuple(entries)
        self._library = ctypes.CDLL(str(library))
        self._library.gk_host_error.restype = ctypes.c_char_p

    def signature(self, entry: str) -> str:
        """One letter a parameter: P pointer, i 4-byte and q 8-byte integer, f float, S struct."""
        function = self._library[f"gk_host_signature_{entry}"]
        function.restype = ctypes.c_char_p
        return str(function().decode())

    def launch(
        self,
        entry: str,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence[Any] | int,
        shared_bytes: int = 0,
        *,
        threads: int | None = None,
        backwards: bool | None = None,
    ) -> None:
        """Run `entry` to its end.

        Args:
            args: arrays or CPU tensors (None is the null pointer), ints, floats, ctypes structures, as the kernel
                wants; or the address of a ready array of pointers to values, as the driver takes it.
            threads: OS threads that the blocks are spread over; default one a processor, at most 4.
            backwards: reverse the order of blocks, warps and lanes between barriers.
        Raises:
            HostKernelError: deadlock, or a thread used more stack than it has.
        """
        if backwards is None:
            backwards = os.environ.get("GRAPHKV_HOST_BACKWARDS") == "1"
        threads = threads or min(4, os.cpu_count() or 1)
        shape = (ctypes.c_uint * 9)(*_three(grid), *_three(block), shared_bytes, threads, backwards)
        values = [] if isinstance(args, int) else self._values(entry, args)
        ready = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
        addresses = ctypes.c_void_p(args) if isinstance(args, int) else ready
        if not self._library[f"gk_host_run_{entry}"](shape, addresses):
            raise HostKernelError(f"{entry}: {self._library.gk_host_error().decode()}")
        if log := os.environ.get("GRAPHKV_HOST_LOG"):
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{entry}\n")

    def _values(self, entry: str, args: Sequence[Any]) -> list[Any]:
        """Each argument as a ctypes object that holds its bytes."""
        signature = self.signature(entry)
        if len(args) != len(signature):
            raise TypeError(f"{entry} takes {len(signature)} arguments ({signature}), {len(args)} given")
        sizes_of = self._library[f"gk_host_sizes_{entry}"]
        sizes_of.restype = ctypes.POINTER(ctypes.c_size_t)
        sizes = sizes_of()
        return [_value(entry, n, letter, sizes[n], args[n]) for n, letter in enumerate(signature)]


def build(file: str | Path, defines: Mapping[str, int | str] | None = None, sanitize: bool | None = None) -> HostModule:
    """The module of `file` (a name in cuda/, or a path), compiled with `defines`.

    With GK_HOPPER among them, code that is meant for sm_90a is compiled, on the twins of hopper_host.h.
    """
    if sanitize is None:
        sanitize = os.environ.get("GRAPHKV_HOST_SANITIZE") == "1"
    source = Path(file) if Path(file).is_absolute() else CUDA / file
    return _build(source, tuple(sorted((defines or {}).items())), sanitize, _digest(source.parent))


@functools.cache
def _build(source: Path, defines: tuple[tuple[str, int | str], ...], sanitize: bool, digest: str) -> HostModule:
    entries = ENTRY.findall(source.read_text())
    exports = "".join(f"GK_HOST_EXPORT({entry})\n" for entry in entries)
    header = "hopper_host.h" if "GK_HOPPER" in dict(defines) else "cuda_host.h"
    unit = f'#include "{HEADERS / header}"\n#include "{source}"\n{exports}'
    optimise = ("-O1", *SANITIZERS) if sanitize else ("-O2",)
    command = ["g++", *FLAGS, *WARNINGS, *optimise, *(f"-D{name}={value}" for name, value in defines)]
    key = hashlib.sha256("\0".join((*command, source.name, digest, _compiler())).encode()).hexdigest()[:32]
    library = BUILDS / f"{source.stem}-{key}.so"
    if not library.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS) as scratch:
            text, made = Path(scratch, "unit.cpp"), Path(scratch, "unit.so")
            text.write_text(unit)
            done = subprocess.run([*command, str(text), "-o", str(made)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise HostKernelError(f"g++ refused {source.name}:\n{done.stderr}")
            made.replace(library)
    return HostModule(library, entries)


def _digest(folder: Path) -> str:
    """Of every source that a file of `folder` may include."""
    files = sorted([*folder.glob("*.cu"), *folder.glob("*.cuh"), *HEADERS.glob("*.h")])
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def _three(size: int | tuple[int, ...]) -> tuple[int, ...]:
    return (size, 1, 1) if isinstance(size, int) else (*size, 1, 1)[:3]


def _value(entry: str, number: int, letter: str, size: int, given: Any) -> Any:
    """A ctypes object that holds the argument's bytes."""
    if letter == "P":
        return ctypes.c_void_p(_address(given))
    if letter == "f":
        return ctypes.c_float(given)
    if letter in "iq":
        bits = 8 * size
        if not -(1 << (bits - 1)) <= int(given) < 1 << bits:
            raise OverflowError(f"{entry}, argument {number}: {given} does not fit into {bits} bits")
        return (ctypes.c_int32 if letter == "i" else ctypes.c_int64)(given)
    if letter == "S" and isinstance(given, ctypes.Structure) and ctypes.sizeof(given) == size:
        return given
    raise TypeError(f"{entry}, argument {number}: a struct of {size} bytes is wanted, {given!r} given")


def _address(given: Any) -> int | None:
    if given is None or isinstance(given, int):
        return given
    if isinstance(given, np.ndarray):
        return int(given.ctypes.data)
    if hasattr(given, "data_ptr"):
        return int(given.data_ptr())
    raise TypeError(f"an array, a CPU tensor, an address or None is wanted, {type(given).__name__} given")
