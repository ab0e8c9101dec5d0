"""The manager beside the block managers of other engines and a loop over requests; skipped where one is not installed.

Install them without their dependencies, and then what their imports miss: `pip install --no-deps vllm sglang`. The host
alone is measured, so no GPU is needed.
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest

from perf.peers import ALL, BLOCK_SIZE, Books, Ids

BATCH, CACHED = 256, 32 * 1024
PERIODS, ROUNDS = 12, 100


def books(name: str, num_blocks: int, max_rows: int, max_tokens: int) -> Books:
    kind, package = ALL[name]
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return kind(num_blocks, max_rows, max_tokens)


def note(benchmark: Any, name: str, figure: str) -> None:
    """Facts of a benchmark that ran, for the tables."""
    package = ALL[name][1]
    benchmark.group = f"books: {figure}"
    benchmark.extra_info |= {"table": "peers", "figure": figure, "way": name}
    if package is not None:
        benchmark.extra_info["version"] = version(package)
    times = benchmark.stats.stats.data
    benchmark.extra_info["mean_us"] = statistics.mean(times) * 1e6
    benchmark.extra_info["p99_us"] = statistics.quantiles(times, n=100)[98] * 1e6


def prompt(seed: int, length: int) -> Ids:
    return np.random.default_rng(seed).integers(0, 100_000, length, np.int32)


@pytest.mark.parametrize("name", list(ALL))
def test_books_step(benchmark: Any, name: str) -> None:
    """A decode step of 256 requests whose ends are spread evenly over a block, so that 4 blocks fill up in each."""
    made = books(name, 60 * BATCH, BATCH, 4096)
    for i in range(BATCH):
        assert made.open(prompt(i, 1024 + i % BLOCK_SIZE)) == 0
    benchmark.pedantic(made.step, rounds=PERIODS * BLOCK_SIZE, warmup_rounds=BLOCK_SIZE)
    note(benchmark, name, f"step of {BATCH}")


@pytest.mark.parametrize("figure", ["open", "close"])
@pytest.mark.parametrize("name", list(ALL))
def test_books_prompt(benchmark: Any, name: str, figure: str) -> None:
    """A prompt of 32K cached tokens and 100 others arrives, and ends."""
    made = books(name, 3000, 4, CACHED + 4096)
    known = prompt(1, CACHED)
    made.open(np.append(known, prompt(2, BLOCK_SIZE)))
    made.close()
    seeds = itertools.count(3)

    def arrive() -> None:
        assert made.open(np.append(known, prompt(next(seeds), 100))) == CACHED

    if figure == "open":
        benchmark.pedantic(arrive, teardown=made.close, rounds=ROUNDS, warmup_rounds=3)
    else:
        benchmark.pedantic(made.close, setup=arrive, rounds=ROUNDS, warmup_rounds=3)
    note(benchmark, name, f"{figure}, {CACHED} tokens cached")
