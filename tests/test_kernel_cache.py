"""Case J4: the disk cache under many processes, killed writers, damage, and folders that cannot be written."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import python_call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphkv import kernel_cache, nvrtc
from graphkv.nvrtc import compile_source

KEY = hashlib.sha256(b"key").hexdigest()
FACTS = {"log": "a log", "resources": {"tiny": {"registers": 8}}}
CODE = bytes(range(256)) * 5
COMPILE = """
import hashlib
from graphkv.nvrtc import compile_source
print(hashlib.sha256(compile_source("tiny.cu", "sm_90a").cubin).hexdigest())
"""
# Stays for ever where a process that loses power may die: the bytes are handed over, the entry has no name yet.
STAY_WHILE_WRITING = (
    "import os, signal\nos.fsync = lambda file: (print('writing', flush=True), signal.pause())\n" + COMPILE
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a kernel folder with one kernel."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.cu").write_text('extern "C" __global__ void tiny(int* out) { *out = 7; }\n')
    monkeypatch.setenv("GRAPHKV_KERNEL_DIR", str(sources))
    monkeypatch.setenv("GRAPHKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "_compiled", {})
    return tmp_path / "cache"


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The key of each compile that NVRTC was asked for."""
    keys: list[str] = []
    compile_ = nvrtc._compile

    def counted(key: str, *rest: Any) -> nvrtc.CompiledKernel:
        keys.append(key)
        return compile_(key, *rest)

    monkeypatch.setattr(nvrtc, "_compile", counted)
    return keys


def forget() -> None:
    """As a new process would be: nothing in memory."""
    nvrtc._compiled.clear()


def test_case_J4_eight_processes_and_a_killed_writer(cache: Path, compiles: list[str]) -> None:
    victim = subprocess.Popen(**python_call(STAY_WHILE_WRITING), stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "writing\n"
    others = [subprocess.Popen(**python_call(COMPILE), stdout=subprocess.PIPE, text=True) for _ in range(8)]
    printed = [process.communicate(timeout=300)[0].strip() for process in others]
    victim.kill()
    victim.communicate(timeout=300)
    assert victim.returncode == -signal.SIGKILL
    assert [process.returncode for process in others] == [0] * 8
    assert len(set(printed)) == 1
    # What they left behind is one whole entry, and what the killed one left behind.
    assert [file.suffix for file in sorted(cache.iterdir(), key=lambda file: file.suffix)] == [".kernel", ".tmp"]
    assert hashlib.sha256(compile_source("tiny.cu", "sm_90a").cubin).hexdigest() == printed[0]
    assert compiles == []


def test_case_J4_killed_writers_files_are_swept(cache: Path) -> None:
    cache.mkdir()
    old, young = cache / "old.tmp", cache / "young.tmp"
    for file in (old, young):
        file.write_bytes(b"half an ent")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    assert kernel_cache.write(KEY, FACTS, CODE)
    assert not old.exists()
    assert young.exists()  # its writer may be alive


@pytest.mark.parametrize("keep", [0, 1, 16, 47, 48, 56, 0.5, -1])
def test_case_J4_truncated_entry_is_rebuilt(cache: Path, compiles: list[str], keep: float) -> None:
    whole = compile_source("tiny.cu", "sm_90a")
    (entry,) = cache.iterdir()
    stored = entry.read_bytes()
    entry.write_bytes(stored[: int(keep * len(stored)) if keep == 0.5 else int(keep)])
    forget()
    assert compile_source("tiny.cu", "sm_90a").cubin == whole.cubin
    assert len(compiles) == 2
    forget()
    assert compile_source("tiny.cu", "sm_90a").cubin == whole.cubin
    assert len(compiles) == 2  # the rebuilt entry serves


def test_case_J4_corrupted_entry_is_rebuilt(cache: Path, compiles: list[str]) -> None:
    whole = compile_source("tiny.cu", "sm_90a")
    (entry,) = cache.iterdir()
    stored = bytearray(entry.read_bytes())
    stored[-100] ^= 1
    entry.write_bytes(stored)
    forget()
    assert compile_source("tiny.cu", "sm_90a").cubin == whole.cubin
    assert len(compiles) == 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_case_J4_no_damage_goes_unseen(cache: Path, data: st.DataObject) -> None:
    assert kernel_cache.write(KEY, FACTS, CODE)
    assert kernel_cache.read(KEY) == (FACTS, CODE)
    entry = cache / f"{KEY}.kernel"
    stored = entry.read_bytes()
    at, other = data.draw(st.integers(0, len(stored) - 1)), data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(stored) - 1))
    for damaged in (
        stored[:at] + bytes([stored[at] ^ other]) + stored[at + 1 :],
        stored[:cut],
        stored + b"\0",
        stored[:at] + stored[at + 1 :],
    ):
        entry.write_bytes(damaged)
        assert kernel_cache.read(KEY) is None


def test_case_J4_entry_under_anothers_name_is_damaged(cache: Path) -> None:
    assert kernel_cache.write(KEY, FACTS, CODE)
    other = hashlib.sha256(b"another").hexdigest()
    (cache / f"{KEY}.kernel").rename(cache / f"{other}.kernel")
    assert kernel_cache.read(other) is None


def test_case_J4_unusable_folder_is_no_error(cache: Path, compiles: list[str]) -> None:
    cache.write_bytes(b"a file where the folder should be")  # refused for every user, root too
    assert compile_source("tiny.cu", "sm_90a").cubin
    forget()
    assert compile_source("tiny.cu", "sm_90a").cubin
    assert len(compiles) == 2
    assert not kernel_cache.write(KEY, FACTS, CODE)


def test_case_J4_read_only_folder_still_serves(cache: Path, compiles: list[str]) -> None:
    whole = compile_source("tiny.cu", "sm_90a")
    cache.chmod(0o555)
    try:
        forget()
        assert compile_source("tiny.cu", "sm_90a").cubin == whole.cubin
        assert len(compiles) == 1
        assert compile_source("tiny.cu", "sm_80").cubin  # cannot be kept (unless root writes it), and is no error
    finally:
        cache.chmod(0o755)


def test_case_J4_full_disk_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert not kernel_cache.write(KEY, FACTS, CODE)
    assert list(cache.iterdir()) == []


def test_case_J4_another_user_may_read_what_the_umask_allows(cache: Path) -> None:
    before = os.umask(0o022)
    try:
        assert kernel_cache.write(KEY, FACTS, CODE)
    finally:
        os.umask(before)
    assert stat.S_IMODE((cache / f"{KEY}.kernel").stat().st_mode) == 0o644


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKV_CACHE_DIR", "/chosen")
    assert kernel_cache.cache_dir() == Path("/chosen")
    monkeypatch.delenv("GRAPHKV_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert kernel_cache.cache_dir() == Path("/xdg/graphkv/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert kernel_cache.cache_dir() == Path("/home/someone/.cache/graphkv/kernels")


def test_threads_compile_a_source_once(cache: Path, compiles: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: compile_source("tiny.cu", "sm_90a"), range(16)))
    assert len(compiles) == 1
    assert all(one is made[0] for one in made)
