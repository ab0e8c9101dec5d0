"""Compiled models trace through the ops: a whole decode layer in one graph, and every op in every format by opcheck."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphkv import codecs, ops
from graphkv.layout import IndexKFormat, LatentFormat, index_k_layout, latent_layout

I32, I64, U8 = torch.int32, torch.int64, torch.uint8
ROWS, NEXT_N, BLOCK, COLUMNS = 2, 2, 8, 4
HIDDEN, RANK, ROPE, HEADS, INDEX_HEADS, WIDTH, TOPK = 64, 128, 16, 4, 2, 128, 12
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]


@dataclass
class Layer:
    """Projects, stores, scores, selects and attends: what a decode layer does with the cache, with nothing of it left
    out of the graph. Two rows of two tokens, then a padded one."""

    latent: str
    index_k: str
    device: torch.device

    def __post_init__(self) -> None:
        torch.manual_seed(7)
        widths = {"latent": RANK, "rope": ROPE, "key": WIDTH, "weights": INDEX_HEADS}
        widths |= {"index_query": INDEX_HEADS * WIDTH, "query": HEADS * (RANK + ROPE), "out": HEADS * RANK}
        self.weight = {name: (torch.randn(HIDDEN, n) / 8).to(self.device) for name, n in widths.items()}
        self.table = torch.tensor([[3, 1, 4, 0], [2, 5, 0, 0], [0, 0, 0, 0]], dtype=I32, device=self.device)
        position = torch.tensor([[21, 22], [9, 10]])
        self.context_len = torch.tensor([*(position.flatten() + 1).tolist(), 0, 0], dtype=I32, device=self.device)
        self.token_row = torch.tensor([0, 0, 1, 1, 2, 2], dtype=I32, device=self.device)
        page = self.table.cpu()[[[0], [1]], position // BLOCK].long()
        self.slot = torch.cat([(page * BLOCK + position % BLOCK).flatten(), torch.tensor([-1, -1])]).to(self.device)
        self.fresh()

    def fresh(self) -> None:
        """New pages and buffers, with the same bytes every time."""
        torch.manual_seed(8)
        tokens = len(self.slot)

        def pages(layout: Any) -> torch.Tensor:
            return torch.randint(0, 60, (6, BLOCK, 1, layout.token_bytes), dtype=U8).to(self.device)

        self.pages = pages(latent_layout(LatentFormat(self.latent), RANK, ROPE, BLOCK))
        self.index_pages = pages(index_k_layout(IndexKFormat(self.index_k), WIDTH, BLOCK))
        self.logits = torch.zeros(tokens, COLUMNS * BLOCK, device=self.device)
        self.found = [torch.zeros(tokens, TOPK, dtype=I32, device=self.device) for _ in range(2)]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, tokens = self.weight, len(self.slot)
        latent, rope, key = (hidden @ weight[name] for name in ("latent", "rope", "key"))
        ops.store_layer(
            latent, rope, self.pages, self.slot, key, self.index_pages, self.slot, self.latent, self.index_k
        )
        query = (hidden @ weight["index_query"]).view(tokens, INDEX_HEADS, WIDTH)
        weights = hidden @ weight["weights"]
        if self.index_k == "fp8":
            query, scale = codecs.quantise_query(query)
            weights = weights * scale
        rows = (self.table, self.token_row, self.context_len)
        ops.paged_index_logits(query, weights, self.index_pages, *rows, self.logits, self.index_k)
        ops.topk(self.logits, self.context_len, self.table, self.token_row, BLOCK, *self.found)
        absorbed = (hidden @ weight["query"]).view(tokens, HEADS, RANK + ROPE)
        attended = torch.empty(tokens, HEADS, RANK, device=hidden.device)
        ops.sparse_mla_decode(absorbed, self.pages, self.found[0], 0.1, self.latent, 1.0, RANK, attended)
        return hidden + attended.flatten(1) @ weight["out"].T

    @property
    def written(self) -> dict[str, torch.Tensor]:
        names = ("pages", "index_pages", "logits")
        return {name: getattr(self, name).clone() for name in names} | {"slot": self.found[0].clone()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("latent", "index_k"), [("bf16", "fp8"), ("fp8_ds_mla", "fp4"), ("fp32", "fp32")])
def test_a_decode_layer_compiles_into_one_graph(device: torch.device, backend: str, latent: str, index_k: str) -> None:
    if backend == "inductor" and device.type == "cpu":
        pytest.skip("inductor needs a C++ compiler on the CPU")
    layer = Layer(latent, index_k, device)
    hidden = torch.randn(len(layer.slot), HIDDEN).to(device)
    own = layer(hidden)
    own_written = layer.written
    layer.fresh()
    torch._dynamo.reset()
    got = torch.compile(layer.__call__, backend=backend, fullgraph=True)(hidden)
    exact = backend == "aot_eager"  # inductor sums and rounds in its own order
    if exact:
        assert torch.equal(got, own)
        for name, value in layer.written.items():
            assert torch.equal(value, own_written[name]), name
    else:
        torch.testing.assert_close(got, own, atol=2e-2, rtol=2e-2)
    assert (layer.found[0][:4] >= 0).any(1).all()
    assert (layer.found[0][4:] == -1).all()
    assert torch.isfinite(got).all()


def arguments(name: str, fmt: str, device: torch.device) -> dict[str, Any]:
    """Lawful arguments of an op on pages of a format."""
    three = {"page_table": torch.ones(2, 2, dtype=I32), "token_row": torch.tensor([0, 1], dtype=I32)}
    given: dict[str, Any]
    if name in ("store_latent", "sparse_mla_decode"):
        pages = torch.zeros(3, 4, 1, latent_layout(LatentFormat(fmt), 128, 16, 4).token_bytes, dtype=U8)
        given = {"pages": pages, "format": fmt, "scale": 1.0}
        if name == "store_latent":
            given |= {"c": torch.ones(2, 128), "rope": torch.ones(2, 16), "slot": torch.tensor([1, -1])}
        else:
            slot = torch.tensor([[0, 5], [-1, -1]], dtype=I32)
            given |= {"q": torch.ones(2, 3, 144), "slot": slot, "softmax_scale": 0.5, "kv_lora_rank": 128}
            given["out"] = torch.zeros(2, 3, 128)
    else:
        layout = index_k_layout(IndexKFormat(fmt), 128, 4)
        given = {"pages": torch.zeros(3, 4, 1, layout.token_bytes, dtype=U8), "format": fmt}
        if name == "store_index_k":
            given |= {"k": torch.ones(2, 128), "slot": torch.tensor([1, -1]), "scale_mode": "pow2", "amax_floor": 1e-4}
        elif name == "gather_index_k":
            given |= {"page_table": three["page_table"], "start": torch.tensor([0, 3, 8], dtype=I32)}
            given["out_values"] = torch.zeros(9, layout.value_bytes, dtype=U8)
            given["out_scales"] = torch.zeros(9, layout.scale_bytes, dtype=U8)
        else:
            given |= three | {"q": torch.ones(2, 3, 128), "weights": torch.ones(2, 3), "out": torch.zeros(2, 8)}
            given["context_len"] = torch.tensor([7, 0], dtype=I32)
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in given.items()}


LATENT_OPS, INDEX_OPS = ("store_latent", "sparse_mla_decode"), ("store_index_k", "gather_index_k", "paged_index_logits")
EVERY = [(name, str(fmt)) for name in LATENT_OPS for fmt in LatentFormat]
EVERY += [(name, str(fmt)) for name in INDEX_OPS for fmt in IndexKFormat]


@pytest.mark.parametrize(("name", "fmt"), EVERY)
def test_each_format_of_an_op_is_well_formed(device: torch.device, name: str, fmt: str) -> None:
    operator = getattr(torch.ops.graphkv, name).default
    given = arguments(name, fmt, device)
    torch.library.opcheck(
        operator, (), given, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )


@pytest.mark.parametrize("latent", ["fp32", "bf16", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("index_k", ["fp32", "bf16", "fp8", "fp4"])
def test_the_fused_store_is_well_formed(device: torch.device, latent: str, index_k: str) -> None:
    one, other = arguments("store_latent", latent, device), arguments("store_index_k", index_k, device)
    names = {"pages": "latent_pages", "slot": "latent_slot", "format": "latent_format", "scale": "latent_scale"}
    given = {names.get(key, key): value for key, value in one.items()}
    names = {"pages": "index_pages", "slot": "index_slot", "format": "index_k_format"}
    given |= {names.get(key, key): value for key, value in other.items()}
    operator = torch.ops.graphkv.store_layer.default
    torch.library.opcheck(operator, (), given, test_utils=("test_schema", "test_faketensor"))


def test_copying_blocks_is_well_formed() -> None:
    """Both ends' blocks, two pools; the plan is made on the host, so an argument of it is on the CPU everywhere."""
    source, target = ([torch.ones(3, 2, 48, dtype=U8), torch.ones(3, 1, 80, dtype=U8)] for _ in range(2))
    moves = torch.tensor([[1, 2, 0, 4], [2, 1, 1, 3]], dtype=I32)
    operator = torch.ops.graphkv.copy_blocks.default
    torch.library.opcheck(operator, (source, target, moves, [8, 16], [4, 4], 0))


def test_every_op_is_checked_here_or_with_its_arguments() -> None:
    """A new op cannot be forgotten: what is registered is what is checked."""
    from test_ops_calls import GOOD

    registered = {name.removeprefix("graphkv::") for name in torch._C._dispatch_get_all_op_names() if "graphkv" in name}
    assert registered == set(GOOD) | {"copy_blocks"}
    assert registered == set(ops.__all__)
