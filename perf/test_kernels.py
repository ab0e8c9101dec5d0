"""Each kernel of the cache at the sizes of the tables, cold: a node of a straight-line graph over rotating inputs.

A figure is GPU time per call, the gap to the next node included. `floor_us` is the bytes of a call at the read ceiling
of an H200; `peer_us` the best figure of another library's kernel on the same kind of machine, measured the same way.
The small CPU sizes only show that a change has not made the CPU path useless.
"""

from __future__ import annotations

from typing import Any

import pytest

from perf import inputs
from perf.inputs import Inputs
from perf.replay import Replay
from perf.timer import count_calls, gpu_timer

ROUNDS, REPLAYS, WARM_UP = 10, 3, 2

gpu = [pytest.mark.gpu, pytest.mark.benchmark(timer=gpu_timer)]


def device_of(size: str) -> str:
    return "cpu" if size == "cpu" else "cuda"


def measure(benchmark: Any, kernel: str, size: str, made: Inputs, peer_us: float | None) -> None:
    benchmark.group = kernel
    benchmark.extra_info |= {"table": "kernels", "kernel": kernel, "size": size, "bytes": made.num_bytes}
    if device_of(size) == "cpu":
        benchmark.pedantic(made.calls[0], rounds=ROUNDS, warmup_rounds=WARM_UP)
        return
    benchmark.extra_info |= {"sets": len(made.calls), "floor_us": made.floor_us, "peer_us": peer_us}
    count_calls(len(made.calls))
    replay = Replay([lambda _, call=call: call() for call in made.calls])
    with replay.timed():
        benchmark.pedantic(replay.launch, rounds=ROUNDS, iterations=REPLAYS, warmup_rounds=WARM_UP)


def sizes(*cases: tuple[Any, ...]) -> Any:
    """Parameters by name of the size; all but "cpu" need a GPU."""
    return [pytest.param(*case, id=case[0], marks=[] if case[0] == "cpu" else gpu) for case in cases]


@pytest.mark.parametrize(("size", "tokens", "peer"), sizes(("cpu", 64, None), ("256", 256, 1.8), ("8192", 8192, 7.73)))
def test_store_index_k(benchmark: Any, size: str, tokens: int, peer: float | None) -> None:
    pages = 64 if size == "cpu" else 131072
    made = inputs.store_index_k(tokens, device_of(size), pages)
    measure(benchmark, "store_index_k fp8", size, made, peer)


@pytest.mark.parametrize(("size", "tokens", "peer"), sizes(("cpu", 64, None), ("256", 256, 2.25), ("8192", 8192, 9.0)))
def test_store_latent(benchmark: Any, size: str, tokens: int, peer: float | None) -> None:
    pages = 64 if size == "cpu" else 32768
    made = inputs.store_latent(tokens, device_of(size), pages)
    measure(benchmark, "store_latent fp8_ds_mla", size, made, peer)


@pytest.mark.parametrize(("size", "tokens", "peer"), sizes(("cpu", 64, None), ("256", 256, 4.1), ("8192", 8192, 16.7)))
def test_store_layer(benchmark: Any, size: str, tokens: int, peer: float | None) -> None:
    pages = 64 if size == "cpu" else 32768
    made = inputs.store_layer(tokens, device_of(size), pages)
    measure(benchmark, "store_layer fp8_ds_mla + fp8", size, made, peer)


@pytest.mark.parametrize(
    ("size", "tokens", "requests", "peer"),
    sizes(("cpu", 1024, 4, None), ("128Kx1", 131072, 1, 14.1), ("128Kx256", 131072, 256, 29.8)),
)
def test_gather_index_k(benchmark: Any, size: str, tokens: int, requests: int, peer: float | None) -> None:
    made = inputs.gather_index_k(tokens, requests, device_of(size))
    measure(benchmark, "gather_index_k fp8", size, made, peer)


@pytest.mark.parametrize(
    ("size", "rows", "context", "next_n", "peer"),
    sizes(
        ("cpu", 2, 256, 1, None),
        ("1x4K", 1, 4096, 1, 3.5),
        ("1x64K", 1, 65536, 1, 6.0),
        ("64x4K", 64, 4096, 1, 13.6),
        ("64x64K", 64, 65536, 1, 144.5),
        ("64x64K, next_n 2", 64, 65536, 2, 148.0),
        ("64x64K, next_n 3", 64, 65536, 3, 414.0),
        ("64x64K, next_n 4", 64, 65536, 4, 302.0),
        ("1x64K, next_n 4", 1, 65536, 4, 8.0),
    ),
)
def test_paged_index_logits(
    benchmark: Any, size: str, rows: int, context: int, next_n: int, peer: float | None
) -> None:
    made = inputs.paged_index_logits(rows, context, device_of(size), next_n)
    measure(benchmark, "paged_index_logits fp8", size, made, peer)


@pytest.mark.parametrize(
    ("size", "rows", "context", "peer"),
    sizes(
        ("cpu", 2, 4096, None),
        ("1x64K", 1, 65536, 7.3),
        ("64x4K", 64, 4096, 3.5),
        ("64x16K", 64, 16384, 7.4),
        ("64x64K", 64, 65536, 20.0),
        ("64x64K, narrow", 64, 65536, 35.0),
        ("64x128K", 64, 131072, 32.3),
        ("256x8K", 256, 8192, 7.7),
    ),
)
def test_topk(benchmark: Any, size: str, rows: int, context: int, peer: float | None) -> None:
    made = inputs.topk(rows, context, device_of(size), narrow=size.endswith("narrow"))
    measure(benchmark, "topk 2048", size, made, peer)


@pytest.mark.parametrize(
    ("size", "rows", "peer"), sizes(("cpu", 2, None), ("1", 1, None), ("64", 64, None), ("256", 256, None))
)
def test_window_slots(benchmark: Any, size: str, rows: int, peer: float | None) -> None:
    measure(benchmark, "window_slots 4096", size, inputs.window_slots(rows, 4096, device_of(size)), peer)


@pytest.mark.parametrize(
    ("size", "rows", "heads", "peer"),
    sizes(("cpu", 1, 4, None), ("1", 1, 128, 19.1), ("32", 32, 128, 68.6), ("128", 128, 128, 206.6)),
)
def test_sparse_mla_decode(benchmark: Any, size: str, rows: int, heads: int, peer: float | None) -> None:
    pages = 64 if size == "cpu" else 16384
    made = inputs.sparse_mla_decode(rows, heads, device_of(size), pages)
    measure(benchmark, "sparse_mla_decode fp8_ds_mla", size, made, peer)
