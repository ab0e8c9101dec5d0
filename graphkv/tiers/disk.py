"""The disk tier: one checked file a slot, in a plain folder, without privileges.

A file is trusted only if it is the very file that this tier wrote last for its slot, whole and unchanged. Anything else
(missing, torn, corrupt, of another slot, process or time) is a miss: the bytes that were read go nowhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import secrets
import shutil
import struct
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from graphkv.errors import InvalidValue
from graphkv.tiers.host import UnitLayout

_MAGIC = b"GRAPHKV1"
_FIELDS = struct.Struct("<8s16sQQQ")  # magic, the tier's own number, slot, how many stores came before, payload bytes
_DIGEST_BYTES = 32
_HEADER_BYTES = _FIELDS.size + _DIGEST_BYTES
_FILE_UNIT = 4096  # what file systems give room in


class FileOps:
    """The file operations of a disk tier, apart so that a test can make them fail. All raise OSError."""

    def write(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Create or overwrite `path`; when it returns, the bytes are on the disk."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)  # a full disk may show only here
        finally:
            os.close(descriptor)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)

    def read(self, path: str, parts: Sequence[bytearray | memoryview]) -> int:
        """Fill `parts` in order from `path`; the bytes read, one more than they hold if the file is longer."""
        total = 0
        with open(path, "rb", buffering=0) as file:
            for part in parts:
                rest = memoryview(part)
                while rest and (count := file.readinto(rest)):
                    total += count
                    rest = rest[count:]
            return total + len(file.read(1))

    def remove(self, path: str) -> None:
        os.unlink(path)


class DiskTier:
    """Slots in files. Two calls for one slot must not overlap; calls for different slots may.

    Attributes:
        folder: where the files are; made here, of this tier alone, and removed by `close`.
        num_bytes: bound of the bytes on disk.
        num_slots: blocks that fit.
        failed_stores, misses: how often a file could not be written, and could not be trusted.

    Args:
        parent: any folder that can be written; may be shared. What a dead process left there is removed.
        num_bytes: size of the tier.
        unit: a slot's layout.
        files: file operations.

    Raises:
        InvalidValue: not one slot fits, or the folder cannot be written.
    """

    def __init__(self, parent: str | Path, num_bytes: int, unit: UnitLayout, files: FileOps | None = None) -> None:
        self.file_bytes = -(-(_HEADER_BYTES + unit.num_bytes) // _FILE_UNIT) * _FILE_UNIT
        self.num_slots = num_bytes // self.file_bytes
        if self.num_slots < 1:
            raise InvalidValue(
                f"a disk tier of {num_bytes} bytes holds no block: one takes {self.file_bytes} bytes; ask for that "
                "much or have no disk tier"
            )
        self.num_bytes = self.num_slots * self.file_bytes
        self.unit = unit
        self._files = files or FileOps()
        self._nonce = secrets.token_bytes(16)  # so that no file of another tier is ever ours
        try:
            os.makedirs(parent, exist_ok=True)
            _sweep(parent)
            self.folder, lock = _claim(parent)
        except OSError as error:
            raise InvalidValue(f"the disk tier's folder {parent} cannot be used: {error}; name another one") from error
        self._release = weakref.finalize(self, _remove, self.folder, lock, os.getpid())
        self._counter = itertools.count(1)
        self._expected = [0] * self.num_slots  # number of the store whose file is there, 0 for none
        self._lock = threading.Lock()
        self.failed_stores = self.misses = 0

    def store(self, slot: int, payload: memoryview) -> str:
        """Write a slot. When it has returned "", the block can be read back; otherwise the slot is empty, and why."""
        number = next(self._counter)
        path, part = self._path(slot), f"{self._path(slot)}.part"
        self._expected[slot] = 0
        fields = _FIELDS.pack(_MAGIC, self._nonce, slot, number, len(payload))
        try:
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(path)  # first, so that a slot never takes the room of two files
            self._files.write(part, (fields, _digest(fields, payload), payload))
            self._files.replace(part, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._files.remove(part)
            with self._lock:
                self.failed_stores += 1
            return f"{path} cannot be written: {error}"
        self._expected[slot] = number
        return ""

    def load(self, slot: int, payload: memoryview) -> str:
        """Read a slot into `payload`. "" if these are the bytes stored; otherwise they mean nothing, and why."""
        reason = self._read(slot, payload)
        if reason:
            with self._lock:
                self.misses += 1
            self._expected[slot] = 0
        return reason

    def _read(self, slot: int, payload: memoryview) -> str:
        number, path = self._expected[slot], self._path(slot)
        if not number:
            return f"slot {slot} of the disk tier holds no block"
        header = bytearray(_HEADER_BYTES)
        try:
            count = self._files.read(path, (header, payload))
        except OSError as error:
            return f"{path} cannot be read: {error}"
        if count != _HEADER_BYTES + len(payload):
            return f"{path} is torn: {count} bytes, {_HEADER_BYTES + len(payload)} were written"
        fields, digest = bytes(header[: _FIELDS.size]), bytes(header[_FIELDS.size :])
        if fields != _FIELDS.pack(_MAGIC, self._nonce, slot, number, len(payload)):
            return f"{path} is not the file that was written last for slot {slot}"
        if digest != _digest(fields, payload):
            return f"{path} is corrupt: its checksum does not match"
        return ""

    def drop(self, slot: int) -> None:
        """Empty a slot."""
        self._expected[slot] = 0
        with contextlib.suppress(OSError):
            self._files.remove(self._path(slot))

    def close(self) -> None:
        """Remove the files. No transfer may be under way."""
        self._release()

    def _path(self, slot: int) -> str:
        return f"{self.folder}/{slot:08d}.block"


def _digest(fields: bytes, payload: memoryview) -> bytes:
    digest = hashlib.sha256(fields)  # the one strong hash that common processors have instructions for
    digest.update(payload)
    return digest.digest()


def _claim(parent: str | Path) -> tuple[str, int]:
    """A new folder, and the descriptor of the lock beside it that says its owner lives."""
    while True:
        folder = os.path.join(parent, f"graphkv-{secrets.token_hex(8)}")
        lock = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):  # a sweep came between the two calls: begin again
            if os.path.samestat(os.stat(f"{folder}.lock"), os.fstat(lock)):
                os.mkdir(folder, 0o700)
                return folder, lock
        os.close(lock)


def _sweep(parent: str | Path) -> None:
    """Remove the folders in `parent` whose owners are gone: their locks can be had."""
    for path in Path(parent).glob("graphkv-*.lock"):
        with contextlib.suppress(OSError):  # somebody else's, alive, or swept by another process meanwhile
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink()
            finally:
                os.close(lock)


def _remove(folder: str, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child that ends: the folder is its parent's
        return
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}.lock")
    os.close(lock)
