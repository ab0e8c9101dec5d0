"""Devices, markers and seeds that every test shares."""

from __future__ import annotations

import importlib.util
import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soak
import torch
from hypothesis import settings

SEED = int(os.environ.get("GRAPHKV_TEST_SEED", "0"))

settings.register_profile("graphkv", deadline=None, print_blob=True)  # a shared machine's time proves nothing
settings.load_profile("graphkv")


def pytest_addoption(parser: pytest.Parser) -> None:
    if importlib.util.find_spec("pytest_benchmark") is None:  # pyproject.toml names its option
        parser.addoption("--benchmark-skip", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "host: runs a kernel on the CPU; repeated under the sanitizers")


def pytest_report_header() -> str:
    return f"graphkv: GRAPHKV_TEST_SEED={SEED}, CUDA devices: {torch.cuda.device_count()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="there is no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in soak.DONE:
        terminalreporter.write_line(f"soaked {line}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that graphkv runs on."""
    return torch.device(request.param)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's name and $GRAPHKV_TEST_SEED only."""
    return np.random.default_rng((SEED, zlib.crc32(request.node.nodeid.encode())))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True, scope="session")
def _own_kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tests neither trust nor fill the user's cache."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHKV_CACHE_DIR", str(folder))
        yield folder
