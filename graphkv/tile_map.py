"""Maps of tiles in pages, by which a kernel has the copy engine bring rows in the order that tensor cores want."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from graphkv.device import check_cuda, cuda_driver

ROW_BYTES = 128


class TileMap(ctypes.Structure):
    """`TileMap` of cuda/hopper.cuh: opaque to all but the driver."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


@functools.lru_cache(maxsize=1024)
def tile_map(address: int, rows: int, pages: int, page_stride: int) -> TileMap:
    """The map whose tile p is the first `rows` rows of 128 bytes of page p.

    Args:
        address: of page 0, a multiple of 16; memory of the current device's context.
        pages: how many there are.
        page_stride: bytes between them, a multiple of 16.

    Raises:
        DeviceFault: the driver refused.
    """
    driver = cuda_driver()
    long, word = driver.cuuint64_t, driver.cuuint32_t
    encoded: Any = check_cuda(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            3,
            address,
            [long(ROW_BYTES), long(rows), long(pages)],
            [long(ROW_BYTES), long(page_stride)],
            [word(ROW_BYTES), word(rows), word(1)],
            [word(1), word(1), word(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TileMap.from_buffer_copy(ctypes.string_at(encoded.getPtr(), ctypes.sizeof(TileMap)))
