"""Live sets keep their addresses; sides are rebound only while a step function runs, and always restored."""

from __future__ import annotations

import pytest
import torch
from probe import probe_config, probe_runtime

from graphkv import DecodeRuntime, InvalidValue, Side, StepContext, StepOutput


def test_views_of_a_shape_are_the_same_storage_every_time(device: torch.device) -> None:
    runtime, _, _ = probe_runtime(device)
    first, again, wider = runtime.metadata(2), runtime.metadata(2), runtime.metadata(4)
    assert first is again
    for name, tensor in first.tensors().items():
        assert tensor.data_ptr() == getattr(wider, name).data_ptr(), name
        assert tensor.is_contiguous(), name
    with pytest.raises(InvalidValue, match="a step of 5 rows and 5 tokens does not fit"):
        runtime.metadata(5)


class SideTester:
    """Rebinds, raises inside, and keeps what it saw."""

    def __init__(self) -> None:
        self.context: StepContext | None = None
        self.seen: list[str] = []

    def __call__(self, step: StepContext) -> StepOutput:
        self.context = step
        target = step.metadata
        with pytest.raises(InvalidValue, match="draft side has no live set in this step yet"), step.side(Side.DRAFT):
            pass
        before = {name: tensor.clone() for name, tensor in target.tensors().items()}
        draft = step.derive(Side.DRAFT, 1, shift=1)
        for name, tensor in draft.tensors().items():
            assert tensor.data_ptr() != getattr(target, name).data_ptr(), f"{name} is shared by both sides"
        with pytest.raises(RuntimeError, match="inside"), step.side(Side.DRAFT) as bound:  # noqa: PT012
            assert bound is step.metadata is draft
            with step.side(Side.TARGET):
                assert step.metadata is target
            assert step.metadata is draft
            raise RuntimeError("inside")
        assert step.metadata is target
        assert all(torch.equal(tensor, before[name]) for name, tensor in target.tensors().items())
        self.seen.append(step.kind)
        return StepOutput(torch.zeros(step.rows, step.next_n, dtype=torch.int64))


def test_sides_are_disjoint_and_restored_also_after_an_error() -> None:
    model = SideTester()
    runtime = DecodeRuntime(
        probe_config(draft="F"), model, device="cpu", max_rows=2, max_seq_len=60, num_blocks=10, mode="eager"
    )
    a = runtime.open([1, 2, 3])
    runtime.prefill([a])
    runtime.step([a])
    assert model.seen[-2:] == ["prefill", "decode"]
    assert model.context is not None
    with (
        pytest.raises(InvalidValue, match="rebinding between replays would change nothing"),
        model.context.side(Side.DRAFT),
    ):
        pass


def test_a_cache_without_draft_layers_has_no_draft_side() -> None:
    def model(step: StepContext) -> StepOutput:
        with pytest.raises(InvalidValue, match="no draft side; give CacheConfig draft_layers"):
            step.derive(Side.DRAFT)
        with pytest.raises(InvalidValue, match=r"accepted must be int32 \[\d\]"):
            step.derive(Side.TARGET, accepted=torch.zeros(9))
        return StepOutput(torch.zeros(step.rows, step.next_n, dtype=torch.int64))

    DecodeRuntime(probe_config(), model, device="cpu", max_rows=2, max_seq_len=60, num_blocks=10)
