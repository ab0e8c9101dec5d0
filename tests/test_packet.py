"""Packets: what the writer leaves in its arena is the packet that was asked for, whatever stood there before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkv import packet as pk
from graphkv.errors import InvalidValue

SIZE = pk.PacketSize(rows=6, edits=8, tokens=10)


def packed(step: int, records: list[list[int]], edits: list[list[int]], tokens: list[int], query: int) -> list[int]:
    """The packet's words in plain Python, from the layout in the design of packets."""
    words = [step % 2**31, 0, len(records), query, len(edits), len(tokens), 4] + [0] * 9
    for section in (*records, *edits, tokens):
        words += section
    total = sum((word % 2**32) * (2 * i + 1) for i, word in enumerate(words)) % 2**32
    words[1] = total - 2**32 if total >= 2**31 else total
    return words


STEP = st.tuples(
    st.lists(st.integers(0, 5), max_size=6, unique=True),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(0, 2**31 - 1)), max_size=8),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=10),
    st.dictionaries(st.integers(0, 5), st.integers(-50, 50), max_size=2),
)


@settings(max_examples=200)
@given(steps=st.lists(STEP, min_size=1, max_size=6), first=st.sampled_from([1, 2**31 - 3]))
def test_a_packet_says_what_was_asked_for_after_any_packet_before(steps: list[tuple], first: int) -> None:
    """The constant columns are kept from step to step; edits and tokens of a smaller batch lie where they were."""
    arena = np.full(SIZE.words, -0x5A5A5A5B, np.int32)
    arena[: pk.HEADER_WORDS] = 0
    writer = pk.PacketWriter(arena, SIZE)
    for step, (rows, query_len, edits, tokens, length_edits) in enumerate(steps, first):
        count = len(rows)
        want = [[row, i * query_len, -1, -1] for i, row in enumerate(rows)]
        records = writer.records(np.array(rows, np.int32), query_len)
        assert records.tolist() == want
        for i, edit in length_edits.items():
            if i < count:
                records[i, pk.LENGTH_EDIT] = want[i][pk.LENGTH_EDIT] = edit
                writer.amended()
        if edits:
            writer.edits(count, len(edits))[:] = edits
        if tokens:
            writer.tokens(count, len(edits), len(tokens))[:] = tokens
        sizes = {"rows": count, "tokens": count * query_len, "edits": len(edits), "token_words": len(tokens)}
        used = writer.seal(step, **sizes, bucket=4)
        expected = packed(step, want, [list(e) for e in edits], tokens, count * query_len)
        assert used == -(-len(expected) // 4) * 16
        assert arena[: len(expected)].tolist() == expected


@given(data=st.data())
def test_a_change_of_any_single_word_shows_in_the_checksum(data: st.DataObject) -> None:
    arena = np.zeros(SIZE.words, np.int32)
    writer = pk.PacketWriter(arena, SIZE)
    writer.records(np.array([3, 1, 5], np.int32), 2)
    writer.edits(3, 2)[:] = [[3, 4, 77], [1, 0, 9]]
    used = writer.seal(9, rows=3, tokens=6, edits=2, token_words=0, bucket=4) // 4
    at = data.draw(st.integers(0, used - 1).filter(lambda i: i != pk.CHECKSUM))
    arena[at] ^= data.draw(st.integers(-(2**31), 2**31 - 1).filter(bool))
    words = arena[:used].view(np.uint32).astype(np.uint64)
    words[pk.CHECKSUM] = 0
    total = int((words * (2 * np.arange(used, dtype=np.uint64) + 1)).sum()) % 2**32
    assert total != int(arena[pk.CHECKSUM]) % 2**32


def test_an_arena_of_another_shape_is_refused() -> None:
    with pytest.raises(InvalidValue, match=rf"int32 \[{SIZE.words}\], got int64 \[5\]|got int64 \(5,\)"):
        pk.PacketWriter(np.zeros(5, np.int64), SIZE)  # type: ignore[arg-type]
