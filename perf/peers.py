"""Block managers side by side: one workload, whoever keeps the books.

Each class does what its engine does on the host for one decode step of a batch (`step`), for a prompt that arrives
(`open`) and for a request that ends (`close`): blocks, tables, lengths, and what makes full blocks findable. Engines
are driven through the calls that their own schedulers make.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from array import array
from typing import Any, Protocol
from unittest.mock import MagicMock

import numpy as np
import torch

from graphkv.manager.v2 import ManagerV2

BLOCK_SIZE = 64
Ids = np.ndarray[Any, np.dtype[np.int32]]


class Books(Protocol):
    """A block manager with `max_rows` requests at most, over `num_blocks` blocks of 64 tokens."""

    def __init__(self, num_blocks: int, max_rows: int, max_tokens: int) -> None: ...

    def open(self, prompt: Ids) -> int:
        """A request begins: what of its prompt is cached is found, and it has blocks for all of it. Tokens found."""

    def step(self) -> None:
        """Every open request gets a token: room for it, then its commit."""

    def close(self) -> None:
        """The request that was opened last ends; what it computed stays findable."""


class Graphkv:
    """`ManagerV2`, as the runtime drives it."""

    def __init__(self, num_blocks: int, max_rows: int, max_tokens: int) -> None:
        columns = max_tokens // BLOCK_SIZE
        self.manager = ManagerV2(
            num_blocks=num_blocks + 1,
            block_size=BLOCK_SIZE,
            max_rows=max_rows,
            max_blocks=columns,
            max_edits=2 * columns + max_rows,
        )
        self.rows: list[int] = []
        self.batch = np.zeros(0, np.int32)
        self.edits = np.zeros((self.manager.table.max_edits, 3), np.int32)

    def open(self, prompt: Ids) -> int:
        manager = self.manager
        row = manager.open(tokens=prompt)
        found = int(manager.length[row])
        manager.claim(np.array([row], np.int32), prompt.size - found)
        self.rows.append(row)
        self.batch = np.array(self.rows, np.int32)
        manager.take_copies()
        manager.take_edits(self.edits)
        manager.commit(self.batch[-1:], prompt.size)
        manager.index_commits()
        return found

    def step(self) -> None:
        manager, batch = self.manager, self.batch
        manager.claim(batch, 1)
        manager.take_edits(self.edits)
        length = manager.length[batch]
        manager.token_ids[batch, length - 1] = 7
        manager.commit(batch, length)
        manager.index_commits(64)

    def close(self) -> None:
        row = self.rows.pop()
        self.manager.close(row, 0, int(self.manager.serial[row]))


class PythonLoop:
    """The least that a loop over requests can do, with lists and dictionaries, and Python's own hash of tuples."""

    def __init__(self, num_blocks: int, max_rows: int, max_tokens: int) -> None:
        self.free = list(range(num_blocks, 0, -1))
        self.requests: list[dict[str, Any]] = []
        self.known: dict[int, int] = {}  # key of a chain -> block
        self.table = np.zeros((max_rows, max_tokens // BLOCK_SIZE), np.int32)

    def open(self, prompt: Ids) -> int:
        tokens = prompt.tolist()
        request = {"tokens": tokens, "blocks": [], "key": 0, "line": len(self.requests)}
        found = 0
        for start in range(0, len(tokens) - BLOCK_SIZE, BLOCK_SIZE):
            key = hash((request["key"], tuple(tokens[start : start + BLOCK_SIZE])))
            if key not in self.known:
                break
            request["blocks"].append(self.known[key])
            request["key"], found = key, start + BLOCK_SIZE
        self.requests.append(request)
        for length in range(found + 1, len(tokens) + 1):
            self._reach(request, length)
        return found

    def step(self) -> None:
        for request in self.requests:
            request["tokens"].append(7)
            self._reach(request, len(request["tokens"]))

    def _reach(self, request: dict[str, Any], length: int) -> None:
        blocks = request["blocks"]
        if length > len(blocks) * BLOCK_SIZE:
            blocks.append(self.free.pop())
            self.table[request["line"], len(blocks) - 1] = blocks[-1]
        if not length % BLOCK_SIZE:
            request["key"] = hash((request["key"], tuple(request["tokens"][length - BLOCK_SIZE : length])))
            self.known.setdefault(request["key"], blocks[-1])

    def close(self) -> None:
        kept = set(self.known.values())
        self.free += [block for block in self.requests.pop()["blocks"] if block not in kept]


class Vllm:
    """`KVCacheManager` of vLLM V1 with prefix caching by SHA-256, as its scheduler drives it."""

    def __init__(self, num_blocks: int, max_rows: int, max_tokens: int) -> None:
        interface = importlib.import_module("vllm.v1.kv_cache_interface")
        utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        manager = importlib.import_module("vllm.v1.core.kv_cache_manager")
        sha256 = importlib.import_module("vllm.utils.hashing").sha256
        utils.init_none_hash(sha256)
        self.hasher = utils.get_request_block_hasher(BLOCK_SIZE, sha256)
        self.request = importlib.import_module("vllm.v1.request").Request
        self.sampling = importlib.import_module("vllm.sampling_params").SamplingParams(max_tokens=max_tokens)
        spec = interface.FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
        groups = [interface.KVCacheGroupSpec(["layer"], spec)]
        config = interface.KVCacheConfig(num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = manager.KVCacheManager(config, max_tokens, BLOCK_SIZE, BLOCK_SIZE)
        self.requests: list[Any] = []
        self.names = itertools.count()

    def open(self, prompt: Ids) -> int:
        name, tokens = str(next(self.names)), prompt.tolist()
        request = self.request(name, tokens, self.sampling, None, block_hasher=self.hasher)
        blocks, found, _ = self.manager.get_computed_blocks(request)
        assert self.manager.allocate_slots(request, len(tokens) - found, found, blocks) is not None
        request.num_computed_tokens = len(tokens)
        request.append_output_token_ids(7)
        self.requests.append(request)
        return int(found)

    def step(self) -> None:
        self.manager.new_step_starts()
        for request in self.requests:
            self.manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
            request.append_output_token_ids(7)

    def close(self) -> None:
        self.manager.free(self.requests.pop())


class Sglang:
    """`RadixCache` over the paged allocator of SGLang, with tensors on the CPU, where it launches no kernel.

    Its tree learns of tokens when a request ends, so a step commits nothing.
    """

    def __init__(self, num_blocks: int, max_rows: int, max_tokens: int) -> None:
        _leave_out_torchvision()
        allocators = importlib.import_module("sglang.srt.mem_cache.allocator")
        base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        radix = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        self.key, self.match, self.insert = radix.RadixKey, base.MatchPrefixParams, base.InsertParams
        size, dtype = num_blocks * BLOCK_SIZE, torch.bfloat16
        self.slots = allocators.PagedTokenToKVPoolAllocator(size, BLOCK_SIZE, dtype, "cpu", MagicMock(), False)
        self.tree = radix.RadixCache.create_simulated(mock_allocator=self.slots, page_size=BLOCK_SIZE)
        self.req_to_token = torch.zeros(max_rows, max_tokens, dtype=torch.int32)
        self.lengths = torch.zeros(0, dtype=torch.int64)
        self.requests: list[tuple[array[int], Any, int]] = []  # prompt, the node that is locked, tokens found

    def open(self, prompt: Ids) -> int:
        tokens, line = array("q", prompt.tolist()), len(self.requests)
        result = self.tree.match_prefix(self.match(key=self.key(tokens[:-1])))
        node, found = result.last_device_node, int(result.device_prefix_len)
        self.tree.inc_lock_ref(node)
        before = self.tree.path_device_indices(node).to(torch.int64) if found else torch.zeros(0, dtype=torch.int64)
        last = before[-1:] if found else torch.tensor([-1])
        sizes = torch.tensor([found]), torch.tensor([len(tokens)])
        slots = self.slots.alloc_extend(sizes[0], sizes[0], sizes[1], sizes[1], last, len(tokens) - found)
        assert slots is not None
        self.req_to_token[line, :found] = before.to(torch.int32)
        self.req_to_token[line, found : len(tokens)] = slots.to(torch.int32)
        self.requests.append((tokens, node, found))
        self.lengths = torch.cat([self.lengths, sizes[1]])
        return found

    def step(self) -> None:
        lines = torch.arange(len(self.requests))
        last = self.req_to_token[lines, self.lengths - 1].to(torch.int64)
        self.lengths = self.lengths + 1
        slots = self.slots.alloc_decode(self.lengths, self.lengths, last)
        assert slots is not None
        self.req_to_token[lines, self.lengths - 1] = slots.to(torch.int32)

    def close(self) -> None:
        tokens, node, found = self.requests.pop()
        slots = self.req_to_token[len(self.requests), : len(tokens)].to(torch.int64)
        key = self.key(tokens).page_aligned(BLOCK_SIZE)
        known = self.tree.insert(self.insert(key=key, value=slots[: len(key)].clone())).prefix_len
        self.slots.free_segment(slots[found:known], start_pos=found)
        self.slots.free_segment(slots[len(key) :], start_pos=len(key))
        self.tree.dec_lock_ref(node)
        self.lengths = self.lengths[:-1]


def _leave_out_torchvision() -> None:
    """SGLang imports it for images, and its builds do not load beside a torch without CUDA."""
    if importlib.util.find_spec("torchvision") is None and "torchvision" not in sys.modules:
        importlib.import_module("transformers.utils").is_torchvision_available()  # remembers that it is not
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
            sys.modules[name] = MagicMock(__path__=[], __spec__=importlib.machinery.ModuleSpec(name, None))


ALL: dict[str, tuple[type[Books], str | None]] = {
    "graphkv": (Graphkv, None),
    "loop": (PythonLoop, None),
    "vllm": (Vllm, "vllm"),
    "sglang": (Sglang, "sglang"),
}
"""By name: the books, and the package that they need."""
