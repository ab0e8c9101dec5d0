"""Selection: what the caller names is what it gets, or a refusal that names both options and a way out (case J7)."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from manager_model import Bytes, FakeMover
from probe import probe_config
from tier_shadow import tier_runtime

from graphkv.baseline.runner import V1Runner
from graphkv.config import CacheConfig, LayerSpec
from graphkv.device import Device
from graphkv.errors import InvalidValue, UnsupportedCombination
from graphkv.layout import Role, Side
from graphkv.manager.v1 import ManagerV1
from graphkv.manager.v2 import ManagerV2
from graphkv.runtime import DecodeRuntime
from graphkv.selection.consumers import DEEPGEMM, FLASHMLA, DeviceFacts
from graphkv.selection.create import (
    COMBINATIONS,
    Combination,
    capabilities_of,
    check_setting,
    create_cache_manager,
    render_combinations,
)
from graphkv.selection.requirements import V1, V2, Capabilities, Connector, Requirements, Setting

CONFIG = CacheConfig(layers=(LayerSpec(),) * 2)
H200, B200, A100, RTX = (
    DeviceFacts(name, sm) for name, sm in (("H200", 90), ("B200", 100), ("A100", 80), ("RTX 5090", 120))
)
REFUSED = [line for line in COMBINATIONS if not line.works]
WORKS = [line for line in COMBINATIONS if line.works]


def name_of(line: Combination) -> str:
    return f"{line.first} + {line.second}".replace("`", "")


def create(setting: Setting, **changes: Any) -> ManagerV1 | ManagerV2:
    options = {"num_blocks": 9, "max_rows": 2, "max_seq_len": 100, "next_n": setting.next_n, "device": setting.device}
    return create_cache_manager(
        setting.config,
        use_kv_cache_manager_v2=setting.use_v2,
        requirements=setting.requirements,
        **(options | changes),
    )


# the caller's choice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("v2", "kind"), [(True, ManagerV2), (False, ManagerV1)])
def test_the_manager_is_the_one_that_was_named(v2: bool, kind: type) -> None:
    manager = create(Setting(config=CONFIG, use_v2=v2))
    assert type(manager) is kind
    assert capabilities_of(manager) == (V2 if v2 else V1)
    assert manager.max_tokens == 256, "100 tokens and next_n, in table columns by fours"
    row = manager.open(100)
    manager.extend([row], 101)
    manager.advance([row], 101)
    assert manager.length[row] == 101
    manager.rewind([row], 60, 0)
    assert manager.close(row, 0, int(manager.serial[row]))
    manager.check()


def test_v2_is_what_one_gets_by_default() -> None:
    manager = create_cache_manager(CONFIG, num_blocks=9, max_rows=2, max_seq_len=100, device="cpu")
    assert type(manager) is ManagerV2


def test_the_facts_of_a_device_are_read_from_it(device: torch.device) -> None:
    facts = DeviceFacts.of(Device.of(device))
    if device.type == "cpu":
        assert (facts.name, facts.sm, str(facts)) == ("cpu", 0, "cpu")
    else:
        major, minor = torch.cuda.get_device_capability()
        assert facts.sm == 10 * major + minor
        assert str(facts) == f"{torch.cuda.get_device_name()} (sm {facts.sm})"
    assert type(create(Setting(config=CONFIG), device=device)) is ManagerV2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_kv_cache_manager_v2": "auto"}, "use_kv_cache_manager_v2 must be True or False, got 'auto'"),
        ({"max_seq_len": 0}, "max_seq_len must be positive"),
        ({"next_n": 65}, "next_n within 1 .. block_size 64, got 100 and 65"),
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    sizes = {"num_blocks": 9, "max_rows": 2, "max_seq_len": 100, "device": "cpu"}
    with pytest.raises(InvalidValue, match=message):
        create_cache_manager(CONFIG, **(sizes | changes))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"context_parallel": "square"}, r"context_parallel must be one of \['none', 'star', 'ring', 'helix'\]"),
        ({"index_scorer": "own"}, r"index_scorer must be one of \['graphkv', 'deepgemm'\], got 'own'"),
        ({"latent_attention": "x"}, "latent_attention must be one of"),
        ({"beam_width": 0}, "beam_width must be a positive integer, got 0"),
        ({"beam_width": None}, "beam_width must be a positive integer, got None"),
        ({"index_page_size": -64}, "index_page_size must be a positive integer, got -64"),
        ({"latent_page_size": 1.5}, "latent_page_size must be a positive integer, got 1.5"),
    ],
)
def test_requirements_that_mean_nothing_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        Requirements(**asked)


# the table ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", REFUSED, ids=name_of)
def test_case_J7_a_refused_pair_is_refused_with_both_options_and_a_way_out(line: Combination) -> None:
    with pytest.raises(UnsupportedCombination) as caught:
        create(line.example)
    message = str(caught.value)
    assert message.startswith(f"{line.first} and {line.second} cannot go together: ")
    assert message.endswith(line.note), "the way out"
    fact = message.removeprefix(f"{line.first} and {line.second} cannot go together: ").removesuffix(f"; {line.note}")
    assert len(fact) > 20, "the facts of this setting"


@pytest.mark.parametrize("line", REFUSED, ids=name_of)
def test_case_J7_each_refusal_is_the_only_one_of_its_example(line: Combination) -> None:
    """So that no line hides behind another, and each is needed."""
    refusing = [name_of(other) for other in REFUSED if other.refusal(line.example) is not None]
    hidden = {name_of(line)}
    if 'index_k="fp4"' in line.first:
        hidden.add('index_scorer="deepgemm" + unquantised index_k')  # what Hopper takes, said more generally
    assert set(refusing) <= hidden
    assert refusing[0] == name_of(line)


@pytest.mark.parametrize("line", WORKS, ids=name_of)
def test_each_pair_that_works_is_accepted(line: Combination) -> None:
    manager = create(line.example)
    assert isinstance(manager, ManagerV2) == line.example.use_v2


def test_a_setting_that_asks_for_nothing_is_never_refused() -> None:
    for v2 in (True, False):
        for facts in (H200, B200, A100, RTX, DeviceFacts("cpu", 0)):
            check_setting(Setting(config=CONFIG, use_v2=v2, device=facts))


@pytest.mark.parametrize("capability", [flag.name for flag in fields(Capabilities)])
def test_flags_and_table_agree(capability: str) -> None:
    asked = f"`{capability}=True`"
    for first, flags in (("`use_kv_cache_manager_v2=False`", V1), ("`use_kv_cache_manager_v2=True`", V2)):
        lines = [line for line in COMBINATIONS if (line.first, line.second) == (first, asked)]
        if capability in ("draft", "rewind"):  # asked for by the config and by next_n
            assert not lines
            assert getattr(flags, capability)
        else:
            assert [line.works for line in lines] == [getattr(flags, capability)]


def test_the_rendered_table_has_every_line_once() -> None:
    text = render_combinations().splitlines()
    assert len(text) == len(COMBINATIONS) + 2
    assert len(set(text)) == len(text)
    assert all(line.count(" | ") == 3 for line in text[2:])
    verdicts = [line.split(" | ")[2] for line in text[2:]]
    assert verdicts == sorted(verdicts)
    assert set(verdicts) == {"refused", "works"}
    for line in COMBINATIONS:
        assert f"| {line.first} | {line.second} | {'works' if line.works else 'refused'} | {line.note} |" in text


# the pairs of case J7, by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("kind", ["star", "ring", "helix"])
def test_case_J7_context_parallelism_that_splits_a_sequence(v2: bool, kind: str) -> None:
    asked = Setting(config=CONFIG, use_v2=v2, requirements=Requirements(context_parallel=kind))
    with pytest.raises(
        UnsupportedCombination,
        match=rf"sparse index \(DSA\) and .*with context_parallel={kind} a rank .* top 2048; spread work by tensor",
    ):
        create(asked)


@pytest.mark.parametrize("v2", [True, False])
def test_case_J7_beam_search(v2: bool) -> None:
    with pytest.raises(
        UnsupportedCombination, match=r"DSA\) and `beam_width` above 1.*beam_width=2.*fork the sequence"
    ):
        create(Setting(config=CONFIG, use_v2=v2, requirements=Requirements(beam_width=2)))


@pytest.mark.parametrize(
    ("connector", "message"),
    [
        ({"roles": frozenset({Role.LATENT})}, "`connector` without a role and the sparse index.*shop moves no index_k"),
        ({"roles": frozenset()}, "shop moves no index_k and no latent"),
        ({"sides": frozenset({Side.TARGET})}, "without the draft side and `draft_layers`.*shop moves no draft side"),
        ({"hears_rewind": False}, r"hears no rewind and drafts.*manager.on_rewind"),
    ],
)
def test_case_J7_a_connector_that_does_not_know_it_all(connector: dict[str, Any], message: str) -> None:
    drafting = CONFIG.with_options(draft_layers=(LayerSpec(),))
    asked = Requirements(connector=Connector(name="shop", **connector))
    with pytest.raises(UnsupportedCombination, match=message):
        create(Setting(config=drafting, requirements=asked))
    if "roles" not in connector:  # without drafts it does no harm
        create(Setting(config=CONFIG, requirements=asked))


@pytest.mark.parametrize("facts", [H200, A100, DeviceFacts("cpu", 0)])
def test_case_J7_fp4_on_a_device_without_it(facts: DeviceFacts) -> None:
    fp4 = CONFIG.with_options(index_k="fp4")
    asked = Setting(config=fp4, requirements=Requirements(index_scorer="deepgemm"), device=facts)
    with pytest.raises(UnsupportedCombination, match=f"sm 100 or later, and the device is {re.escape(str(facts))}"):
        create(asked)
    create(replace(asked, device=B200))
    create(replace(asked, requirements=Requirements()))  # our own scorer decodes it in software, everywhere
    create(replace(asked, config=CONFIG, device=H200))


def test_case_J7_nothing_is_built_before_a_refusal() -> None:
    device = Device.of("cpu")
    config = probe_config()

    def model(step: Any) -> Any:
        raise AssertionError("the model ran")

    for asked in ({"graph": True}, {"offload": True}, {"beam_width": 4}):
        with pytest.raises(UnsupportedCombination):
            V1Runner(
                config,
                model,
                device=device,
                max_rows=2,
                max_seq_len=32,
                num_blocks=1 << 40,
                requirements=Requirements(**asked),
            )
    assert device.ledger.allocations == 0


# block sizes and consumers: case C4 ---------------------------------------------------------------------------------

DEEPGEMM_ASKED = Requirements(index_scorer="deepgemm")


@pytest.mark.parametrize(
    ("facts", "allowed"), [(H200, {64}), (B200, {32, 64}), (A100, set()), (RTX, set()), (DeviceFacts("cpu", 0), set())]
)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("page_size", [None, 16, 32, 64])
def test_case_C4_the_indexers_block_size_is_what_the_device_takes(
    facts: DeviceFacts, allowed: set[int], block_size: int, page_size: int | None
) -> None:
    config = CONFIG.with_options(block_size=block_size)
    asked = Setting(config=config, requirements=replace(DEEPGEMM_ASKED, index_page_size=page_size), device=facts)
    size = block_size if page_size is None else page_size
    if size in allowed and block_size % size == 0:
        assert create(asked).block_size == block_size
        return
    with pytest.raises(UnsupportedCombination) as caught:
        create(asked)
    message = str(caught.value)
    assert str(facts) in message or f"blocks of {block_size}" in message
    if allowed and size not in allowed:
        assert f"takes index_k pages of {' or '.join(map(str, sorted(allowed)))} tokens, and they are {size}" in message
        assert "set `index_page_size` to a size it takes" in message


@pytest.mark.parametrize("main", [16, 32, 128])
def test_case_C4_two_sizes_are_set_apart_and_mapped_to_each_other(main: int) -> None:
    """Main pages of 16, 32 and 128 beside an indexer that takes 64: the block is the larger of the two."""
    config = CONFIG.with_options(block_size=max(main, 64), latent="fp8_ds_mla")
    needs = replace(DEEPGEMM_ASKED, latent_attention="flashmla", index_page_size=64, latent_page_size=main)
    setting = Setting(config=config, requirements=needs, device=H200)
    assert (setting.page_size(Role.INDEX_K), setting.page_size(Role.LATENT)) == (64, main)
    assert create(setting).block_size == max(main, 64)
    short = replace(setting, config=config.with_options(block_size=16))
    with pytest.raises(UnsupportedCombination, match="pages of 64 tokens do not divide blocks of 16; pages of 1 or 2"):
        create(replace(short, requirements=Requirements(index_page_size=64)))


def test_case_C4_sizes_that_do_not_divide() -> None:
    with pytest.raises(InvalidValue, match="block_size must be a power of two, got 48; 64 suits every consumer"):
        CONFIG.with_options(block_size=48)
    for asked in ({"latent_page_size": 48}, {"index_page_size": 48}):
        with pytest.raises(
            UnsupportedCombination, match=r"48 tokens do not divide blocks of 64; pages of 1 or .* or 64"
        ):
            create(Setting(config=CONFIG, requirements=Requirements(**asked)))


@pytest.mark.parametrize(
    ("config", "needs", "facts", "message"),
    [
        (
            {"index_k": "fp32"},
            {"index_scorer": "deepgemm"},
            B200,
            r"sm 100\) takes fp8 or fp4, and index_k is fp32",
        ),
        ({"index_heads": 16}, {"index_scorer": "deepgemm"}, H200, r"takes index_heads 32 or 64, and it is 16"),
        ({"index_head_dim": 256}, {"index_scorer": "deepgemm"}, B200, r"takes index_head_dim 32 or 64 or 128"),
        (
            {},
            {"index_scorer": "deepgemm"},
            RTX,
            r"Hopper \(sm 90\) or Blackwell \(sm 100\), and the device is RTX",
        ),
        ({}, {"latent_attention": "flashmla"}, H200, r"takes fp8_ds_mla, and latent is bf16"),
        ({"latent": "fp8_ds_mla"}, {"latent_attention": "flashmla"}, A100, r"FlashMLA runs on .* device is A100"),
        (
            {"latent": "fp8_ds_mla", "qk_rope_head_dim": 32},
            {"latent_attention": "flashmla"},
            B200,
            r"takes qk_rope_head_dim 64, and it is 32",
        ),
    ],
)
def test_a_consumer_is_asked_before_it_is_built_for(
    config: dict[str, Any], needs: dict[str, Any], facts: DeviceFacts, message: str
) -> None:
    with pytest.raises(UnsupportedCombination, match=message):
        create(Setting(config=CONFIG.with_options(**config), requirements=Requirements(**needs), device=facts))


@pytest.mark.parametrize(
    ("index_k", "page_size", "copied"), [("fp8", None, 36), ("fp8", 64, 36), ("fp8", 32, 64), ("bf16", 32, 36)]
)
def test_a_part_of_a_block_is_copied_whole_where_its_scales_stand_behind_smaller_pages(
    index_k: str, page_size: int | None, copied: int
) -> None:
    needs = Requirements(index_page_size=page_size, partial_hit=True, fork=True)
    manager = create(Setting(config=CONFIG.with_options(index_k=index_k), requirements=needs), max_seq_len=200)
    first = manager.open(tokens=np.arange(150))
    manager.extend([first], 150)
    manager.advance([first], 150)
    manager.commit([first], 150)
    second = manager.open(tokens=[*range(100), 7, 8])
    (copy,) = manager.take_copies()
    assert (manager.cached_tokens[second], copy.tokens) == (100, copied)


def test_options_of_v2_reach_it_and_are_refused_for_v1() -> None:
    mover = FakeMover(Bytes(64))
    options = {"tier_slots": (4,), "mover": mover, "resume_limit": 0.5, "event_capacity": 10, "prefix_caching": False}
    manager = create(Setting(config=CONFIG), **options)
    assert isinstance(manager, ManagerV2)
    assert (manager.resume_limit, manager.prefix_caching, manager.has_colder_tiers) == (0.5, False, True)
    assert [event.block for event in manager.take_events()] == [8, 4]
    with pytest.raises(UnsupportedCombination, match="`use_kv_cache_manager_v2=False` and `tier_slots`, `mover`"):
        create(Setting(config=CONFIG, use_v2=False), tier_slots=(4,), mover=mover)


# the runtime ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", REFUSED, ids=name_of)
def test_case_J7_the_runtime_refuses_what_the_table_refuses(line: Combination, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = line.example
    if not setting.use_v2:
        pytest.skip("V1 has a runner of its own")
    monkeypatch.setattr(DeviceFacts, "of", lambda device: setting.device)
    with pytest.raises(UnsupportedCombination, match="cannot go together"):
        DecodeRuntime(
            setting.config,
            lambda step: pytest.fail("nothing is built"),
            device="cpu",
            max_rows=2,
            max_seq_len=100,
            num_blocks=9,
            next_n=setting.next_n,
            requirements=setting.requirements,
        )


@pytest.mark.parametrize(
    ("asked", "options", "message"),
    [
        ("graph", {"mode": "eager"}, '`graph=True` and `mode="eager"` cannot go together'),
        ("prefix_hit", {"prefix_caching": False}, "`prefix_hit=True` and `prefix_caching=False`"),
        ("partial_hit", {"prefix_caching": False}, "use `prefix_caching=True`, or do not require it"),
        ("offload", {}, r"`offload=True` and `tiers=None` .* give `tiers=TierOptions\(...\)`"),
        ("growth", {}, "`growth=True` and `max_num_blocks=None` .* give `max_num_blocks`"),
    ],
)
def test_what_is_required_of_a_runtime_must_be_built(asked: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedCombination, match=message):
        tier_runtime("cpu", requirements=Requirements(**{asked: True}), **options)


@pytest.mark.parametrize("consumer", [DEEPGEMM, FLASHMLA])
def test_facts_of_a_consumer_are_sound(consumer: Any) -> None:
    for one in consumer.takes:
        for other in consumer.takes:
            assert one is other or not set(one.sm) & set(other.sm)
        for name, values in one.widths:
            assert hasattr(CONFIG, name)
            assert values
