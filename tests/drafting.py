"""Draft models whose proposals are known, and a probe that drafts: what the tests of speculation run."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from typing import Any

import torch
from probe import ProbeModel, Shadow

from graphkv.config import CacheConfig, LayerSpec
from graphkv.integrations._dsa_kernels import DsaKernels
from graphkv.integrations._dsa_layer import LayerStack
from graphkv.integrations.speculation import Proposal
from graphkv.integrations.transformers import INDEX_ROPE
from graphkv.layout import Side
from graphkv.sequence import Sequence
from graphkv.step import StepContext, StepOutput


class ScriptedDraft:
    """Proposes what is written for a row and position: the truth, or a wrong token. Keeps one idle layer.

    Args:
        script: int64 [rows, positions], the token at each position.
    """

    layers = (LayerSpec(),)

    def __init__(self, script: torch.Tensor) -> None:
        self.script = script

    def __call__(
        self, step: StepContext, kernels: DsaKernels, token: torch.Tensor, state: torch.Tensor, at: torch.Tensor
    ) -> Proposal:
        live = step.metadata
        row = live.batch_row.long()[live.token_row][at].clamp(min=0)
        position = (live.position[at] + 2).clamp(max=self.script.shape[1] - 1)
        return Proposal(self.script[row, position], state[at])


class CopyDraft:
    """The target's own layers as the draft's, over tokens one to the left: wrong only where the first token matters.

    Its proposals are good only if every position of the draft side was written and is read as it should be.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.stack = LayerStack(model.model.layers, model.model.rotary_emb, INDEX_ROPE[model.config.model_type])

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.stack.specs

    def __call__(
        self, step: StepContext, kernels: DsaKernels, token: torch.Tensor, state: torch.Tensor, at: torch.Tensor
    ) -> Proposal:
        hidden = self.model.model.norm(self.stack(self.model.model.embed_tokens(token), kernels, step)[at])
        return Proposal(self.model.lm_head(hidden).argmax(-1), hidden)


class DraftingProbe(ProbeModel):
    """A probe that also drafts: mirrors the target's tokens, then writes the tag of each draft at its position.

    Attributes:
        paused: bool [], on the device: keep one token a step, as if nothing had been drafted.
        verified: int32 [T], the target side's token map; drafted: the draft side's of each draft step, int32 [R].
        before, after: the target side's live tensors before the draft side was first derived and after its last use.
        inside: the draft side's live tensors of the last draft step.
    """

    def __init__(self, config: CacheConfig, max_tokens: int, device: torch.device, next_n: int) -> None:
        super().__init__(config, max_tokens, device)
        self.paused = torch.zeros((), dtype=torch.bool, device=device)
        self.verified = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.drafted = torch.zeros(next_n, max_tokens, dtype=torch.int32, device=device)
        self.before: dict[tuple[int, str], torch.Tensor] = {}
        self.after: dict[tuple[int, str], torch.Tensor] = {}
        self.inside: dict[tuple[int, str], torch.Tensor] = {}

    def __call__(self, step: StepContext) -> StepOutput:
        target = step.metadata
        self._visit(step, target, target.token_ids)
        last = (target.query_start[1:].long() - 1).clamp(min=0)
        steps = torch.arange(step.next_n, device=target.token_ids.device)
        if step.kind == "prefill":
            self._mirror(step)
            return StepOutput((target.token_ids[last] + 1)[:, None] + steps)
        self._keep(step, self.before)
        ids = target.token_ids.view(step.rows, step.next_n)
        accepted = 1 + (ids[:, 0] * 7 + ids[:, 0] // 3) % step.next_n
        accepted = torch.where(self.paused, 1, accepted)
        following = ids.gather(1, (accepted - 1)[:, None]) + 1
        self.verified[: target.tokens] = target.token_row
        self._mirror(step)
        for number in range(2, step.next_n):
            live = step.derive(Side.DRAFT, 1, shift=number - 2, accepted=accepted.to(torch.int32))
            with step.side(Side.DRAFT):
                self._visit(step, live, following[:, 0] + number - 2)
            self.drafted[number][: step.rows] = live.token_row
        with step.side(Side.DRAFT):
            self._keep(step, self.inside)
        self._raise_inside(step)
        self._keep(step, self.after)
        return StepOutput(following + steps, accepted.to(torch.int32))

    def _mirror(self, step: StepContext) -> None:
        step.derive(Side.DRAFT)
        with step.side(Side.DRAFT) as live:
            self._visit(step, live, step._binding.of(Side.TARGET).token_ids)

    def _raise_inside(self, step: StepContext) -> None:
        try:
            with step.side(Side.DRAFT):
                raise ArithmeticError("a draft model fails")
        except ArithmeticError:
            assert step.metadata.side is Side.TARGET

    def _keep(self, step: StepContext, into: dict[tuple[int, str], torch.Tensor]) -> None:
        for name, tensor in step.metadata.tensors().items():
            key = (step.rows, name)
            if key not in into:
                into[key] = torch.empty_like(tensor)
            into[key].copy_(tensor)


class DraftShadow(Shadow):
    """Foretells what a `DraftingProbe` writes: the draft side also past what is kept."""

    paused = False

    def drafted(self, sequences: AbstractSequence[Sequence]) -> int:
        """One step of the batch."""
        before = {sequence: self.length[sequence] for sequence in sequences}
        step = super().step(sequences)
        for sequence, length in before.items():
            if self.paused:
                self.length[sequence] = length + 1
            end = self.length[sequence] + self.next_n - 2
            self._wrote(sequence, length, end, (Side.DRAFT,))
        return step

    def prefill(self, sequences: Any) -> int:
        sequences = list(sequences)
        begins = [self.length[sequence] for sequence in sequences]
        step = super().prefill(sequences)
        for sequence, begin in zip(sequences, begins, strict=True):
            self._wrote(sequence, begin, self.length[sequence], (Side.DRAFT,))
        return step
