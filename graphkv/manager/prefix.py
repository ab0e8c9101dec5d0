"""Which content is known: a tree of blocks by what their tokens are and what came before them.

A block's key is SHA-256 over its parent's key and its own content; the root of a tree is keyed by the scope that must
agree for content to be shared. Every field is tagged and has its length before it, so that no two different inputs read
the same, and every number is little-endian, so that keys are equal in all processes and on all machines. Keys find a
block; what is found is compared with the tokens asked for before it counts.

The tree knows nothing of tiers but the slot numbers it is told to remember.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, insort_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphkv.errors import InvalidValue
from graphkv.manager.retention import Worth

Digest = Callable[[bytes], bytes]
TOKEN_BYTES = 4
_LITTLE = np.dtype("<i4")
ABSENT = 0
"""Slot of content that is not in a tier: slot 0 is never handed out."""
_WORTHLESS = Worth(0, 0.0, 0)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _field(tag: bytes, payload: bytes) -> bytes:
    return tag + struct.pack("<Q", len(payload)) + payload


@dataclass(frozen=True, slots=True)
class Scope:
    """What must agree, besides tokens, for two sequences to share content. Absent and empty differ.

    Attributes:
        lora: adapter by number or name.
        salt: anything that sets tenants apart.
    """

    lora: int | str | None = None
    salt: str | bytes | None = None

    def __post_init__(self) -> None:
        if isinstance(self.lora, int) and not -(1 << 63) <= self.lora < 1 << 63:
            raise InvalidValue(f"adapter number {self.lora} does not fit 64 bits; name it by a string")

    def encoded(self) -> bytes:
        """Its fields, those that are absent left out."""
        fields = b""
        if isinstance(self.lora, str):
            fields += _field(b"l", self.lora.encode())
        elif self.lora is not None:
            fields += _field(b"L", struct.pack("<q", self.lora))
        if isinstance(self.salt, str):
            fields += _field(b"s", self.salt.encode())
        elif self.salt is not None:
            fields += _field(b"S", self.salt)
        return fields


EVERYONE = Scope()
"""The scope of sequences that name none."""


class Content(NamedTuple):
    """Tokens start .. stop-1 stand for something (an image, say) that has this digest; their ids alone do not tell."""

    start: int
    stop: int
    digest: bytes


class Node:
    """Findable content of one block.

    Attributes:
        key: 32 bytes; content: what the key was made of, besides the parent's key.
        parent: the block before it; None for the root of a scope.
        depth: blocks from the root, 0 for the root itself.
        slots: its slot in each tier, `ABSENT` where it is not.
        children_in: for each tier, how many of its children are there.
        worth: its retention.
        loading: whether a transfer is bringing it to the device.
        plans: how many `DropPlan`s name it.
    """

    __slots__ = (
        "_others",
        "_plain",
        "children_in",
        "content",
        "depth",
        "key",
        "loading",
        "parent",
        "plans",
        "slots",
        "worth",
    )

    def __init__(self, key: bytes, content: bytes, parent: Node | None, num_tiers: int, worth: Worth) -> None:
        self.key, self.content, self.parent, self.worth = key, content, parent, worth
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.slots = [ABSENT] * num_tiers
        self.children_in = [0] * num_tiers
        self.loading = False
        self.plans = 0
        # Children whose tokens alone tell what they are, by content, and the others. Among sorted byte strings a
        # neighbour has the longest common prefix, however many there are.
        self._plain: list[Node] = _NO_CHILDREN
        self._others: list[Node] = _NO_CHILDREN

    @property
    def is_leaf(self) -> bool:
        return not (self._plain or self._others)

    @property
    def root(self) -> Node:
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def chain(self) -> list[Node]:
        """The blocks from the first to this one, the root left out."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def children(self) -> Iterator[Node]:
        yield from self._plain
        yield from self._others

    def nearest(self, content: bytes) -> tuple[Node, int] | None:
        """The plain child with the longest common prefix with `content`, and that prefix's bytes; None if 0."""
        plain = self._plain
        at = bisect_left(plain, content, key=_content_of)
        best: tuple[Node, int] | None = None
        for node in plain[max(0, at - 1) : at + 1]:
            common = _common_bytes(node.content, content)
            if common and (best is None or common > best[1]):
                best = node, common
        return best

    def add(self, child: Node, plain: bool) -> None:
        if not plain:
            self._others = [*self._others, child]
        elif not self._plain:
            self._plain = [child]
        else:
            insort_left(self._plain, child, key=_content_of)

    def discard(self, child: Node) -> None:
        at = bisect_left(self._plain, child.content, key=_content_of)
        if at < len(self._plain) and self._plain[at] is child:
            del self._plain[at]
        else:
            self._others.remove(child)


_NO_CHILDREN: list[Node] = []
"""Stands for no children in every block that has none, which most blocks have for long; never written."""


def _content_of(node: Node) -> bytes:
    return node.content


def _common_bytes(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b))
    differs = np.frombuffer(a, np.uint8, size) != np.frombuffer(b, np.uint8, size)
    return int(differs.argmax()) if differs.any() else size


class Match(NamedTuple):
    """Known content of a prompt: whole blocks in order, then `partial_tokens` leading tokens of the block `partial`."""

    nodes: list[Node]
    partial: Node | None
    partial_tokens: int

    def without(self, tokens: int, block_size: int) -> Match:
        """The match less its last tokens; what is left of a whole block becomes a part of it."""
        kept = max(0, len(self.nodes) * block_size + self.partial_tokens - tokens)
        whole, part = divmod(kept, block_size)
        if not part:
            return Match(self.nodes[:whole], None, 0)
        return Match(self.nodes[:whole], self.nodes[whole] if whole < len(self.nodes) else self.partial, part)


