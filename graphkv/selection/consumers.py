"""Kernels of others that can read the cache: on which devices, in which formats and page sizes. Facts, no imports.

graphkv's own kernels take every format and page size on every device, FP4 included, which they decode in software.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphkv.device import Device
from graphkv.layout import LatentFormat, Role

FP4_SM = 100
"""Least sm of a device whose tensor cores take FP4."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What selection asks of a device; made by hand to ask about another machine's.

    Attributes:
        name: for messages.
        sm: compute capability times ten (90 for Hopper), 0 for the CPU.
    """

    name: str
    sm: int

    @classmethod
    def of(cls, device: Device) -> DeviceFacts:
        if not device.is_cuda:
            return cls("cpu", 0)
        major, minor = torch.cuda.get_device_capability(device.torch)
        return cls(device.name, 10 * major + minor)

    def __str__(self) -> str:
        return f"{self.name} (sm {self.sm})" if self.sm else self.name


CPU = DeviceFacts("cpu", 0)


@dataclass(frozen=True, slots=True)
class Takes:
    """What a consumer takes on one family of devices.

    Attributes:
        sm: the family's compute capabilities.
        formats: byte formats of its role.
        page_sizes: tokens a page, None for any.
        widths: per attribute of `CacheConfig`, the values it takes.
        next_n: query tokens a row that one call takes, None for any; others are served flattened, a row each.
    """

    family: str
    sm: range
    formats: tuple[str, ...]
    page_sizes: tuple[int, ...] | None
    widths: tuple[tuple[str, tuple[int, ...] | range], ...]
    next_n: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Consumer:
    """A library's kernels for one role."""

    name: str
    role: Role
    takes: tuple[Takes, ...]

    def on(self, device: DeviceFacts) -> Takes | None:
        """What it takes on that device, None if it does not run there."""
        return next((takes for takes in self.takes if device.sm in takes.sm), None)

    @property
    def families(self) -> str:
        return " or ".join(f"{takes.family} (sm {takes.sm.start})" for takes in self.takes)


DEEPGEMM = Consumer(
    "DeepGEMM",
    Role.INDEX_K,
    (
        Takes(
            "Hopper",
            range(90, 100),
            ("fp8",),
            (64,),
            (("index_heads", (32, 64)), ("index_head_dim", (32, 64, 128))),
            next_n=(1, 2),
        ),
        Takes(
            "Blackwell",
            range(100, 110),
            ("fp8", "fp4"),
            (32, 64),
            (("index_heads", (8, 16, 32, 64)), ("index_head_dim", (32, 64, 128))),
        ),
    ),
)

_FLASHMLA_WIDTHS = (("kv_lora_rank", (512,)), ("qk_rope_head_dim", (64,)))
FLASHMLA = Consumer(
    "FlashMLA",
    Role.LATENT,
    (
        Takes("Hopper", range(90, 100), ("fp8_ds_mla",), None, _FLASHMLA_WIDTHS),
        Takes("Blackwell", range(100, 110), ("fp8_ds_mla",), None, _FLASHMLA_WIDTHS),
    ),
)

_FLASHINFER_WIDTHS = (("index_topk", range(1, 2049)),)
_ALL_LATENTS = tuple(str(fmt) for fmt in LatentFormat)  # it reads page tables, no bytes of the cache
FLASHINFER = Consumer(
    "FlashInfer",
    Role.LATENT,
    (  # its capturable path needs 128 KiB of shared memory
        Takes("Ampere", range(80, 81), _ALL_LATENTS, None, _FLASHINFER_WIDTHS),
        Takes("Hopper", range(90, 100), _ALL_LATENTS, None, _FLASHINFER_WIDTHS),
        Takes("Blackwell", range(100, 110), _ALL_LATENTS, None, _FLASHINFER_WIDTHS),
    ),
)
