"""Content keys are the same everywhere, tell every field apart, and never decide alone."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkv.errors import InvalidValue
from graphkv.manager.prefix import Content, PrefixIndex, Scope, sha256

B = 4


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def keys(scope: Scope, ids: np.ndarray, extra: tuple[Content, ...] = ()) -> list[str]:
    """Hex keys of a scope's root and of the blocks of `ids`, as the index makes them."""
    index = PrefixIndex(B, 1)
    node = index.root(scope)
    assert node is not None
    found = [node.key.hex()]
    for content in index.contents(ids, 0, ids.size // B, extra):
        node = index.insert(node, content)
        assert node is not None
        found.append(node.key.hex())
    return found


def test_keys_are_these_bytes_hashed() -> None:
    """The format by hand: fields with tag and 64-bit length, little-endian, absent ones left out."""
    block = struct.pack("<4i", 1, 2, 3, -4)
    for scope, fields in {
        Scope(): b"",
        Scope(lora=7): b"L" + struct.pack("<Qq", 8, 7),
        Scope(lora="x", salt=""): b"l" + struct.pack("<Q", 1) + b"x" + b"s" + struct.pack("<Q", 0),
        Scope(salt=b"\x00\xff"): b"S" + struct.pack("<Q", 2) + b"\x00\xff",
    }.items():
        root = hashlib.sha256(b"graphkv 1" + struct.pack("<Q", 4) + fields).digest()
        first = hashlib.sha256(root + b"T" + struct.pack("<Q", 16) + block).digest()
        image = b"C" + struct.pack("<Qqq", 19, -1, 2) + b"abc"
        second = hashlib.sha256(first + b"T" + struct.pack("<Q", 16) + block + image).digest()
        ids = tokens(1, 2, 3, -4, 1, 2, 3, -4, 5)
        assert keys(scope, ids, (Content(3, 6, b"abc"),))[2] != second.hex(), "the first block has the image too"
        with_first = hashlib.sha256(
            root + b"T" + struct.pack("<Q", 16) + block + b"C" + struct.pack("<Qqq", 19, 3, 6) + b"abc"
        )
        second = hashlib.sha256(with_first.digest() + b"T" + struct.pack("<Q", 16) + block + image)
        assert keys(scope, ids, (Content(3, 6, b"abc"),)) == [root.hex(), with_first.hexdigest(), second.hexdigest()]
        assert keys(scope, ids)[:2] == [root.hex(), first.hex()]


def test_golden_keys() -> None:
    """Written down once; a change of them strands every cache that others index by key."""
    assert keys(Scope("adapter", "tenant"), np.arange(9, dtype=np.int32), (Content(5, 7, b"d"),)) == [
        "7a0e19a7d8086daba2351df5c4876fc07b4778e7e087b053965c03dfc064e094",
        "31f76d1059ee2556ae610d9a050fc9ebc5e69f6a8b9ddbcb63a6922adf79aae8",
        "13002f66fb6ce73081f5b5557f32f4042f1539aa7cfe3c04592ebb5c985f089d",
    ]


def test_keys_are_equal_in_another_process_with_another_hash_seed() -> None:
    program = (
        "import json, numpy as np, sys; sys.path.insert(0, 'tests'); from test_prefix import keys, Scope, Content;"
        "print(json.dumps(keys(Scope('a', b'b'), np.arange(12, dtype=np.int32), (Content(2, 9, b'd'),))))"
    )
    here = keys(Scope("a", b"b"), np.arange(12, dtype=np.int32), (Content(2, 9, b"d"),))
    for seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(run.stdout) == here


FIELDS = [None, "", "x", b"", b"x", 0, 1, "1", "\x01"]


def test_case_F1_every_field_is_told_apart() -> None:
    scopes = [
        Scope(lora, salt)
        for lora in FIELDS
        if not isinstance(lora, bytes)
        for salt in FIELDS
        if not isinstance(salt, int)
    ]
    roots = {keys(scope, tokens())[0] for scope in scopes}
    assert len(roots) == len(scopes)
    with pytest.raises(InvalidValue, match="does not fit 64 bits"):
        Scope(lora=1 << 63)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.binary(max_size=3)), max_size=3, unique=True),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.binary(max_size=3)), max_size=3, unique=True),
)
def test_different_contents_of_the_same_tokens_have_different_keys(
    one: list[tuple[int, int, bytes]], other: list[tuple[int, int, bytes]]
) -> None:
    ids = tokens(*range(12))
    a, b = (tuple(Content(start, start + n, digest) for start, n, digest in items) for items in (one, other))
    inside = [
        [(c.start - s, c.stop - s, c.digest) for c in items if c.start < s + B and c.stop > s]
        for items in (a, b)
        for s in (0, 4, 8)
    ]
    same = [inside[i] == inside[i + 3] for i in range(3)]
    equal = [x == y for x, y in zip(keys(Scope(), ids, a)[1:], keys(Scope(), ids, b)[1:], strict=True)]
    assert equal == [all(same[: i + 1]) for i in range(3)]


def test_case_F1_with_a_hash_that_always_collides_the_content_decides() -> None:
    index = PrefixIndex(B, 1, lambda data: b"\0" * 32)
    root = index.root(Scope(lora="X"))
    assert root is not None
    (content,) = index.contents(tokens(1, 2, 3, 4), 0, 1, ())
    node = index.insert(root, content)
    assert node is not None
    assert index.root(Scope(salt="X")) is None
    assert index.find(root, content) is node
    other = index.contents(tokens(1, 2, 3, 5), 0, 1, ())[0]
    assert index.find(root, other) is None
    assert index.insert(root, other) is None
    assert index.insert(node, content) is None, "equal content at another place is another block"
    assert index.match(root, tokens(9, 9, 9, 9, 9)).nodes == []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(-1, 1), min_size=4, max_size=4), max_size=60),
    st.lists(st.integers(-1, 1), max_size=4),
)
def test_the_nearest_child_has_the_longest_common_prefix_of_any_number_of_siblings(
    blocks: list[list[int]], wanted: list[int]
) -> None:
    index = PrefixIndex(B, 1)
    root = index.root(Scope())
    assert root is not None
    for block in blocks:
        node = index.insert(root, index.contents(tokens(*block), 0, 1, ())[0])
        assert node is not None
        node.slots[0] = 1

    def common(block: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(block, wanted, strict=False)) if a != b), len(wanted))

    best = max(map(common, blocks), default=0)
    match = index.match(root, tokens(*wanted))
    if wanted in blocks:
        assert [node.content for node in match.nodes] == [np.array(wanted, "<i4").tobytes()]
    else:
        assert match.partial_tokens == best
        if match.partial is not None:
            assert common(np.frombuffer(match.partial.content, "<i4").tolist()) == best


def test_a_scope_whose_content_went_and_came_back_goes_on_under_either_root() -> None:
    index = PrefixIndex(B, 1)
    first, second = index.root(Scope()), index.root(Scope())
    assert first is not None
    assert second is not None
    assert first is not second
    (content,) = index.contents(tokens(1, 2, 3, 4), 0, 1, ())
    node = index.insert(first, content)
    assert index.insert(second, content) is node
    assert node is not None
    index.remove(node)
    assert len(index) == 0
    again = index.insert(second, content)
    assert again is not None
    assert index.root(Scope()) is second
    assert sha256(b"") == hashlib.sha256(b"").digest()
