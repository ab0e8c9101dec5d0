"""The kernels that touch the cache, as torch custom ops in namespace `graphkv`.

Each function checks its arguments and calls the op of its name, which has a CPU side in torch, a CUDA side that
launches the kernel of the same name on the current stream, and a fake kernel, so compiled models trace through it.
Every result goes to a tensor that the caller owns; a call on CUDA allocates nothing and reads nothing back.

Letters in shapes: T tokens, B rows, M page-table columns, N gathered tokens, H heads, D head dim, W logit columns,
R latent rank, P rope width. A slot is `page * block_size + offset` of the view it is used with.
"""

from graphkv.ops.copy import copy_blocks
from graphkv.ops.index_k import gather_index_k, paged_index_logits, store_index_k
from graphkv.ops.latent import sparse_mla_decode, store_latent
from graphkv.ops.layer import store_layer
from graphkv.ops.select import topk
from graphkv.ops.window import window_slots

__all__ = [
    "copy_blocks",
    "gather_index_k",
    "paged_index_logits",
    "sparse_mla_decode",
    "store_index_k",
    "store_latent",
    "store_layer",
    "topk",
    "window_slots",
]
