"""The runtime with cached prefixes: fewer tokens fed, every byte right, also behind copies. Both devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from probe import PER_REQUEST, probe_config, probe_runtime

from graphkv.errors import InvalidValue
from graphkv.layout import Role, Side
from graphkv.manager.prefix import Scope
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Sequence

WIDTH = 16  # values of a latent record: the tag, then the position and layer, in turn


def tags(runtime: DecodeRuntime, sequence: Sequence, layer: int = 2) -> list[int]:
    """The token that each valid position of a sequence holds in a layer's latent pages, through its blocks."""
    runtime.retire()
    runtime.device.synchronize()
    pages = runtime.pools.view(Side.TARGET, Role.LATENT, layer).cpu().view(torch.float32)
    scale, size = runtime.pools.page_scale(Side.TARGET, Role.LATENT), runtime.config.block_size
    table = runtime.manager.block_table[sequence.row]
    return [int(pages[table[p // size] * scale, p % size, 0, 0]) for p in range(sequence.length)]


def told(runtime: DecodeRuntime, sequence: Sequence) -> None:
    """Each position of a sequence holds the token that the host knows of it."""
    assert tags(runtime, sequence) == sequence.tokens[: sequence.length].tolist()
    runtime.check()


def fresh(device: torch.device, **options: object) -> DecodeRuntime:
    runtime, _, _ = probe_runtime(device, probe_config(draft=""), **{"self_check": True} | options)
    return runtime


@pytest.mark.parametrize("next_n", [1, 3])
def test_a_sequence_that_begins_alike_feeds_the_rest_only(device: torch.device, next_n: int) -> None:
    runtime = fresh(device, next_n=next_n)
    prompt = np.arange(40) + PER_REQUEST
    a = runtime.open(prompt)
    runtime.prefill([a])
    for _ in range(10):
        runtime.step([a])
    runtime.retire()
    b = runtime.open(np.append(prompt, [7, 8, 9]))
    assert (a.cached_tokens, b.cached_tokens) == (0, 40), "32 are shared and 8 of the third block are copied"
    other = runtime.open(prompt, scope=Scope(salt="tenant"))
    assert other.cached_tokens == 0
    before = runtime.stats().steps_submitted
    runtime.prefill([b])
    assert runtime.stats().steps_submitted == before + 1
    runtime.prefill([other])
    for _ in range(30):
        runtime.step([b, a, other])
    for sequence in (a, b, other):
        told(runtime, sequence)


def test_case_F3_the_same_prompt_twice_computes_one_token(device: torch.device) -> None:
    runtime = fresh(device)
    for length in (16, 17, 31, 32):
        prompt = np.arange(length) + length * PER_REQUEST
        first = runtime.open(prompt)
        runtime.prefill([first])
        runtime.retire()
        again = runtime.open(prompt)
        assert again.cached_tokens == (length - 1 if length % 16 == 0 else length // 16 * 16)
        runtime.prefill([again])
        for _ in range(20):
            runtime.step([first, again])
        told(runtime, first)
        told(runtime, again)
        assert first.tokens.tolist() == again.tokens.tolist()
        runtime.close(first)
        runtime.close(again)


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_forks_go_on_their_own_ways(device: torch.device, mode: str) -> None:
    runtime = fresh(device, mode=mode)
    a = runtime.open(np.arange(40) + PER_REQUEST)
    with pytest.raises(InvalidValue, match="prefill it before forking"):
        runtime.fork(a)
    runtime.prefill([a])
    runtime.step([a])
    b = runtime.fork(a)
    assert b.tokens.tolist() == a.tokens.tolist()
    runtime.append(b, np.arange(5) + 3 * PER_REQUEST)
    runtime.prefill([b])
    for _ in range(12):
        runtime.step([a, b])
    runtime.rewind(b, 30)
    for _ in range(20):
        runtime.step([b, a])
    told(runtime, a)
    told(runtime, b)


def test_cached_blocks_make_room_under_pressure_and_their_bytes_are_never_served_stale(device: torch.device) -> None:
    runtime = fresh(device, num_blocks=12)
    rng = np.random.default_rng(5)
    reused = 0
    for _ in range(40):
        family, length = int(rng.integers(1, 4)), int(rng.integers(20, 70))
        prompt = np.arange(length) + family * PER_REQUEST
        if length > 40:
            prompt[int(rng.integers(5, 40)) :] += 7 * PER_REQUEST
        sequence = runtime.open(prompt)
        reused += sequence.cached_tokens
        runtime.prefill([sequence])
        for _ in range(int(rng.integers(0, 20))):
            runtime.step([sequence])
        told(runtime, sequence)
        runtime.close(sequence)
    assert reused > 300
    stats = runtime.manager.stats()
    assert stats.tokens_matched == reused
    assert stats.blocks_evicted > 10


def test_off_means_off(device: torch.device) -> None:
    runtime = fresh(device, prefix_caching=False)
    a = runtime.open(np.arange(40))
    runtime.prefill([a])
    runtime.close(a)
    runtime.retire()
    assert runtime.open(np.arange(40)).cached_tokens == 0
    assert runtime.stats().blocks_free == runtime.stats().blocks_total
