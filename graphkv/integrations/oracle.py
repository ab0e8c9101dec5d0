"""Judges a run on graphkv by the same model's own forward, on the same tokens.

A sparse model makes discrete choices: the indexer's top-k and the router's experts. Where two candidates score the
same to within rounding, two correct runs may choose differently and their logits then differ by far more than
rounding. So the model's own forward is asked twice for its logits:

- left alone: `free_error`;
- with a choice of the run put in place of its own wherever the two differ and the difference is *explained*: scored in
  float64 from the forward's own inputs, no candidate that the run left out beats one that it chose by more than the
  precision of the stored formats explains. Each such tie is counted, and one that is not explained is counted apart,
  is not followed, and fails the check.

Without a tie both are the same. With index K in a coarse format near-ties are many, and following them separates what
the coarse index did (`overlap`, ties) from what the rest of the run did (`error`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphkv.config import CacheConfig
from graphkv.integrations.trace import RowRecord
from graphkv.layout import IndexKFormat, LatentFormat

EPSILON = {
    torch.float32: 2.0**-20,
    torch.bfloat16: 2.0**-9,
    LatentFormat.FP32: 0.0,
    LatentFormat.BF16: 2.0**-9,
    LatentFormat.FP8: 2.0**-4,
    LatentFormat.FP8_DS_MLA: 2.0**-4,
    IndexKFormat.FP32: 0.0,
    IndexKFormat.BF16: 2.0**-9,
    IndexKFormat.FP8: 2.0**-4,
    IndexKFormat.FP4: 2.0**-2,
}
"""Relative error that a value takes on by its type or format: half a step of the mantissa where it is rounded once. In
fp32 it is the sums that count: some 256 terms, added in another order, differ by 16 roundings of 2^-24."""

TIE_SLACK = 12.0
"""A score may be off by that many times its expected error and still count as equal, see `Reference`. Correct runs
needed at most a third of it (six seeds, both families, seven pairs of formats)."""

LOGIT_SLACK = 3.0
"""The largest logit error, in epsilons of what was stored times the largest logit. Correct runs needed at most 1.2."""

FP32_LOGIT_ERROR = 1e-4
"""Bound of the logit error of an fp32 model on fp32 latents."""


@dataclass(slots=True)
class Comparison:
    """What comparing found, summed over rows by `add`.

    Attributes:
        answers: logit vectors compared.
        error, free_error: largest logit difference, with explained choices followed and with none.
        scale: largest reference logit.
        ties: choices (one layer, one position) that differed and were explained and followed.
        unexplained: choices that differed and were not explained, or that were never recorded.
        worst_tie: the largest float64 gap of a followed choice, as a share of what would be explained.
        overlaps, sparse_choices: summed overlap and number of the selections with more candidates than top-k.
    """

    answers: int = 0
    error: float = 0.0
    free_error: float = 0.0
    scale: float = 0.0
    ties: int = 0
    unexplained: int = 0
    worst_tie: float = 0.0
    overlaps: float = 0.0
    sparse_choices: int = 0

    @property
    def overlap(self) -> float:
        """Mean share of the reference's top-k that the run selected too; 1 if no context was longer than top-k."""
        return self.overlaps / self.sparse_choices if self.sparse_choices else 1.0

    def add(self, other: Comparison) -> None:
        for name in ("answers", "ties", "unexplained", "overlaps", "sparse_choices"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("error", "free_error", "scale", "worst_tie"):
            setattr(self, name, _worse(getattr(self, name), getattr(other, name)))


class Reference:
    """The model's own forward, as the judge of a run with the formats of `config`.

    A choice is explained if its float64 gap is at most `TIE_SLACK * epsilon * noise`. `noise` is the standard deviation
    that a score would have if each product in it were off by 100 %, independently; `epsilon` adds up the roundings
    of the model's type, the latent format (it feeds the layers above) and, for selections, the index K format.

    Args:
        model: a model that `TransformersModel` supports, with routers of one expert group.
    """

    def __init__(self, model: Any, config: CacheConfig) -> None:
        self.model = model
        self.base_epsilon = EPSILON[model.lm_head.weight.dtype]
        self.router_epsilon = self.base_epsilon + EPSILON[config.latent]
        self.index_epsilon = self.router_epsilon + EPSILON[config.index_k]

    def error_bound(self, found: Comparison) -> float:
        """The largest `Comparison.error` that the formats explain; index K has no part in it, its choices are followed.

        For an fp32 model on fp32 latents an absolute bound; else `LOGIT_SLACK` roundings of the largest logit.
        """
        if self.router_epsilon == EPSILON[torch.float32]:
            return FP32_LOGIT_ERROR
        return LOGIT_SLACK * self.router_epsilon * found.scale

    @property
    def overlap_floor(self) -> float:
        """The least `Comparison.overlap` that the formats explain.

        Of the top k of 2k normally distributed scores, noise of a share e of their deviation replaces about 0.45 e.
        Rounding index K and query to e4m3 makes an e of 0.037, so 0.98 is expected and was measured. The floor is
        1 - epsilon: some four times that loss, since contexts of many times k lose up to three times as much. In fp32
        it leaves room for a few ties.
        """
        return 1.0 - max(self.index_epsilon, 1e-3)

    def held(self, found: Comparison) -> bool:
        """Whether the run may be called the model's: all within bounds, nothing unexplained, nothing missing or NaN."""
        return (
            found.answers > 0
            and found.unexplained == 0
            and found.error <= self.error_bound(found)
            and found.overlap >= self.overlap_floor
        )

    @torch.no_grad()
    def compare(self, tokens: Tensor, record: RowRecord, first: int) -> Comparison:
        """Judges one row.

        Args:
            tokens: int64 [S], what the row was fed.
            record: what the run recorded of those S positions.
            first: the first position whose logits are compared; every later one is too.
        """
        device = self.model.lm_head.weight.device
        ids = tokens.to(device).unsqueeze(0)
        free = self.model(ids, use_cache=False).logits[0, first:].float().cpu()
        judge = _Judge(self, record, device)
        with judge:
            followed = self.model(ids, use_cache=False).logits[0, first:].float().cpu()
        found, answers = judge.found, record.logits[first:]
        found.answers = answers.shape[0]
        found.error, found.free_error = (_largest(answers - reference) for reference in (followed, free))
        found.scale = _largest(followed)
        return found


@dataclass(slots=True)
class _Judge:
    """Hooks that compare each choice of one forward with the record, and follow the record where that is explained."""

    reference: Reference
    record: RowRecord
    device: torch.device
    found: Comparison = field(default_factory=Comparison)
    handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> None:
        layers = self.reference.model.model.layers
        for layer, selected in self.record.selected.items():
            self.handles.append(layers[layer].self_attn.indexer.register_forward_hook(self._index_hook(selected)))
        for layer, routed in self.record.routed.items():
            self.handles.append(layers[layer].mlp.gate.register_forward_hook(self._router_hook(routed)))

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _index_hook(self, selected: Tensor) -> Callable[..., Tensor]:
        def hook(indexer: Any, args: tuple[Any, ...], own: Tensor) -> Tensor:
            scores, noise = index_scores(indexer, *args[:3])
            count = scores.shape[0]
            causal = torch.ones(count, count, dtype=torch.bool, device=self.device).tril_()
            theirs = _mask(own[0], causal)
            choice = selected.to(self.device)
            ours = _mask(choice, causal)
            sparse = causal.sum(-1) > choice.shape[1]
            self.found.overlaps += ((ours & theirs).sum(-1) / theirs.sum(-1))[sparse].sum().item()
            self.found.sparse_choices += int(sparse.sum())
            follow = self._explained(scores, noise, causal, theirs, choice, self.reference.index_epsilon)
            own = own.clone()
            own[0, follow] = choice[follow][:, : own.shape[-1]]
            return own

        return hook

    def _router_hook(self, routed: Tensor) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        def hook(gate: Any, args: tuple[Any, ...], own: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, chosen = own
            hidden = args[0].reshape(logits.shape[0], -1).double()
            matrix = gate.weight.double()
            scores = (hidden @ matrix.T).sigmoid() + gate.e_score_correction_bias.double()
            noise = (hidden.square() @ matrix.square().T).sqrt() / 4  # a sigmoid is nowhere steeper than 1/4
            every = torch.ones_like(scores, dtype=torch.bool)
            choice = routed.to(self.device)
            follow = self._explained(scores, noise, every, _mask(chosen, every), choice, self.reference.router_epsilon)
            choice = torch.where(follow.unsqueeze(-1), choice, chosen)
            share = logits.sigmoid().gather(1, choice)
            if gate.norm_topk_prob:
                share = share / (share.sum(-1, keepdim=True) + 1e-20)
            share = (share * gate.routed_scaling_factor).to(weights.dtype)
            return logits, torch.where(follow.unsqueeze(-1), share, weights), choice

        return hook

    def _explained(
        self, scores: Tensor, noise: Tensor, allowed: Tensor, theirs: Tensor, choice: Tensor, epsilon: float
    ) -> Tensor:
        """Where the record is to be followed: bool [S].

        scores and noise are float64 [S, N], the masks allowed and theirs bool [S, N], the record's choice int [S, n].
        """
        ours = _mask(choice, allowed)
        spread = noise.masked_fill(~allowed, 0).amax(-1).clamp_(min=torch.finfo(torch.float64).tiny)
        own_share = gap(scores, allowed, theirs) / (TIE_SLACK * self.reference.base_epsilon * spread)
        assert own_share.max() <= 1, f"these are not the scores that the model chose by: off by {own_share.max():.3g}"
        share = gap(scores, allowed, ours) / (TIE_SLACK * epsilon * spread)
        complete = (ours.sum(-1) == theirs.sum(-1)) & ((choice >= 0).sum(-1) == ours.sum(-1))
        differs = (ours != theirs).any(-1) | ~complete
        follow = differs & complete & (share <= 1)
        self.found.ties += int(follow.sum())
        self.found.unexplained += int((differs & ~follow).sum())
        if follow.any():
            self.found.worst_tie = max(self.found.worst_tie, share[follow].max().item())
        return follow


def gap(scores: Tensor, allowed: Tensor, chosen: Tensor) -> Tensor:
    """float64 [S]: by how much the best allowed candidate left out beats the worst chosen one.

    Not positive for a perfect choice, -inf where nothing was left out or nothing chosen.
    """
    left_out = scores.masked_fill(~allowed | chosen, -torch.inf).amax(-1)
    worst = scores.masked_fill(~(allowed & chosen), torch.inf).amin(-1)
    return left_out - worst


def index_scores(
    indexer: Any, hidden: Tensor, query_latent: Tensor, rotation: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Scores and their noise, float64 [S, S], from the inputs of an indexer's forward (batch of one)."""
    cos, sin = (part[0].double() for part in rotation)
    hidden, query_latent = hidden[0].double(), query_latent[0].double()
    interleaved = indexer.config.model_type == "glm_moe_dsa"
    query = (query_latent @ indexer.wq_b.weight.double().T).view(len(hidden), indexer.n_heads, -1)
    norm = indexer.k_norm
    key = functional.layer_norm(
        hidden @ indexer.wk.weight.double().T, norm.normalized_shape, norm.weight.double(), norm.bias.double(), norm.eps
    )
    query = _rotated(query, cos.unsqueeze(1), sin.unsqueeze(1), interleaved)
    key = _rotated(key, cos, sin, interleaved)
    weights = hidden @ indexer.weights_proj.weight.double().T * indexer.n_heads**-0.5 * indexer.softmax_scale
    scores = torch.einsum("th,ths->ts", weights, torch.einsum("thd,sd->ths", query, key).relu_())
    variance = torch.einsum("th,ths->ts", weights.square(), torch.einsum("thd,sd->ths", query.square(), key.square()))
    return scores, variance.sqrt()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [..., D] with its first cos.shape[-1] values rotated; the order of the rotated values is free."""
    width = cos.shape[-1]
    rope, rest = x[..., :width], x[..., width:]
    a, b = (rope[..., ::2], rope[..., 1::2]) if interleaved else (rope[..., : width // 2], rope[..., width // 2 :])
    cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def _mask(chosen: Tensor, allowed: Tensor) -> Tensor:
    """bool [S, N]: the allowed candidates that int [S, n] names. Negative entries name none.

    A forward names forbidden candidates where it has too few allowed ones; like numbers past N, those are dropped.
    """
    count = allowed.shape[1]
    picked = torch.zeros(allowed.shape[0], count + 1, dtype=torch.bool, device=allowed.device)
    picked.scatter_(1, chosen.long().masked_fill((chosen < 0) | (chosen >= count), count), True)
    return picked[:, :-1] & allowed


def _largest(x: Tensor) -> float:
    """Largest magnitude; NaN, if there is one."""
    return x.abs().max().item()


def _worse(a: float, b: float) -> float:
    return max(a, b) if a == a and b == b else float("nan")
