"""Drafts within a captured step: which of them the target keeps, and how a draft model proposes the next ones.

The convention is that of DeepSeek-V3's multi-token prediction: at position p a draft model is fed the target's hidden
state of p and the token at p + 1, and proposes the token at p + 2. A row whose query tokens stand at L .. L + n - 1 and
of which a are kept goes through

    mirror    positions L .. L + n - 1, as the target's; the token after the kept ones is proposed from L + a - 1
    step j    position L + a + j - 2, from the token and the state before (j = 2 .. n - 1)

so every kept position is written with what the target said, whether or not its drafts were right, and the draft cache
is as long as the target's after every step. Positions past the kept ones are written again by the steps that reach
them. In a prefill chunk the token after a row's last is the one that the target would say, and only one is proposed.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from graphkv.config import LayerSpec
from graphkv.integrations._dsa_kernels import DsaKernels
from graphkv.layout import Side
from graphkv.step import StepContext


class Taken(NamedTuple):
    """What a step keeps of each row.

    Attributes:
        kept: int32 [rows], how many query tokens.
        token: int64 [rows], the token that follows them.
        last: int64 [rows], the last kept one among the step's query tokens.
    """

    kept: torch.Tensor
    token: torch.Tensor
    last: torch.Tensor


class Proposal(NamedTuple):
    """Tokens int64 [N] that a draft model proposes, and its states [N, width], which it is fed next."""

    token: torch.Tensor
    state: torch.Tensor


class DraftModel(Protocol):
    """Proposes tokens; keeps its keys in the draft side's layers.

    Attributes:
        layers: of the draft side, for the cache.
    """

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...

    def __call__(
        self, step: StepContext, kernels: DsaKernels, token: torch.Tensor, state: torch.Tensor, at: torch.Tensor
    ) -> Proposal:
        """Run the draft layers over the tokens of `step.metadata`, which is the draft side's. Captured in decode.

        Args:
            token: int64 [T], the token after each position.
            state: [T, hidden_size], the target's normed hidden state of each position, or its own of the step before.
            at: int64 [N], the tokens whose proposals are wanted.
        """


def accept(drafted: torch.Tensor, sampled: torch.Tensor) -> Taken:
    """Keep the query tokens up to the first draft that the target did not say; the first one is always kept.

    Args:
        drafted: int64 [rows, n], the query tokens: the last sampled one, then its drafts.
        sampled: int64 [rows, n], what the target says after each of them.
    """
    rows, width = drafted.shape
    kept = (drafted[:, 1:] == sampled[:, :-1]).cumprod(1).sum(1)
    last = torch.arange(rows, device=drafted.device) * width + kept
    return Taken((kept + 1).to(torch.int32), sampled.flatten()[last], last)


def propose(
    step: StepContext,
    kernels: DsaKernels,
    draft: DraftModel,
    hidden: torch.Tensor,
    following: torch.Tensor,
    taken: Taken,
) -> torch.Tensor:
    """The next step's query tokens int64 [rows, next_n]: the token that follows what was kept, then drafts.

    Args:
        hidden: [T, hidden_size], the target's normed hidden state of the step's tokens.
        following: int64 [T], the token after each of them; of what is past a row's kept tokens, any.
    """
    step.derive(Side.DRAFT)
    with step.side(Side.DRAFT):
        found = draft(step, kernels, following, hidden, taken.last)
    tokens = [taken.token, found.token]
    while len(tokens) < step.next_n:
        if step.kind == "prefill":
            tokens.append(found.token)  # a filler: any token is a lawful draft
            continue
        step.derive(Side.DRAFT, 1, shift=len(tokens) - 2, accepted=taken.kept)
        with step.side(Side.DRAFT) as live:
            found = draft(step, kernels, found.token, found.state, live.query_start[:-1].long())
        tokens.append(found.token)
    return torch.stack(tokens[: step.next_n], dim=1)
