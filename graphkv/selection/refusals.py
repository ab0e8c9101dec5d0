"""Why a setting cannot work: each function states the facts of one unsupported pair, or None if it does not apply."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from graphkv.layout import IndexKFormat, Role, Side
from graphkv.selection.consumers import DEEPGEMM, FP4_SM, Consumer, IndexScorer, LatentAttention
from graphkv.selection.requirements import ContextParallel, Setting

Refusal = Callable[[Setting], str | None]


def lacks(capability: str, why: str) -> Refusal:
    """A kind of cache is asked for a capability that it does not have; `why` is what is in the way."""

    def refusal(setting: Setting) -> str | None:
        asked = getattr(setting.requirements, capability)
        return why if asked and not getattr(setting.capabilities, capability) else None

    return refusal


def context_parallel(setting: Setting) -> str | None:
    kind = setting.requirements.context_parallel
    if kind is ContextParallel.NONE:
        return None
    return (
        f"with context_parallel={kind} a rank holds a part of a sequence's tokens, but the indexer must score all of "
        f"them to pick its top {setting.config.index_topk}"
    )


def beam(setting: Setting) -> str | None:
    if (width := setting.requirements.beam_width) == 1:
        return None
    return f"beam_width={width} reorders the blocks of a row in every step, and each beam selects other tokens"


def connector_roles(setting: Setting) -> str | None:
    connector = setting.requirements.connector
    if connector is None or not (missing := sorted(set(Role) - connector.roles)):
        return None
    return f"{connector.name} moves no {' and no '.join(missing)}, which nothing would write again for restored tokens"


def connector_draft(setting: Setting) -> str | None:
    connector = setting.requirements.connector
    if connector is None or not setting.config.draft_layers or Side.DRAFT in connector.sides:
        return None
    return f"{connector.name} moves no draft side, so restored tokens would have none"


def connector_rewind(setting: Setting) -> str | None:
    connector = setting.requirements.connector
    if connector is None or not setting.drafts or connector.hears_rewind:
        return None
    return f"{connector.name} is not told when rejected drafts give up a block, and would keep its id"


def windows_in_v1(setting: Setting) -> str | None:
    if setting.use_v2 or not (windows := setting.config.windows):
        return None
    return f"V1 has one block table, and {len(windows)} layer groups with a window would need tables of their own"


def windows_offloaded(setting: Setting) -> str | None:
    if not setting.requirements.offload or not (windows := setting.config.windows):
        return None
    return f"a block moves as one unit, and {len(windows)} layer groups with a window have blocks of their own"


def windows_in_connector(setting: Setting) -> str | None:
    connector = setting.requirements.connector
    if connector is None or not (windows := setting.config.windows):
        return None
    return f"{connector.name} knows a block by one id, which {len(windows)} layer groups with a window do not share"


def hardware_fp4(setting: Setting) -> str | None:
    wanted = setting.config.index_k is IndexKFormat.FP4 and setting.requirements.index_scorer is IndexScorer.DEEPGEMM
    if not wanted or setting.device.sm >= FP4_SM:
        return None
    return f"its FP4 scores need tensor cores of sm {FP4_SM} or later, and the device is {setting.device}"


def _reads(consumer: Consumer, setting: Setting) -> bool:
    needs = setting.requirements
    if consumer is DEEPGEMM:
        return needs.index_scorer is IndexScorer.DEEPGEMM
    return needs.latent_attention is LatentAttention.FLASHMLA


def wrong_device(consumer: Consumer) -> Refusal:
    """The consumer does not run on the device."""

    def refusal(setting: Setting) -> str | None:
        if not _reads(consumer, setting) or consumer.on(setting.device):
            return None
        return f"{consumer.name} runs on {consumer.families}, and the device is {setting.device}"

    return refusal


def wrong_format(consumer: Consumer) -> Refusal:
    """The consumer does not read the byte format of its role on that device."""

    def refusal(setting: Setting) -> str | None:
        takes = consumer.on(setting.device) if _reads(consumer, setting) else None
        given = setting.config.page_layout(consumer.role).format
        if takes is None or given in takes.formats:
            return None
        return f"{consumer.name} on {setting.device} takes {_one_of(takes.formats)}, and {consumer.role} is {given}"

    return refusal


def wrong_width(consumer: Consumer) -> Refusal:
    """The consumer does not take the model's widths on that device."""

    def refusal(setting: Setting) -> str | None:
        takes = consumer.on(setting.device) if _reads(consumer, setting) else None
        for name, allowed in takes.widths if takes else ():
            if (given := getattr(setting.config, name)) not in allowed:
                return f"{consumer.name} on {setting.device} takes {name} {_one_of(allowed)}, and it is {given}"
        return None

    return refusal


def wrong_page_size(setting: Setting) -> str | None:
    takes = DEEPGEMM.on(setting.device) if _reads(DEEPGEMM, setting) else None
    given = setting.page_size(Role.INDEX_K)
    if takes is None or takes.page_sizes is None or given in takes.page_sizes:
        return None
    return (
        f"DeepGEMM on {setting.device} takes index_k pages of {_one_of(takes.page_sizes)} tokens, and they are {given}"
    )


def undivided(role: Role) -> Refusal:
    """The pages that the consumer of `role` sees do not fill a block."""

    def refusal(setting: Setting) -> str | None:
        size, block_size = setting.page_size(role), setting.config.block_size
        if block_size % size == 0:
            return None
        fit = [2**i for i in range(block_size.bit_length())]
        return f"pages of {size} tokens do not divide blocks of {block_size}; pages of {_one_of(fit)} do"

    return refusal


def _one_of(values: Iterable[object]) -> str:
    return " or ".join(map(str, values))
