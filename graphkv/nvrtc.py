"""From a kernel source in `cuda/` to machine code for one exact architecture, through NVRTC and a disk cache.

Machine code, never PTX: a driver reads code of its own major version whatever compiler made it, but refuses PTX that
is newer than itself. Sources and their headers are read once and handed to NVRTC in memory, so what is compiled is what
the cache key was made from. No driver and no device is needed, and NVRTC is not loaded before the first compile.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from graphkv import kernel_cache
from graphkv.errors import CudaUnavailable, InvalidValue, KernelCompileError

Defines = Mapping[str, int | str]
NO_DEFINES: Defines = MappingProxyType({})

# NVRTC has a cache of its own beside a driver; what comes from it has no log, hence no resource report.
_OPTIONS = ("--std=c++17", "--generate-line-info", "--ptxas-options=-v", "--no-cache")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)
_ARCH = re.compile(r"sm_\d{2,3}[af]?")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ENTRY_LINE = re.compile(r"Compiling entry function '(\w+)'")
_FRAME_LINE = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED_LINE = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What one kernel takes: registers a thread; spilled, stack bytes a thread; static shared bytes a block."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Machine code of one source file for one architecture, with the compiler's log and each entry's resources."""

    file: str
    arch: str
    cubin: bytes
    log: str
    resources: Mapping[str, KernelResources]


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One file of the kernel folder and every header of that folder that it includes, directly or not."""

    file: str
    text: str
    headers: Mapping[str, str]


def kernel_dir() -> Path:
    """Where the sources are: $GRAPHKV_KERNEL_DIR, inside the installed package, or `cuda/` beside it in a checkout."""
    chosen = os.environ.get("GRAPHKV_KERNEL_DIR")
    if chosen:
        return Path(chosen)
    package = Path(__file__).parent
    installed, checkout = package / "_kernels", package.parent / "cuda"
    return installed if installed.is_dir() else checkout


def arch_of(major: int, minor: int) -> str:
    """The architecture to compile for on a device of this compute capability, e.g. (9, 0) -> "sm_90a".

    From 9.0 to 11.x the "a" form unlocks instructions that only that very device has.
    """
    if major < 8:
        raise CudaUnavailable(f"compute capability {major}.{minor} is too old: graphkv's kernels need 8.0 or newer")
    return f"sm_{major}{minor}{'a' if 9 <= major <= 11 else ''}"


def read_source(file: str) -> KernelSource:
    """Read `file` (a name in the kernel folder) with its headers.

    Raises:
        KernelCompileError: a file is missing. Headers outside the kernel folder are missing by definition: the kernels
            compile without a toolkit.
    """
    folder = kernel_dir()
    headers: dict[str, str] = {}
    text = _read(folder, file, "")
    wanted = [(name, file) for name in _INCLUDE.findall(text)]
    while wanted:
        name, reader = wanted.pop()
        if name not in headers:
            headers[name] = _read(folder, name, f" (included by {reader})")
            wanted += [(other, name) for other in _INCLUDE.findall(headers[name])]
    return KernelSource(file, text, MappingProxyType(dict(sorted(headers.items()))))


def compile_source(file: str, arch: str, defines: Defines = NO_DEFINES) -> CompiledKernel:
    """The machine code of `file` for `arch`, from the cache where it is there, else from NVRTC.

    Args:
        file: a name in the kernel folder, e.g. "latch.cu".
        arch: e.g. "sm_90a", see `arch_of`.
        defines: preprocessor macros.
    Raises:
        KernelCompileError: NVRTC refused the source, or a file is missing.
        CudaUnavailable: NVRTC is not installed.
    """
    if not _ARCH.fullmatch(arch):
        raise InvalidValue(f"arch must look like sm_90a, got {arch!r}")
    for name in defines:
        if not _NAME.fullmatch(name):
            raise InvalidValue(f"a define must be a C identifier, got {name!r}")
    source = read_source(file)
    options = (f"--gpu-architecture={arch}", *_OPTIONS, *(f"-D{name}={defines[name]}" for name in sorted(defines)))
    with _lock:
        key = cache_key(source, options, _compiler_identity())
        known = _compiled.get(key)
        if known is None:
            known = _compiled[key] = _from_disk(key, file, arch) or _compile(key, source, arch, options)
        return known


def cache_key(source: KernelSource, options: tuple[str, ...], compiler: str) -> str:
    """A digest of everything that decides the machine code. Every part is preceded by its length."""
    digest = hashlib.sha256()
    for part in (compiler, *options, source.file, source.text, *(x for item in source.headers.items() for x in item)):
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def compiler_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC in use."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return major, minor


_lock = threading.Lock()
_compiled: dict[str, CompiledKernel] = {}


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)  # another thread of the parent may have held it


def _read(folder: Path, name: str, reader: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except OSError as error:
        raise KernelCompileError(
            f"no kernel source {name!r}{reader} in {folder}; kernels include only files of that folder "
            "($GRAPHKV_KERNEL_DIR overrides where it is)"
        ) from error


@functools.cache
def _nvrtc() -> Any:
    """The NVRTC bindings, with the library loaded."""
    remedy = "install it with: pip install 'cuda-toolkit[nvrtc]==13.*'"
    try:
        from cuda.bindings import nvrtc
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError as error:
        raise CudaUnavailable("cuda-python is not installed; install it with: pip install 'cuda-python<14'") from error
    try:
        load_nvidia_dynamic_lib("nvrtc")
    except RuntimeError as error:  # the finder's own error is one, and its text lists the places it searched
        raise CudaUnavailable(
            "NVRTC's library (libnvrtc) was not found in site-packages, conda, CUDA_PATH/CUDA_HOME or the system's "
            f"library path; {remedy}. The search reported: {error}"
        ) from error
    return nvrtc


@functools.cache
def _compiler_identity() -> str:
    """Version and build of the NVRTC in use: two builds of one version may compile differently."""
    nvrtc = _nvrtc()
    from cuda.pathfinder import load_nvidia_dynamic_lib

    _, major, minor = nvrtc.nvrtcVersion()
    path = load_nvidia_dynamic_lib("nvrtc").abs_path
    if path is None:
        return f"nvrtc {major}.{minor}"
    with open(path, "rb") as library:
        head = library.read(1 << 16)  # holds the linker's build id
        size = library.seek(0, os.SEEK_END)
    return f"nvrtc {major}.{minor} {size} {hashlib.sha256(head).hexdigest()}"


def _from_disk(key: str, file: str, arch: str) -> CompiledKernel | None:
    stored = kernel_cache.read(key)
    if stored is None:
        return None
    facts, cubin = stored
    resources = {entry: KernelResources(**numbers) for entry, numbers in facts["resources"].items()}
    return CompiledKernel(file, arch, cubin, facts["log"], MappingProxyType(resources))


def _compile(key: str, source: KernelSource, arch: str, options: tuple[str, ...]) -> CompiledKernel:
    nvrtc = _nvrtc()
    headers = [text.encode() for text in source.headers.values()]
    names = [name.encode() for name in source.headers]
    program = _check(
        nvrtc, nvrtc.nvrtcCreateProgram(source.text.encode(), source.file.encode(), len(headers), headers, names)
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _text(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if int(status) != 0:
            built_for = ", ".join(f"sm_{number}" for number in _check(nvrtc, nvrtc.nvrtcGetSupportedArchs()))
            raise KernelCompileError(
                f"NVRTC {'.'.join(map(str, compiler_version()))} refused {source.file} ({' '.join(options)}): "
                f"{status.name}\n{log}\nArchitectures of this NVRTC: {built_for}"
            )
        cubin = _text(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    resources = parse_resources(log)
    facts = {"log": log, "resources": {entry: asdict(numbers) for entry, numbers in resources.items()}}
    kernel_cache.write(key, facts, cubin)
    return CompiledKernel(source.file, arch, cubin, log, MappingProxyType(resources))


def parse_resources(log: str) -> dict[str, KernelResources]:
    """Each entry's resources out of a `ptxas -v` report. Spills of functions that an entry calls count as its own."""
    resources: dict[str, KernelResources] = {}
    entry, spills, stack = "", 0, 0
    for line in log.splitlines():
        if found := _ENTRY_LINE.search(line):
            entry, spills, stack = found[1], 0, 0
        elif found := _FRAME_LINE.search(line):
            stack = max(stack, int(found[1]))
            spills += int(found[2]) + int(found[3])
        elif found := _USED_LINE.search(line):
            resources[entry] = KernelResources(int(found[1]), spills, stack, int(found[2] or 0))
    return resources


def _text(nvrtc: Any, program: Any, what: str) -> bytes:
    """Bytes that NVRTC hands out in two calls: how many, then which."""
    size = _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    buffer = bytearray(size)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return bytes(buffer)


def _check(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise KernelCompileError(f"NVRTC reported {result[0].name} ({int(result[0])})")
    return result[1] if len(result) == 2 else result[1:]
