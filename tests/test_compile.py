"""Every kernel compiles with NVRTC alone, for every architecture, without spilling (no device needed)."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from helpers import CUDA, kernel_files, run_python, variants
from host_kernels import ENTRY
from hypothesis import given
from hypothesis import strategies as st

from graphkv import nvrtc
from graphkv.errors import CudaUnavailable, InvalidValue, KernelCompileError
from graphkv.nvrtc import KernelResources, arch_of, cache_key, compile_source, parse_resources, read_source

ARCHES = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120")
UNITS = [(file.name, defines) for file in kernel_files() for defines in variants(file)]
TINY = '#include "outer.cuh"\nextern "C" __global__ void tiny(int* out) { *out = VALUE; }\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel folder with one kernel, a header, and a header of that header."""
    (tmp_path / "tiny.cu").write_text(TINY)
    (tmp_path / "outer.cuh").write_text('#pragma once\n#include "inner.cuh"\n')
    (tmp_path / "inner.cuh").write_text("#pragma once\n#define VALUE 7 // padding\n")
    monkeypatch.setenv("GRAPHKV_KERNEL_DIR", str(tmp_path))
    return tmp_path


def test_there_are_kernels() -> None:
    assert UNITS


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("file", "defines"), UNITS, ids=lambda part: str(part).replace(" ", ""))
def test_compiles_without_spills(file: str, defines: dict[str, int | str], arch: str) -> None:
    made = compile_source(file, arch, defines)
    assert made.cubin.startswith(b"\x7fELF")
    assert set(made.resources) == set(ENTRY.findall((CUDA / file).read_text()))
    assert {entry: numbers.spill_bytes for entry, numbers in made.resources.items()} == dict.fromkeys(made.resources, 0)
    assert "warning" not in made.log.lower(), made.log


@pytest.mark.parametrize("file", kernel_files(), ids=lambda file: file.name)
def test_first_entry_is_named_after_the_file(file: Path) -> None:
    assert ENTRY.findall(file.read_text())[0] == file.stem


def test_case_J1_includes_are_our_own() -> None:
    own = {file.name for file in CUDA.iterdir()}
    for file in CUDA.iterdir():
        included = re.findall(r"#\s*include\s*(\S+)", file.read_text())
        assert [name for name in included if name.strip('"') not in own] == [], file.name


def test_case_J1_compiles_without_a_toolkit(tmp_path: Path) -> None:
    """A fresh process, a cold cache and no variable that points at a toolkit."""
    code = (
        "from graphkv.nvrtc import compile_source\n"
        f"for file, defines in {UNITS!r}: print(len(compile_source(file, 'sm_90a', defines).cubin))"
    )
    toolkit = dict.fromkeys(("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CPATH", "CPLUS_INCLUDE_PATH", "NVRTC_OPTIONS"))
    done = run_python(code, GRAPHKV_CACHE_DIR=str(tmp_path), PATH="/nonexistent", **toolkit)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(UNITS)
    assert len(list(tmp_path.glob("*.kernel"))) == len({(file, str(defines)) for file, defines in UNITS})


def test_case_J1_missing_header_names_the_folder(folder: Path) -> None:
    (folder / "inner.cuh").write_text("#include <cuda_fp8.h>\n")
    with pytest.raises(KernelCompileError, match=rf"'cuda_fp8.h' \(included by inner.cuh\) in {folder}"):
        compile_source("tiny.cu", "sm_90a")


def test_case_J1_missing_nvrtc_names_places_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise RuntimeError(f"no lib{name} in /somewhere/lib")

    monkeypatch.setattr("cuda.pathfinder.load_nvidia_dynamic_lib", absent)
    nvrtc._nvrtc.cache_clear()
    try:
        with pytest.raises(CudaUnavailable, match=r"CUDA_PATH.*pip install 'cuda-toolkit\[nvrtc\].*/somewhere/lib"):
            nvrtc.compiler_version()
    finally:
        nvrtc._nvrtc.cache_clear()


def test_kernel_folder_holds_sources_only() -> None:
    """A .py file below cuda/ would shadow NVIDIA's namespace package of that name."""
    assert {file.suffix for file in CUDA.rglob("*") if file.is_file()} <= {".cu", ".cuh"}


def test_kernel_dir_prefers_the_override_then_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GRAPHKV_KERNEL_DIR", raising=False)
    package = tmp_path / "graphkv"
    (package / "_kernels").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "__file__", str(package / "nvrtc.py"))
        assert nvrtc.kernel_dir() == package / "_kernels"
        (package / "_kernels").rmdir()
        assert nvrtc.kernel_dir() == tmp_path / "cuda"
        patch.setenv("GRAPHKV_KERNEL_DIR", "/elsewhere")
        assert nvrtc.kernel_dir() == Path("/elsewhere")


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((11, 0), "sm_110a"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_121"),
    ],
)
def test_arch_of(capability: tuple[int, int], arch: str) -> None:
    assert arch_of(*capability) == arch


