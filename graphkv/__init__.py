"""graphkv: the KV-cache runtime for decode loops that live inside CUDA graphs.

The names below are the public surface. Importing them initialises no CUDA.
"""

from graphkv.config import CacheConfig, Indexer, LayerSpec
from graphkv.device import Device
from graphkv.errors import (
    CudaUnavailable,
    DeviceFault,
    GraphKVError,
    InvalidValue,
    KernelCompileError,
    OutOfBlocks,
    OutOfRows,
    StaleFrame,
    UnsupportedCombination,
)
from graphkv.layout import IndexKFormat, LatentFormat, PageLayout, Role, ScaleMode, Side
from graphkv.manager_v2 import ManagerStats, ManagerV2
from graphkv.metadata import StepMetadata
from graphkv.pool import Pools
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Batch, Sequence, StepResult
from graphkv.sizing import CacheSize
from graphkv.stats import RuntimeStats
from graphkv.step import StepContext, StepModel, StepOutput

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "CacheConfig",
    "CacheSize",
    "CudaUnavailable",
    "DecodeRuntime",
    "Device",
    "DeviceFault",
    "GraphKVError",
    "IndexKFormat",
    "Indexer",
    "InvalidValue",
    "KernelCompileError",
    "LatentFormat",
    "LayerSpec",
    "ManagerStats",
    "ManagerV2",
    "OutOfBlocks",
    "OutOfRows",
    "PageLayout",
    "Pools",
    "Role",
    "RuntimeStats",
    "ScaleMode",
    "Sequence",
    "Side",
    "StaleFrame",
    "StepContext",
    "StepMetadata",
    "StepModel",
    "StepOutput",
    "StepResult",
    "UnsupportedCombination",
]
