"""What a live set must hold, in plain loops over plain numbers. Imports nothing of graphkv."""

from __future__ import annotations

import numpy as np

POISON = -0x5A5A5A5B  # 0xA5A5A5A5 as int32


def live_set(
    *,
    rows: int,
    tokens: int,
    next_n: int,
    batch: list[tuple[int, int, int]],
    table: np.ndarray,
    block_size: int,
    latent_scale: int,
    index_scale: int,
    value_bytes: int,
    scale_bytes: int,
    parts: int,
) -> dict[str, np.ndarray]:
    """Expected tensors; `batch` is (row, length before the step, query tokens) of each live batch row."""
    columns = table.shape[1]
    page_bytes = block_size * (value_bytes + scale_bytes)
    out = {
        "position": np.zeros(tokens, np.int64),
        "token_row": np.zeros(tokens, np.int32),
        "query_start": np.zeros(rows + 1, np.int32),
        "batch_row": np.full(rows, -1, np.int32),
        "seq_len": np.zeros(rows, np.int32),
        "context_len": np.zeros(tokens, np.int32),
        "latent_slot": np.full(tokens, -1, np.int64),
        "index_slot": np.full(tokens, -1, np.int64),
        "index_value_offset": np.full(tokens, -1, np.int64),
        "index_scale_offset": np.full(tokens, -1, np.int64),
        "latent_page_table": np.zeros((rows, columns), np.int32),
        "index_page_table": np.zeros((rows, columns), np.int32),
    }
    token = 0
    for r, (row, length, count) in enumerate(batch):
        out["batch_row"][r], out["query_start"][r], out["seq_len"][r] = row, token, length + count
        for column in range(-(-(length + count) // block_size)):
            out["latent_page_table"][r, column] = int(table[row, column]) * latent_scale
            out["index_page_table"][r, column] = int(table[row, column]) * index_scale
        for i in range(count):
            position = length + i
            block, offset = int(table[row, position // block_size]), position % block_size
            page = block * index_scale
            out["position"][token], out["token_row"][token], out["context_len"][token] = position, r, position + 1
            if block:  # the null block is never written
                out["latent_slot"][token] = block * latent_scale * block_size + offset
            if block and index_scale:
                out["index_slot"][token] = page * block_size + offset
                out["index_value_offset"][token] = page * page_bytes + offset * value_bytes
                if scale_bytes:
                    scales = page * page_bytes + block_size * value_bytes
                    out["index_scale_offset"][token] = scales + offset * scale_bytes
            token += 1
    out["query_start"][len(batch) :] = token
    for padded in range(token, tokens):
        out["token_row"][padded] = min(padded // next_n, rows - 1)
    out["schedule"] = schedule([length + count for _, length, count in batch] + [0] * (rows - len(batch)), parts)
    return out


def schedule(lengths: list[int], parts: int) -> np.ndarray:
    """Work in order of rows, 256 tokens a piece, at least one piece a row; the last workers take one piece more."""
    pieces = [(row, piece) for row, length in enumerate(lengths) for piece in range(max(1, -(-length // 256)))]
    each, rest = divmod(len(pieces), parts)
    starts, at = [], 0
    for worker in range(parts):
        starts.append(pieces[at] if at < len(pieces) else (len(lengths), 0))
        at += each + (worker >= parts - rest)
    return np.array([*starts, (len(lengths), 0)], np.int32)