def test_arch_of_an_old_device() -> None:
    with pytest.raises(CudaUnavailable, match=r"7\.5 is too old.*8\.0"):
        arch_of(7, 5)


@pytest.mark.parametrize("prefix", ["    ", "ptxas         .     "])  # NVRTC 13.0 and 13.5
def test_resources_are_read_from_the_report(prefix: str) -> None:
    log = f"""ptxas info    : 8 bytes gmem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
{prefix}24 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for helper
{prefix}0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Function properties for first
{prefix}0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers"""
    wanted = {"second": KernelResources(255, 32, 24, 1024), "first": KernelResources(10, 12, 0, 0)}
    assert parse_resources(log) == wanted


def test_spills_are_seen(folder: Path) -> None:
    """The spill test can fail: this kernel needs more registers than it is given."""
    body = "\n".join(f"float v{i} = in[{i} * n];" for i in range(64))
    total = "*".join(f"(v{i} + v{63 - i} * n)" for i in range(64))
    (folder / "spill.cu").write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 2) spill(volatile float* in, float* out, int n) {'
        f"{body}\n__syncthreads(); out[threadIdx.x] = {total};}}"
    )
    assert compile_source("spill.cu", "sm_90a").resources["spill"].spill_bytes > 0


def test_refused_source_brings_the_log(folder: Path) -> None:
    (folder / "tiny.cu").write_text(TINY.replace("VALUE", "undeclared"))
    with pytest.raises(KernelCompileError, match=r"(?s)NVRTC 1\d\.\d.* refused tiny\.cu .*sm_90a.*\"undeclared\""):
        compile_source("tiny.cu", "sm_90a")


@pytest.mark.parametrize(("arch", "defines"), [("compute_90", {}), ("sm_90a -I/", {}), ("sm_90a", {"A B": 1})])
def test_bad_arguments(folder: Path, arch: str, defines: dict[str, int]) -> None:
    with pytest.raises(InvalidValue):
        compile_source("tiny.cu", arch, defines)


def test_defines_reach_the_compiler(folder: Path) -> None:
    (folder / "outer.cuh").write_text("#ifndef VALUE\n#error no value\n#endif\n")
    with pytest.raises(KernelCompileError, match="no value"):
        compile_source("tiny.cu", "sm_90a")
    assert (
        compile_source("tiny.cu", "sm_90a", {"VALUE": 3}).cubin
        != compile_source("tiny.cu", "sm_90a", {"VALUE": 4}).cubin
    )


PARTS = st.tuples(st.text(max_size=3), st.text(max_size=3), st.dictionaries(st.text(max_size=3), st.text(max_size=3)))


@given(st.lists(PARTS, min_size=2, max_size=4, unique_by=repr))
def test_key_tells_sources_apart(sources: list[tuple[str, str, dict[str, str]]]) -> None:
    """Also where moving a boundary between two parts would give the same bytes."""
    keys = {
        cache_key(nvrtc.KernelSource(file, text, dict(sorted(headers.items()))), ("-o",), "nvrtc")
        for file, text, headers in sources
    }
    assert len(keys) == len({(file, text, tuple(sorted(headers.items()))) for file, text, headers in sources})


@given(data=st.data())
def test_key_follows_every_byte_of_an_included_header(data: st.DataObject) -> None:
    source = nvrtc.KernelSource("a.cu", "text", {"common.cuh": (CUDA / "common.cuh").read_text()})
    header = source.headers["common.cuh"]
    at = data.draw(st.integers(0, len(header) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda c: c != header[at]))
    changed = nvrtc.KernelSource("a.cu", "text", {"common.cuh": header[:at] + other + header[at + 1 :]})
    assert cache_key(source, (), "c") != cache_key(changed, (), "c")


def test_key_follows_options_compiler_and_transitive_headers(folder: Path) -> None:
    before = read_source("tiny.cu")
    (folder / "inner.cuh").write_text("#pragma once\n#define VALUE 8 // padding\n")
    after = read_source("tiny.cu")
    assert set(before.headers) == {"outer.cuh", "inner.cuh"}
    keys = [
        cache_key(source, options, compiler)
        for source, options, compiler in itertools.product((before, after), (("-a",), ("-b",)), ("13.0", "13.5"))
    ]
    assert len(set(keys)) == 8


def test_changed_header_is_compiled_anew(folder: Path) -> None:
    before = compile_source("tiny.cu", "sm_90a")
    assert compile_source("tiny.cu", "sm_90a") is before
    (folder / "inner.cuh").write_text("#pragma once\n#define VALUE 8 // padding\n")
    assert compile_source("tiny.cu", "sm_90a").cubin != before.cubin
