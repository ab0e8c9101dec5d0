"""One checker for the arguments of every op: what was expected and what was given, by name, before anything runs."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import torch
from torch import Tensor

from graphkv.errors import InvalidValue
from graphkv.layout import PageLayout

FLOATS = (torch.float32, torch.bfloat16)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
UINT8 = (torch.uint8,)
FLOAT32 = (torch.float32,)
INT32_MAX = 2**31 - 1

_E = TypeVar("_E", bound=StrEnum)


def member(op: str, name: str, kind: type[_E], value: str) -> _E:
    """The member of `kind` that `value` names."""
    try:
        return kind(value)
    except ValueError:
        raise InvalidValue(f"{op}: {name} must be one of {[str(m) for m in kind]}, got {value!r}") from None


class ArgumentCheck:
    """Checks the arguments of one call; a shape letter is bound by the first tensor that has it.

    Args:
        op: the op's name, which opens every message.
        device: where every tensor must be.
    """

    def __init__(self, op: str, device: torch.device) -> None:
        self.op = op
        self.device = device
        self.sizes: dict[str, int] = {}

    def tensor(
        self, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: str, *, free_rows: bool = False
    ) -> None:
        """Check one tensor.

        Args:
            shape: a letter or number a dimension, e.g. "T H D".
            free_rows: the first stride may be anything not below the row's width; otherwise contiguous.
        """
        letters = shape.split()
        wanted = ", ".join(f"{s}={self.sizes[s]}" if s in self.sizes else s for s in letters)
        given = f"{_short(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"
        expected = f"{' or '.join(map(_short, dtypes))} [{wanted}] on {self.device}"
        fits = tensor.ndim == len(letters) and tensor.dtype in dtypes and tensor.device == self.device
        for letter, size in zip(letters, tensor.shape, strict=False):
            fits = fits and (int(letter) if letter.isdigit() else self.sizes.setdefault(letter, size)) == size
        if not fits:
            raise InvalidValue(f"{self.op}: {name} must be {expected}, got {given}")
        if not (_rows_apart(tensor) if free_rows else tensor.is_contiguous()):
            how = "contiguous within a row" if free_rows else "contiguous"
            raise InvalidValue(
                f"{self.op}: {name} {list(tensor.shape)} must be {how}, got strides {list(tensor.stride())}; "
                "pass .contiguous()"
            )

    def pages(self, pages: Tensor, layout: PageLayout, name: str = "pages") -> None:
        """Check a page view u8 [pages, block_size, 1, token_bytes]; its first stride may exceed a page."""
        want = [layout.block_size, 1, layout.token_bytes]
        if pages.dtype != torch.uint8 or pages.ndim != 4 or list(pages.shape[1:]) != want or not len(pages):
            raise InvalidValue(
                f"{self.op}: {name} must be uint8 [pages, {', '.join(map(str, want))}] for {layout.role} format "
                f"{layout.format}, got {_short(pages.dtype)} {list(pages.shape)}"
            )
        if not pages[0].is_contiguous() or (len(pages) > 1 and pages.stride(0) < layout.page_bytes):
            raise InvalidValue(
                f"{self.op}: {name} must be contiguous within a page and at least {layout.page_bytes} bytes apart, "
                f"got strides {list(pages.stride())}"
            )

    def at_least(self, name: str, value: float, least: float) -> None:
        if not value >= least:
            raise InvalidValue(f"{self.op}: {name} must be at least {least}, got {value}")


def check_contexts(
    op: str, context_len: Tensor, token_row: Tensor, width: int, page_table: Tensor, block_size: int
) -> None:
    """Refuse contexts that reach past the logit columns or the page table. For CPU sides: it reads the tensors."""
    longest = int(context_len.max()) if context_len.numel() else 0
    limit = min(width, page_table.shape[1] * block_size)
    if longest > limit:
        raise InvalidValue(
            f"{op}: a context_len of {longest} exceeds {limit}, the least of {width} logit columns and "
            f"{page_table.shape[1]} pages of {block_size} tokens"
        )
    rows = token_row[context_len > 0]
    if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < len(page_table)):
        raise InvalidValue(
            f"{op}: token_row must be in 0..{len(page_table) - 1}, got {int(rows.min())}..{int(rows.max())}"
        )


def _rows_apart(tensor: Tensor) -> bool:
    width = tensor.shape[1]
    return (width <= 1 or tensor.stride(1) == 1) and (tensor.shape[0] <= 1 or tensor.stride(0) >= width)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
