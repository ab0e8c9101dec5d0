"""What every benchmark shares: GPU-only ones are skipped where there is none, and the JSON says on what it was made."""

from __future__ import annotations

import gc
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pytest
import torch

from graphkv.errors import CudaUnavailable
from graphkv.nvrtc import compiler_version
from perf.timer import count_calls

_GPU_FACTS = ("name", "driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="there is no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info["graphkv"] = facts()


def pytest_configure() -> None:
    torch.set_num_threads(1)  # on few cores a second thread makes CPU figures a matter of luck


@pytest.fixture(autouse=True)
def _one_call_each() -> Iterator[None]:
    count_calls(1)
    yield
    gc.collect()  # captured graphs hold memory and die in cycles
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def facts() -> dict[str, str]:
    """Everything that a figure depends on and that a later reader cannot find out."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda-bindings": _version("cuda-bindings"),
        "pytest-benchmark": _version("pytest-benchmark"),
        "torch threads": str(torch.get_num_threads()),
    }
    try:
        found["NVRTC"] = ".".join(map(str, compiler_version()))
    except CudaUnavailable:
        found["NVRTC"] = "none"
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name()
        found["SMs"] = str(torch.cuda.get_device_properties(0).multi_processor_count)
        found |= _from_driver()
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _from_driver() -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FACTS)}", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if answer.returncode:
        return {}
    return dict(zip(_GPU_FACTS[1:], answer.stdout.strip().split(", ")[1:], strict=False))
