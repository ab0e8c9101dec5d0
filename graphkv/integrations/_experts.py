"""The feed-forward part of a decode step, without a read on the host.

The experts' own forward visits only the experts that were hit, which it finds out on the host: fine for prefill, no
way to capture a graph. Decode computes the same sum in batched products of fixed shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Routed = Callable[[torch.Tensor], None]


def mixture(block: Any, hidden: torch.Tensor, *, capturable: bool, routed: Routed | None = None) -> torch.Tensor:
    """A model's mixture-of-experts `block` on hidden [T, hidden_size].

    Args:
        capturable: use fixed shapes and no host read; False runs the experts' own forward.
        routed: told the chosen experts, int64 [T, experts a token].
    """
    _, weights, chosen = block.gate(hidden)
    if routed is not None:
        routed(chosen)
    run = _batched if capturable else _own
    shared: torch.Tensor = block.shared_experts(hidden)
    return shared + run(block.experts, hidden, chosen, weights)


def _own(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = experts(hidden, chosen, weights)
    return result


def _batched(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gathers the chosen experts' weights where that reads less than all of them, else runs every expert on all."""
    if chosen.numel() < experts.num_experts:
        return _gathered(experts, hidden, chosen, weights)
    return _dense(experts, hidden, chosen, weights)


def _gathered(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    tokens, each = chosen.shape
    flat = chosen.reshape(-1)
    states = hidden.unsqueeze(1).expand(tokens, each, -1).reshape(tokens * each, -1, 1)
    gate, up = torch.bmm(experts.gate_up_proj[flat], states).squeeze(-1).chunk(2, dim=-1)
    out = torch.bmm(experts.down_proj[flat], (experts.act_fn(gate) * up).unsqueeze(-1)).view(tokens, each, -1)
    total: torch.Tensor = (out * weights.unsqueeze(-1)).sum(dim=1)
    return total.to(hidden.dtype)


def _dense(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    share = torch.zeros(hidden.shape[0], experts.num_experts, dtype=weights.dtype, device=hidden.device)
    share.scatter_(1, chosen, weights)
    states = hidden.unsqueeze(0).expand(experts.num_experts, -1, -1)
    gate, up = torch.bmm(states, experts.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
    out = torch.bmm(experts.act_fn(gate) * up, experts.down_proj.transpose(1, 2))
    return torch.einsum("te,eth->th", share, out.to(share.dtype)).to(hidden.dtype)
