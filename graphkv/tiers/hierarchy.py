"""The colder tiers of one runtime: what is asked for, and what is built of it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from graphkv.device import Device
from graphkv.errors import InvalidValue
from graphkv.pool import Pools
from graphkv.tiers.disk import DiskTier
from graphkv.tiers.host import HostTier, UnitLayout
from graphkv.tiers.mover import TierMover


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Where blocks go that the device has no room for.

    Attributes:
        host_bytes, host_blocks: size of the host tier, pinned exactly (whole blocks); give one of them.
        disk_folder, disk_bytes: a folder that can be written, and the bound of the bytes there; both or none.
        resume_limit: share of the device's blocks that may be in use after a `resume`.
        transfer_limit_s: age in seconds at which a transfer counts as overdue.
        max_blocks_underway: most blocks of transfers that are begun unasked, to have room in time.
        file_workers: threads for the disk tier.
    """

    host_bytes: int | None = None
    host_blocks: int | None = None
    disk_folder: str | os.PathLike[str] | None = None
    disk_bytes: int | None = None
    resume_limit: float = 1.0
    transfer_limit_s: float = 30.0
    max_blocks_underway: int = 1024
    file_workers: int = 2

    def __post_init__(self) -> None:
        if (self.host_bytes is None) == (self.host_blocks is None):
            raise InvalidValue(
                f"give host_bytes or host_blocks, not both or none; got {self.host_bytes} and {self.host_blocks}"
            )
        if (self.disk_folder is None) != (self.disk_bytes is None):
            raise InvalidValue(
                f"disk_folder and disk_bytes go together, got {self.disk_folder} and {self.disk_bytes}; give both for "
                "a disk tier, none for none"
            )
        if not self.transfer_limit_s > 0:
            raise InvalidValue(f"transfer_limit_s must be positive seconds, got {self.transfer_limit_s}")


class ColdTiers:
    """Host and disk tier of some pools, and the mover between all of them.

    Attributes:
        host, disk: the tiers; disk is None if none was asked for.
        mover: carries blocks.
        slots: slots of each tier, from the warmest.
        options: what was asked for.

    Args:
        steps: the stream that steps run on.

    Raises:
        InvalidValue: a tier holds not one block, or the folder cannot be written.
        OutOfMemory: the system does not give or lock that much.
    """

    def __init__(self, options: TierOptions, pools: Pools, device: Device, steps: torch.cuda.Stream | None) -> None:
        self.options = options
        unit = UnitLayout.of(pools)
        host_bytes = options.host_bytes
        if host_bytes is None:
            host_bytes = (options.host_blocks or 0) * unit.num_bytes
        self.host = HostTier(host_bytes, unit, device)
        self.disk: DiskTier | None = None
        if options.disk_folder is not None and options.disk_bytes is not None:
            self.disk = DiskTier(os.fspath(options.disk_folder), options.disk_bytes, unit)
        self.mover = TierMover(
            pools,
            device,
            host=self.host,
            disk=self.disk,
            steps=steps,
            limit_s=options.transfer_limit_s,
            file_workers=options.file_workers,
        )
        self.slots = tuple(tier.num_slots for tier in (self.host, self.disk) if tier is not None)

    def close(self) -> None:
        """Wait for every transfer, then give back memory and files; `TransferTimeout`, and nothing given back."""
        self.mover.close()
        self.host.close()
        if self.disk is not None:
            self.disk.close()
