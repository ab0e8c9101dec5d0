"""What a caller requires of a runtime, held against how the runtime is built."""

from __future__ import annotations

from dataclasses import replace

from graphkv.config import CacheConfig
from graphkv.device import Device
from graphkv.errors import UnsupportedCombination
from graphkv.selection.consumers import DeviceFacts
from graphkv.selection.create import check_setting
from graphkv.selection.requirements import Requirements, Setting


def check_demands(
    config: CacheConfig,
    requirements: Requirements | None,
    device: Device,
    next_n: int,
    *,
    graph: bool,
    prefix_caching: bool,
    tiers: bool,
    growth: bool,
) -> Setting:
    """The setting of a runtime over V2, if it can do what is required of it.

    Args:
        graph, prefix_caching, tiers, growth: what it is built with.

    Raises:
        UnsupportedCombination: a line of `graphkv.selection.create.COMBINATIONS` refuses it, or it is built without
            what is required. Names both options and a way out.
    """
    needs = Requirements() if requirements is None else requirements
    needs = replace(needs, offload=needs.offload or tiers)  # to be built with colder tiers is to use them
    setting = Setting(config=config, next_n=next_n, requirements=needs, device=DeviceFacts.of(device))
    check_setting(setting)
    caching = prefix_caching, "`prefix_caching=False`", "use `prefix_caching=True`"
    built = {
        "graph": (graph, '`mode="eager"`', 'use `mode="graph"`'),
        "prefix_hit": caching,
        "partial_hit": caching,
        "offload": (tiers, "`tiers=None`", "give `tiers=TierOptions(...)`"),
        "growth": (growth, "`max_num_blocks=None`", "give `max_num_blocks`"),
    }
    for name, (there, option, way_out) in built.items():
        if getattr(needs, name) and not there:
            raise UnsupportedCombination(
                f"`{name}=True` and {option} cannot go together: it is required and the runtime is built without it; "
                f"{way_out}, or do not require it"
            )
    return setting
