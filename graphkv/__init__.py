"""graphkv: the KV-cache runtime for decode loops that live inside CUDA graphs.

The names below are the public surface. Importing them initialises no CUDA.
"""

from graphkv.baseline.runner import V1Runner
from graphkv.config import CacheConfig, Indexer, LayerSpec
from graphkv.device import Device
from graphkv.errors import (
    CudaUnavailable,
    DeviceFault,
    GraphKVError,
    InvalidValue,
    KernelCompileError,
    LibraryMissing,
    NotReady,
    OutOfBlocks,
    OutOfMemory,
    OutOfRows,
    StaleFrame,
    TransferTimeout,
    UnsupportedCombination,
)
from graphkv.layout import IndexKFormat, LatentFormat, PageLayout, Role, ScaleMode, Side
from graphkv.manager.prefix import Content, Scope
from graphkv.manager.retention import Retention
from graphkv.manager.v2 import ManagerStats, ManagerV2
from graphkv.manager.windowed import WindowedManager
from graphkv.metadata import StepMetadata
from graphkv.pool import Pools
from graphkv.runtime import DecodeRuntime
from graphkv.selection.create import create_cache_manager
from graphkv.selection.requirements import Requirements
from graphkv.sequence import Batch, Sequence, StepResult
from graphkv.sizing import CacheSize
from graphkv.stats import RuntimeStats
from graphkv.step import StepContext, StepModel, StepOutput
from graphkv.tiers.disk import DiskTier
from graphkv.tiers.hierarchy import TierOptions
from graphkv.tiers.host import HostTier
from graphkv.tiers.mover import TierMover
from graphkv.window import Window

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "CacheConfig",
    "CacheSize",
    "Content",
    "CudaUnavailable",
    "DecodeRuntime",
    "Device",
    "DeviceFault",
    "DiskTier",
    "GraphKVError",
    "HostTier",
    "IndexKFormat",
    "Indexer",
    "InvalidValue",
    "KernelCompileError",
    "LatentFormat",
    "LayerSpec",
    "LibraryMissing",
    "ManagerStats",
    "ManagerV2",
    "NotReady",
    "OutOfBlocks",
    "OutOfMemory",
    "OutOfRows",
    "PageLayout",
    "Pools",
    "Requirements",
    "Retention",
    "Role",
    "RuntimeStats",
    "ScaleMode",
    "Scope",
    "Sequence",
    "Side",
    "StaleFrame",
    "StepContext",
    "StepMetadata",
    "StepModel",
    "StepOutput",
    "StepResult",
    "TierMover",
    "TierOptions",
    "TransferTimeout",
    "UnsupportedCombination",
    "V1Runner",
    "Window",
    "WindowedManager",
    "create_cache_manager",
]
