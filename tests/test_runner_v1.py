"""The decode loop over V1, the baseline: the same bytes as V2 from the same workload, and clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mix import MixModel, gathered, mix_config, run_workload
from probe import PER_REQUEST, WIDTH, ProbeModel, accepted_of, probe_config

from graphkv.baseline.runner import RESULTS_KEPT, V1Runner
from graphkv.errors import DeviceFault, InvalidValue, OutOfBlocks, OutOfRows, UnsupportedCombination
from graphkv.layout import Role, Side
from graphkv.pool import NULL_PATTERN
from graphkv.runtime import DecodeRuntime
from graphkv.selection.requirements import Requirements
from graphkv.step import StepContext, StepOutput

FORMATS = [("fp32", "fp32"), ("bf16", "bf16"), ("fp8", "fp8"), ("fp8_ds_mla", "fp4"), ("bf16", "fp8")]


# the same workload on both ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize(("latent", "index_k"), FORMATS, ids=lambda x: x)
def test_v1_and_v2_leave_equal_index_k_and_latents(
    device: torch.device, latent: str, index_k: str, next_n: int
) -> None:
    options = {"index_k_scale": "linear", "latent_scale": 0.5} if (latent, index_k) == FORMATS[-1] else {}
    config = mix_config(latent, index_k, draft=next_n > 1, **options)
    sizes = {"max_rows": 4, "max_seq_len": 144, "num_blocks": 40, "next_n": next_n, "prefill_chunk": 48}
    v1 = V1Runner(config, MixModel(config, device), device=device, **sizes)
    v2 = DecodeRuntime(config, MixModel(config, device), device=device, buckets=[1, 2, 3, 4], **sizes)
    ends = []
    for runner in (v1, v2):
        sequences, results = run_workload(runner)
        runner.retire()
        state = [(s.row, s.length, s.tokens.tolist()) for s in sequences]
        ends.append((state, results, gathered(runner, sequences)))
        runner.check()
    assert v2.manager.stats().tokens_matched == 43, "two blocks and a part of one, which V1 computed again"
    (state1, results1, bytes1), (state2, results2, bytes2) = ends
    assert results1 == results2
    assert state1 == state2
    assert bytes1.keys() == bytes2.keys()
    for key, want in bytes2.items():
        np.testing.assert_array_equal(bytes1[key], want, err_msg=str(key), strict=True)
        assert len(np.unique(want, axis=0)) > len(want) // 2, "rows that are all alike would prove nothing"


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("draft", ["", "FS"], ids=["target", "draft"])
def test_the_probe_writes_the_foretold_bytes_and_no_others(device: torch.device, next_n: int, draft: str) -> None:
    config = probe_config(draft=draft)
    model = ProbeModel(config, 512, device)
    runner = V1Runner(
        config, model, device=device, max_rows=4, max_seq_len=112, num_blocks=40, next_n=next_n, prefill_chunk=48
    )
    images = {}
    for key, pool in runner.pools._pools.items():
        pool.data.fill_(NULL_PATTERN)
        images[key] = np.full(pool.data.numel(), NULL_PATTERN, np.uint8)

    def wrote(request: int, row: int, begin: int, end: int, sides: tuple[Side, ...]) -> None:
        blocks = runner.manager.blocks(row)
        for position in range(begin, end):
            slot = blocks[position // 16] * 16 + position % 16
            for (side, role, layer), image in images.items():
                if side in sides:
                    pair = np.array([request * PER_REQUEST + position, position + 1000.0 * layer], np.float32)
                    record = np.tile(pair, WIDTH // 2 if role is Role.INDEX_K else WIDTH).view(np.uint8)
                    image[slot * record.size : (slot + 1) * record.size] = record

    sizes = {1: 3, 2: 70, 3: 16}
    sequences = {request: runner.open(np.arange(size) + request * PER_REQUEST) for request, size in sizes.items()}
    runner.prefill(list(sequences.values()))
    lengths = dict(sizes)
    for request, sequence in sequences.items():
        wrote(request, sequence.row, 0, sizes[request], (Side.TARGET,))
    for order in ([1, 2, 3], [3, 1], [2], [3, 2, 1], [2, 1]):
        step = runner.step([sequences[request] for request in order])
        for request in order:
            length = lengths[request]
            wrote(request, sequences[request].row, length, length + next_n, config.sides)
            lengths[request] += accepted_of(request * PER_REQUEST + length, next_n)
    runner.results(step)
    runner.device.synchronize()
    for (side, role, layer), image in images.items():
        np.testing.assert_array_equal(runner.pools.pool(side, role, layer).data.cpu().numpy(), image)
    for request, sequence in sequences.items():
        assert sequence.length == lengths[request]
        np.testing.assert_array_equal(sequence.tokens, np.arange(lengths[request] + 1) + request * PER_REQUEST)
    counts = model.counts[Side.TARGET].cpu().numpy()
    assert counts[: 2 * next_n].all(), "the last step's tokens found no tag through the tables"
    runner.check()


# the runner ---------------------------------------------------------------------------------------------------------


def runner_of(device: torch.device | str, **options: object) -> V1Runner:
    config = probe_config()
    sizes = {"max_rows": 2, "max_seq_len": 60, "num_blocks": 8, "prefill_chunk": 32} | options
    return V1Runner(config, ProbeModel(config, 512, torch.device(device)), device=device, **sizes)


def test_a_refused_batch_changes_nothing(device: torch.device) -> None:
    runner = runner_of(device)  # 7 blocks of 16 tokens
    a, b = runner.open(np.arange(48) + PER_REQUEST), runner.open(np.arange(60) + 2 * PER_REQUEST)
    runner.prefill([a, b])
    runner.retire()
    before = runner.manager.stats()
    with pytest.raises(OutOfBlocks, match="1 more blocks needed, 0 free"):
        runner.step([b, a])
    assert runner.manager.stats() == before
    assert (a.length, b.length) == (48, 60)
    with pytest.raises(OutOfRows):
        runner.open([1])
    runner.close(b)
    runner.close(b)
    assert b.tokens.tolist() == [2 * PER_REQUEST + i for i in range(61)]
    c = runner.open(np.arange(57) + 3 * PER_REQUEST)
    step = runner.step([a])
    assert runner.results(step).tokens.tolist() == [[PER_REQUEST + 49]]
    with pytest.raises(OutOfBlocks, match="4 more blocks needed, 3 free"):
        runner.prefill([c])
    assert c.length == 0
    runner.check()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r, a, b: r.step([]), "at least one sequence"),
        (lambda r, a, b: r.step([b]), "prefill it first"),
        (lambda r, a, b: r.step([a, a]), "named more than once"),
        (lambda r, a, b: r.prefill([a]), "nothing to prefill"),
        (lambda r, a, b: r.prefill([b, b]), "named more than once"),
        (lambda r, a, b: r.open([]), "0 tokens is not within 1 .. max_seq_len 60"),
        (lambda r, a, b: r.open([0.5]), "one-dimensional array of integers"),
        (lambda r, a, b: r.append(a, np.zeros(60, int)), "appending 60 tokens to 5"),
        (lambda r, a, b: r.rewind(b, 1), "prefill it before rewinding"),
        (lambda r, a, b: r.rewind(a, 5), "5 is more than the 4 tokens"),
        (lambda r, a, b: r.results(99), "never submitted"),
        (lambda r, a, b: runner_of("cpu").step([a]), "belongs to another runtime"),
        (lambda r, a, b: (r.close(b), r.prefill([b])), "closed; open a new one"),
        (lambda r, a, b: runner_of("cpu", prefill_chunk=0), "prefill_chunk must be positive"),
        (lambda r, a, b: runner_of("cpu", next_n=17), "next_n within 1 .. block_size 16"),
    ],
)
def test_a_careless_caller_of_the_runner_is_told(call: object, message: str) -> None:
    runner = runner_of("cpu")
    a, b = runner.open(np.arange(4) + PER_REQUEST), runner.open(np.arange(4) + 2 * PER_REQUEST)
    runner.prefill([a])
    runner.retire()
    with pytest.raises(InvalidValue, match=message):
        call(runner, a, b)  # type: ignore[operator]
    runner.check()
    assert runner.results(runner.step([a])).tokens.tolist() == [[PER_REQUEST + 5]]


def test_v1_is_refused_what_it_cannot_do() -> None:
    with pytest.raises(UnsupportedCombination, match=r"use_kv_cache_manager_v2=False.*graph=True"):
        runner_of("cpu", requirements=Requirements(graph=True))


def test_only_the_last_results_are_kept() -> None:
    runner = runner_of("cpu", max_seq_len=100)
    a = runner.open([PER_REQUEST])
    first = runner.prefill([a])
    assert runner.results(first).tokens.tolist() == [[PER_REQUEST + 1]]
    for _ in range(RESULTS_KEPT):
        last = runner.step([a])
    assert runner.results(last).step == last
    assert runner.results(first + 1).step == first + 1
    with pytest.raises(InvalidValue, match="no longer kept"):
        runner.results(first)


def test_a_model_that_accepts_more_than_it_was_given_is_a_fault() -> None:
    config = mix_config("bf16", "bf16")

    def model(step: StepContext) -> StepOutput:
        accepted = torch.full((step.rows,), 3 if step.kind == "decode" else 1, dtype=torch.int32)
        return StepOutput(torch.zeros(step.rows, 2, dtype=torch.int64), accepted)

    runner = V1Runner(config, model, device="cpu", max_rows=2, max_seq_len=60, num_blocks=8, next_n=2)
    a = runner.open([1])
    runner.prefill([a])
    with pytest.raises(DeviceFault, match=r"accepted \[3\] of 2 query tokens"):
        runner.results(runner.step([a]))


def test_a_step_does_not_wait_for_the_one_before_unless_it_must() -> None:
    for next_n, in_flight in ((1, 2), (3, 1)):
        runner = runner_of("cpu", next_n=next_n)
        a = runner.open([PER_REQUEST])
        runner.prefill([a])
        runner.step([a])
        runner.step([a])
        assert runner.submitted - runner.retired == in_flight


def test_each_of_many_chunks_has_its_own_results(device: torch.device) -> None:
    runner = runner_of(device, prefill_chunk=16)
    a, b = runner.open(np.arange(20) + PER_REQUEST), runner.open(np.arange(37) + 2 * PER_REQUEST)
    last = runner.prefill([a, b])
    assert last == 4
    found = [(r.sequences, r.accepted.tolist(), r.tokens.tolist()) for r in map(runner.results, range(1, 5))]
    assert found == [
        ((a,), [16], [[-1]]),
        ((a, b), [4, 12], [[PER_REQUEST + 20], [-1]]),
        ((b,), [16], [[-1]]),
        ((b,), [9], [[2 * PER_REQUEST + 37]]),
    ]
