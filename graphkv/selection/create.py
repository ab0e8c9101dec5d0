"""Which cache manager, and which options go together: one table as data, checked before anything is built.

There is no fall-back. A caller names V1 or V2 and says what it will use (`Requirements`); what cannot work is refused
with both options and a way out. `COMBINATIONS` lists every such pair beside those that work, and is what the documents
show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch

from graphkv.config import CacheConfig, LayerSpec
from graphkv.device import Device
from graphkv.errors import InvalidValue, UnsupportedCombination
from graphkv.layout import IndexKFormat, LatentFormat, Role, Side
from graphkv.manager.v1 import ManagerV1
from graphkv.manager.v2 import ManagerV2, V2Options
from graphkv.manager.windowed import WindowedManager, build_manager
from graphkv.metadata import TABLE_COLUMN_MULTIPLE
from graphkv.selection import refusals
from graphkv.selection.consumers import CPU, DEEPGEMM, FLASHMLA, DeviceFacts, IndexScorer, LatentAttention
from graphkv.selection.refusals import Refusal
from graphkv.selection.requirements import V1, V2, Capabilities, Connector, ContextParallel, Requirements, Setting
from graphkv.window_sizing import GroupLoad, choose_blocks


@dataclass(frozen=True, slots=True)
class Combination:
    """A line of the table: two options and what comes of them.

    Attributes:
        first, second: the options, as a caller writes them.
        note: a refused pair's way out; what to know of one that works.
        refusal: the facts of a setting that has both options and cannot work, None for any other setting. A line
            without it works.
        example: a small setting with both options.
    """

    first: str
    second: str
    note: str
    example: Setting
    refusal: Refusal | None = None

    @property
    def works(self) -> bool:
        return self.refusal is None


def create_cache_manager(
    config: CacheConfig,
    *,
    use_kv_cache_manager_v2: bool = True,
    num_blocks: int,
    max_rows: int,
    max_seq_len: int,
    next_n: int = 1,
    requirements: Requirements | None = None,
    device: DeviceFacts | Device | torch.device | str = "auto",
    window_blocks: Sequence[int] | None = None,
    rewind_room: int = 0,
    **options: Unpack[V2Options],
) -> ManagerV1 | ManagerV2:
    """The manager that the caller names, if it can do what the caller requires of it. Builds no pools.

    Args:
        config: what the cache holds.
        use_kv_cache_manager_v2: True for `ManagerV2`, False for `ManagerV1`, the baseline.
        num_blocks: blocks of the pools, the null block included.
        max_rows: sequences open at once.
        max_seq_len: tokens of the longest sequence; a row also gets the columns that next_n can reach.
        next_n: query tokens a row and decode step (1 + draft tokens).
        requirements: what the cache will be used for.
        device: where it will live, or the facts of another machine's device.
        window_blocks: blocks of the pools of each layer group with a window; by default what `max_rows` decoding rows
            need, and room for a prefill of 512 tokens a step.
        rewind_room: see `WindowedManager`.
        options: of `ManagerV2`, such as its colder tiers, their mover and events.

    Raises:
        UnsupportedCombination: two options cannot go together; names both and a way out.
        InvalidValue: a number out of range.
    """
    if not isinstance(use_kv_cache_manager_v2, bool):
        raise InvalidValue(f"use_kv_cache_manager_v2 must be True or False, got {use_kv_cache_manager_v2!r}")
    if max_seq_len < 1 or not 1 <= next_n <= config.block_size:
        raise InvalidValue(
            f"max_seq_len must be positive and next_n within 1 .. block_size {config.block_size}, got {max_seq_len} "
            f"and {next_n}"
        )
    facts = device if isinstance(device, DeviceFacts) else DeviceFacts.of(Device.of(device))
    needs = Requirements() if requirements is None else requirements
    v2 = use_kv_cache_manager_v2
    setting = Setting(config=config, use_v2=v2, next_n=next_n, requirements=needs, device=facts)
    check_setting(setting)
    columns = -(-(max_seq_len + next_n) // config.block_size)
    max_blocks = -(-columns // TABLE_COLUMN_MULTIPLE) * TABLE_COLUMN_MULTIPLE
    size = config.block_size
    if v2:
        options.setdefault("whole_copies", setting.splits_scales)
        load = GroupLoad(
            rows=max_rows, longest=max_seq_len, next_n=next_n, prefill_chunk=_PREFILL_CHUNK, rewind_room=rewind_room
        )
        return build_manager(
            config.windows,
            choose_blocks(config, num_blocks, None, window_blocks, load)[1:],
            rewind_room,
            num_blocks=num_blocks,
            block_size=size,
            max_rows=max_rows,
            max_blocks=max_blocks,
            **options,
        )
    if options:
        raise UnsupportedCombination(
            f"{_V1} and {', '.join(f'`{name}`' for name in options)} cannot go together: V1 has no such option; "
            f"{_USE_V2}, or leave it out"
        )
    return ManagerV1(num_blocks=num_blocks, block_size=size, max_rows=max_rows, max_blocks=max_blocks)


def check_setting(setting: Setting) -> None:
    """`UnsupportedCombination` by the first line of `COMBINATIONS` that refuses the setting."""
    for line in COMBINATIONS:
        if line.refusal is not None and (fact := line.refusal(setting)) is not None:
            raise UnsupportedCombination(f"{line.first} and {line.second} cannot go together: {fact}; {line.note}")


def capabilities_of(manager: ManagerV1 | ManagerV2) -> Capabilities:
    """What a manager can do."""
    if isinstance(manager, ManagerV1):
        return V1
    return replace(V2, offload=False) if isinstance(manager, WindowedManager) else V2


def render_combinations() -> str:
    """`COMBINATIONS` as a table in Markdown, refused pairs first."""
    lines = ["| option | together with | | way out, or what to know |", "|---|---|---|---|"]
    for line in sorted(COMBINATIONS, key=lambda line: line.works):
        verdict = "works" if line.works else "refused"
        lines.append(f"| {line.first} | {line.second} | {verdict} | {line.note} |")
    return "\n".join(lines)


_PREFILL_CHUNK = 512  # as `DecodeRuntime` has it

# examples -------------------------------------------------------------------------------------------------------------

_H200, _B200 = DeviceFacts("NVIDIA H200", 90), DeviceFacts("NVIDIA B200", 100)
_CONFIG = CacheConfig(layers=(LayerSpec(),) * 2)
_with = _CONFIG.with_options
_DRAFTING = _with(draft_layers=(LayerSpec(),))
_WINDOWED = _with(layers=(LayerSpec(), LayerSpec(window=100, sinks=4)))
_DEEPGEMM = Requirements(index_scorer=IndexScorer.DEEPGEMM)
_FLASHMLA = Requirements(latent_attention=LatentAttention.FLASHMLA)


def _example(
    needs: Requirements | None = None, *, device: DeviceFacts = CPU, v2: bool = True, config: CacheConfig = _CONFIG
) -> Setting:
    return Setting(config=config, use_v2=v2, requirements=needs or Requirements(), device=device)


# the table ------------------------------------------------------------------------------------------------------------

_V1, _V2 = "`use_kv_cache_manager_v2=False`", "`use_kv_cache_manager_v2=True`"
_USE_V2 = "use V2 (`use_kv_cache_manager_v2=True`)"

_NOT_IN_V1 = {
    "graph": (
        "a captured step would read the tables that its own step uploaded for ever",
        f"{_USE_V2}, or run eagerly",
    ),
    "prefix_hit": ("V1 shares no block between sequences", f"{_USE_V2}, or prefill every prompt whole"),
    "partial_hit": ("V1 shares no block between sequences", f"{_USE_V2}, or prefill every prompt whole"),
    "fork": ("V1 shares no block between sequences", f"{_USE_V2}, or open the sequence again and prefill it"),
    "offload": ("V1's blocks live on the device only", f"{_USE_V2}, or close the sequence and prefill it again later"),
    "growth": ("V1's pools are plain allocations", f"{_USE_V2}, or build the pools at their full size"),
}
_OF_V2 = {
    "graph": "one captured graph a bucket",
    "prefix_hit": "full blocks of a committed prefix are shared",
    "partial_hit": "the matching part of a block is copied in stream order",
    "fork": "full blocks are shared, the partial one is copied",
    "offload": "latent, index and draft bytes of a block move as one unit",
    "growth": "pools grow and shrink at fixed addresses, so captured graphs stay valid",
}


def _asking(capability: str) -> Requirements:
    return replace(Requirements(), **{capability: True})  # type: ignore[arg-type]


_STAR = Requirements(context_parallel=ContextParallel.STAR)
_NO_INDEX = Connector(name="a latent-only store", roles=frozenset({Role.LATENT}))
_NO_DRAFT = Connector(name="a target-only store", sides=frozenset({Side.TARGET}))
_DEAF = Connector(name="an append-only store", hears_rewind=False)
_DS_MLA = _with(latent=LatentFormat.FP8_DS_MLA)
_WINDOW = "a layer with a `window`"
_OWN_SCORER = '`index_scorer="graphkv"`'
_OWN_ATTENTION = '`latent_attention="graphkv"`'

COMBINATIONS: tuple[Combination, ...] = (
    *(
        Combination(_V1, f"`{name}=True`", way_out, _example(_asking(name), v2=False), refusals.lacks(name, why))
        for name, (why, way_out) in _NOT_IN_V1.items()
    ),
    Combination(
        "the sparse index (DSA)",
        '`context_parallel="star"`, `"ring"` or `"helix"`',
        "spread work by tensor, expert or attention-data parallelism, where a rank holds all tokens of its sequences",
        _example(_STAR),
        refusals.context_parallel,
    ),
    Combination(
        "the sparse index (DSA)",
        "`beam_width` above 1",
        "use `beam_width=1`, and fork the sequence for parallel samples",
        _example(Requirements(beam_width=2)),
        refusals.beam,
    ),
    Combination(
        "`connector` without a role",
        "the sparse index (DSA)",
        "use a connector whose `roles` are latent and index_k, or V2's own tiers (`offload=True`)",
        _example(Requirements(connector=_NO_INDEX)),
        refusals.connector_roles,
    ),
    Combination(
        "`connector` without the draft side",
        "`draft_layers`",
        "use a connector that moves both sides, or V2's own tiers (`offload=True`), or no `draft_layers`",
        replace(_example(Requirements(connector=_NO_DRAFT)), config=_DRAFTING),
        refusals.connector_draft,
    ),
    Combination(
        "`connector` that hears no rewind",
        "drafts (`next_n` above 1 or `draft_layers`)",
        "let the connector listen to `manager.on_rewind`, or use `next_n=1` and no `draft_layers`",
        replace(_example(Requirements(connector=_DEAF)), next_n=3),
        refusals.connector_rewind,
    ),
    Combination(
        _V1,
        _WINDOW,
        f"{_USE_V2}, or give the layer no window",
        _example(v2=False, config=_WINDOWED),
        refusals.windows_in_v1,
    ),
    Combination(
        _WINDOW,
        "`offload=True`",
        "close sequences and prefill them again later, or give the layer no window",
        _example(_asking("offload"), config=_WINDOWED),
        refusals.windows_offloaded,
    ),
    Combination(
        _WINDOW,
        "`connector`",
        "use no connector, or give the layer no window",
        _example(Requirements(connector=Connector(name="a whole store")), config=_WINDOWED),
        refusals.windows_in_connector,
    ),
    Combination(
        '`index_k="fp4"` on a device below sm 100',
        '`index_scorer="deepgemm"`',
        f'use {_OWN_SCORER}, which decodes FP4 in software on every device, or `index_k="fp8"`',
        _example(_DEEPGEMM, device=_H200, config=_with(index_k=IndexKFormat.FP4)),
        refusals.hardware_fp4,
    ),
    Combination(
        '`index_scorer="deepgemm"`',
        "a device that is neither Hopper nor Blackwell",
        f"use {_OWN_SCORER}",
        _example(_DEEPGEMM),
        refusals.wrong_device(DEEPGEMM),
    ),
    Combination(
        '`index_scorer="deepgemm"`',
        "unquantised `index_k`",
        f'use `index_k="fp8"`, or {_OWN_SCORER}',
        _example(_DEEPGEMM, device=_H200, config=_with(index_k=IndexKFormat.BF16)),
        refusals.wrong_format(DEEPGEMM),
    ),
    Combination(
        '`index_scorer="deepgemm"`',
        "other `index_heads` or `index_head_dim`",
        f"use {_OWN_SCORER}",
        _example(_DEEPGEMM, device=_H200, config=_with(index_heads=8)),
        refusals.wrong_width(DEEPGEMM),
    ),
    Combination(
        '`index_scorer="deepgemm"`',
        "other `index_page_size` (by default `block_size`)",
        "set `index_page_size` to a size it takes; where that is above `block_size`, raise `block_size` to it and keep "
        f"the old one as `latent_page_size`; or use {_OWN_SCORER}",
        _example(_DEEPGEMM, device=_H200, config=_with(block_size=16)),
        refusals.wrong_page_size,
    ),
    Combination(
        '`latent_attention="flashmla"`',
        "a device that is neither Hopper nor Blackwell",
        f"use {_OWN_ATTENTION}",
        _example(_FLASHMLA, config=_DS_MLA),
        refusals.wrong_device(FLASHMLA),
    ),
    Combination(
        '`latent_attention="flashmla"`',
        "`latent` other than `fp8_ds_mla`",
        f'use `latent="fp8_ds_mla"`, or {_OWN_ATTENTION}',
        _example(_FLASHMLA, device=_H200),
        refusals.wrong_format(FLASHMLA),
    ),
    Combination(
        '`latent_attention="flashmla"`',
        "other `kv_lora_rank` or `qk_rope_head_dim`",
        f"use {_OWN_ATTENTION}",
        _example(_FLASHMLA, device=_H200, config=_DS_MLA.with_options(kv_lora_rank=256)),
        refusals.wrong_width(FLASHMLA),
    ),
    *(
        Combination(
            f"`{name}`",
            "a `block_size` that it does not divide",
            "choose a page size that divides the block, or raise `block_size` to a power of two that it divides",
            _example(needs),
            refusals.undivided(role),
        )
        for name, role, needs in (
            ("index_page_size", Role.INDEX_K, Requirements(index_page_size=128)),
            ("latent_page_size", Role.LATENT, Requirements(latent_page_size=48)),
        )
    ),
    *(Combination(_V2, f"`{name}=True`", note, _example(_asking(name))) for name, note in _OF_V2.items()),
    *(
        Combination(
            which,
            "drafts (`next_n` above 1 or `draft_layers`)",
            "a step may accept any number of its query tokens, and rewinds cross block edges",
            replace(_example(v2=v2), config=_DRAFTING, next_n=3),
        )
        for which, v2 in ((_V1, False), (_V2, True))
    ),
    Combination(
        _WINDOW,
        "`graph=True`",
        "one more node for each layer group and side",
        _example(_asking("graph"), config=_WINDOWED),
    ),
    Combination(
        _WINDOW,
        "`prefix_hit=True`, `partial_hit=True` or `fork=True`",
        "a hit is as long as every window has what a query behind it reads",
        _example(Requirements(prefix_hit=True, partial_hit=True, fork=True), config=_WINDOWED),
    ),
    Combination(
        _WINDOW,
        "drafts (`next_n` above 1 or `draft_layers`)",
        "blocks are given up by what is accepted; `rewind_room` keeps more of them for rewinds",
        replace(_example(config=_WINDOWED.with_options(draft_layers=(LayerSpec(window=50),))), next_n=3),
    ),
    Combination(
        _WINDOW,
        "`growth=True`",
        "what grows are the pools of layers without a window, since a row needs a bounded part of the others",
        _example(_asking("growth"), config=_WINDOWED),
    ),
    Combination(
        '`index_k="fp4"`',
        f"{_OWN_SCORER}, any device",
        "FP4 is decoded in software where the device lacks it",
        _example(config=_with(index_k=IndexKFormat.FP4)),
    ),
    Combination(
        "`connector` of both roles and sides",
        "drafts (`next_n` above 1 or `draft_layers`)",
        "it must listen to `manager.on_rewind`",
        replace(_example(Requirements(connector=Connector(name="a whole store"))), config=_DRAFTING, next_n=3),
    ),
    Combination(
        "`index_page_size` below `block_size`, quantised `index_k`",
        "`partial_hit=True` or `fork=True`",
        "a block is copied whole where a part of it is wanted, since its scales stand behind each page",
        _example(Requirements(index_page_size=32, partial_hit=True, fork=True)),
    ),
    Combination(
        '`index_scorer="deepgemm"` on Hopper',
        "`block_size=128, index_page_size=64`",
        "a block holds two index_k pages of each layer, see `graphkv.selection.subpages`",
        _example(replace(_DEEPGEMM, index_page_size=64), device=_H200, config=_with(block_size=128)),
    ),
    Combination(
        '`index_scorer="deepgemm"` on Blackwell',
        '`index_k="fp4", index_page_size=32`',
        "a block of 64 holds two index_k pages of each layer",
        _example(replace(_DEEPGEMM, index_page_size=32), device=_B200, config=_with(index_k=IndexKFormat.FP4)),
    ),
    Combination(
        '`latent_attention="flashmla"` on Hopper',
        '`latent="fp8_ds_mla", latent_page_size=16`',
        "latents have the same bytes at every page size",
        _example(replace(_FLASHMLA, latent_page_size=16), device=_H200, config=_DS_MLA),
    ),
)
"""Every pair of options that is refused, in the order in which they are checked, and those that work."""
