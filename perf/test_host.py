"""The host side of a steady decode step, without the launch: extend, journal, packet, publish.

`test_host_step[B]` runs on the CPU device, whose copies and events cost nothing; `[B-copy]` and `[B-pull]` on a GPU,
with the driver's calls. `test_host_step_eager` is the same metadata prepared the engines' way. On the CPU device that
way is charged for its fresh tensors and tables only, as the chain of torch ops behind them would run on a device; on a
GPU it is charged for queueing the chain too. Neither waits for the GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from perf.engine_way import beside, check_agreement
from perf.world import StepParts, leave_out_launches, steady_runtime, synchronize, write_results

ROWS = (1, 32, 256, 1024)
ROUNDS = 1000
WARM_UP = 50

WAYS = [pytest.param(rows, "cpu", "copy", id=str(rows)) for rows in ROWS] + [
    pytest.param(rows, "cuda", upload, id=f"{rows}-{upload}", marks=pytest.mark.gpu)
    for upload in ("copy", "pull")
    for rows in ROWS
]
DEVICES = [pytest.param(rows, "cpu", id=str(rows)) for rows in ROWS] + [
    pytest.param(rows, "cuda", id=f"{rows}-cuda", marks=pytest.mark.gpu) for rows in ROWS
]


def group(rows: int, device: str) -> str:
    return f"host side of a step, batch {rows}, {device}"


def facts(rows: int, device: str, way: str) -> dict[str, Any]:
    return {"table": "host", "rows": rows, "device": device, "way": way}


@pytest.mark.parametrize(("rows", "device", "upload"), WAYS)
def test_host_step(benchmark: Any, rows: int, device: str, upload: str) -> None:
    runtime, batch = steady_runtime(rows, device, upload=upload, prefix_caching=False)
    leave_out_launches(runtime)

    def retire() -> None:
        write_results(runtime)
        runtime.retire()
        synchronize(device)

    benchmark.group = group(rows, device)
    benchmark.extra_info |= facts(rows, device, upload if device == "cuda" else "step")
    before = runtime.manager.length[batch.rows].copy()
    benchmark.pedantic(lambda: runtime.step(batch), rounds=ROUNDS, warmup_rounds=WARM_UP, setup=retire)
    assert (runtime.manager.length[batch.rows] - before >= ROUNDS).all()
    runtime.check()


@pytest.mark.parametrize(("rows", "device"), DEVICES)
def test_host_step_eager(benchmark: Any, rows: int, device: str) -> None:
    runtime, _ = steady_runtime(rows, device)
    check_agreement(runtime)
    baseline = beside(runtime)

    def prepare() -> None:
        seq_len, table = baseline.upload()
        if device == "cuda":
            baseline.derive(seq_len, table)

    benchmark.group = group(rows, device)
    benchmark.extra_info |= facts(rows, device, "eager")
    benchmark.pedantic(prepare, rounds=ROUNDS // 4, warmup_rounds=WARM_UP, setup=lambda: synchronize(device))
    synchronize(device)


@pytest.mark.parametrize("part", StepParts.ORDER)
@pytest.mark.parametrize(("rows", "device", "upload"), [way for way in WAYS if way.values[0] == 256])
def test_host_part(benchmark: Any, part: str, rows: int, device: str, upload: str) -> None:
    runtime, batch = steady_runtime(rows, device, upload=upload)
    leave_out_launches(runtime)
    parts = StepParts(runtime, batch)
    before = StepParts.ORDER[: StepParts.ORDER.index(part)]

    def up_to_it() -> None:
        parts.finish()
        synchronize(device)
        parts.run(before)

    benchmark.group = f"parts of the host side, batch {rows}, {device} {upload}"
    benchmark.extra_info |= {**facts(rows, device, upload), "table": "parts", "part": part}
    benchmark.pedantic(parts.run, args=((part,),), rounds=ROUNDS, warmup_rounds=WARM_UP, setup=up_to_it)
    parts.finish()
    runtime.check()


@pytest.mark.parametrize("rows", ROWS)
def test_host_index(benchmark: Any, rows: int) -> None:
    """With prefix caching, what `step` does behind the launch: the blocks that filled up become findable."""
    runtime, batch = steady_runtime(rows, "cpu")
    leave_out_launches(runtime)
    index, manager = runtime.manager.index_commits, runtime.manager

    def submit() -> None:
        manager.index_commits = lambda most: None  # type: ignore[method-assign]
        runtime.step(batch)
        del manager.index_commits
        write_results(runtime)
        runtime.retire()

    benchmark.group = "blocks become findable"
    benchmark.extra_info |= {**facts(rows, "cpu", "index"), "table": "index"}
    benchmark.pedantic(index, rounds=ROUNDS, warmup_rounds=WARM_UP, setup=submit)
    runtime.check()


@pytest.mark.parametrize(("rows", "device"), DEVICES)
def test_host_retire(benchmark: Any, rows: int, device: str) -> None:
    """Results of a finished step: read, learned, blocks given back. Not part of the step above; once a step too."""
    runtime, batch = steady_runtime(rows, device)
    leave_out_launches(runtime)

    def submit() -> None:
        runtime.step(batch)
        write_results(runtime)
        synchronize(device)

    benchmark.group = "results of a step"
    benchmark.extra_info |= {**facts(rows, device, "retire"), "table": "retire"}
    benchmark.pedantic(runtime.retire, rounds=ROUNDS, warmup_rounds=WARM_UP, setup=submit)
    runtime.check()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
def test_host_launch(benchmark: Any, rows: int) -> None:
    """The launch itself, of the whole step's graph, with the GPU idle."""
    runtime, batch = steady_runtime(rows, "cuda")
    parts = StepParts(runtime, batch)

    def publish() -> None:
        parts.finish(launched=True)
        parts.run(StepParts.ORDER[:-1])
        synchronize("cuda")

    benchmark.group = "launch"
    benchmark.extra_info |= {**facts(rows, "cuda", "launch"), "table": "launch", "nodes": runtime.graph_nodes[rows]}
    launch = runtime._engine.graphs.launch
    benchmark.pedantic(lambda: launch(rows), rounds=ROUNDS // 2, warmup_rounds=WARM_UP, setup=publish)
    parts.finish(launched=True)
    runtime.check()