class PrefixIndex:
    """All findable content.

    Args:
        block_size: tokens a block.
        num_tiers: how many slots a node remembers.
        digest: 32-byte hash; anything weaker than SHA-256 is for tests alone.
        back_off: tokens that every match gives up at its end.
    """

    def __init__(self, block_size: int, num_tiers: int, digest: Digest = sha256, back_off: int = 0) -> None:
        self.block_size, self.num_tiers, self.back_off = block_size, num_tiers, back_off
        self._digest = digest
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}
        self._head = b"T" + struct.pack("<Q", block_size * TOKEN_BYTES)

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def root(self, scope: Scope) -> Node | None:
        """The root of a scope; None if another scope has the same key, which a sound digest makes impossible."""
        content = scope.encoded()
        key = self._digest(b"graphkv 1" + struct.pack("<Q", self.block_size) + content)
        known = self._roots.get(key)
        if known is None:
            return Node(key, content, None, self.num_tiers, _WORTHLESS)
        return known if known.content == content else None

    def contents(self, tokens: NDArray[np.int32], first: int, count: int, extra: Sequence[Content]) -> list[bytes]:
        """What the keys of `count` blocks are made of; `tokens` begins where block `first`, the first of them, does."""
        size = self.block_size * TOKEN_BYTES
        data = tokens[: count * self.block_size].astype(_LITTLE, copy=False).tobytes()
        blocks = [data[i : i + size] for i in range(0, count * size, size)]
        if extra:
            blocks = [block + self._extra(first + i, extra) for i, block in enumerate(blocks)]
        return blocks

    def _extra(self, block: int, extra: Sequence[Content]) -> bytes:
        start, stop = block * self.block_size, (block + 1) * self.block_size
        inside = [item for item in extra if item.start < stop and item.stop > start]
        return b"".join(
            _field(b"C", struct.pack("<qq", item.start - start, item.stop - start) + item.digest) for item in inside
        )

    def knows(self, node: Node) -> bool:
        """Whether a block is still in the tree."""
        return self._nodes.get(node.key) is node

    def find(self, parent: Node, content: bytes) -> Node | None:
        """The child of `parent` with that content."""
        node = self._nodes.get(self._key(parent, content))
        return node if node is not None and node.parent is parent and node.content == content else None

    def _key(self, parent: Node, content: bytes) -> bytes:
        return self._digest(parent.key + self._head + content)

    def match(self, root: Node, tokens: NDArray[np.int32], extra: Sequence[Content] = ()) -> Match:
        """The longest known prefix of `tokens` under `root`, less `back_off` tokens."""
        longest = self._longest(root, tokens, extra)
        return longest.without(self.back_off, self.block_size) if self.back_off else longest

    def _longest(self, root: Node, tokens: NDArray[np.int32], extra: Sequence[Content]) -> Match:
        whole = tokens.size // self.block_size
        node, nodes = root, []
        for content in self.contents(tokens, 0, whole, extra):
            found = self.find(node, content)
            if found is None:
                break
            nodes.append(found)
            node = found
        start = len(nodes) * self.block_size
        rest = tokens[start : start + self.block_size]
        if rest.size and not any(item.start < start + rest.size and item.stop > start for item in extra):
            near = node.nearest(rest.astype(_LITTLE, copy=False).tobytes())
            if near is not None and (count := near[1] // TOKEN_BYTES):
                return Match(nodes, near[0], count)
        return Match(nodes, None, 0)

    def insert(self, parent: Node, content: bytes, worth: Worth = _WORTHLESS) -> Node | None:
        """The child of `parent` with that content, made if it is not there, and then worth that much.

        None if its key is taken by other content, which a sound digest makes impossible: it then stays unfindable.
        """
        key = self._key(parent, content)
        node = self._nodes.get(key)
        if parent.parent is None:  # a root lives as long as it has children, so another may stand in its place now
            parent = self._roots.get(parent.key, parent)
        if node is not None:
            return node if node.parent is parent and node.content == content else None
        if parent.parent is None and self._roots.setdefault(parent.key, parent).content != parent.content:
            return None
        node = Node(key, content, parent, self.num_tiers, worth)
        parent.add(node, plain=len(content) == self.block_size * TOKEN_BYTES)
        self._nodes[key] = node
        return node

    def remove(self, node: Node) -> None:
        """Forget a leaf."""
        if not node.is_leaf or node.parent is None:
            raise AssertionError(f"only a leaf can be removed, not the block at depth {node.depth}")
        del self._nodes[node.key]
        node.parent.discard(node)
        if node.parent.parent is None and node.parent.is_leaf:
            del self._roots[node.parent.key]

    def check(self) -> None:
        """`AssertionError` unless the tree is one: parents known, children listed once, keys those of the content."""
        for key, node in self._nodes.items():
            parent = node.parent
            if parent is None or key != node.key or key != self._key(parent, node.content):
                raise AssertionError(f"the block at depth {node.depth} is not under its own key")
            home = self._roots if parent.parent is None else self._nodes
            if home.get(parent.key) is not parent or sum(child is node for child in parent.children()) != 1:
                raise AssertionError(f"the block at depth {node.depth} is not listed once by its parent")
            for tier in range(self.num_tiers):
                here = sum(child.slots[tier] != ABSENT for child in node.children())
                if here != node.children_in[tier]:
                    raise AssertionError(f"{here} children in tier {tier}, {node.children_in[tier]} counted")
            if all(slot == ABSENT for slot in node.slots):
                raise AssertionError(f"the block at depth {node.depth} is in no tier")
        for root in self._roots.values():
            if root.is_leaf:
                raise AssertionError("a scope without content is still known")
