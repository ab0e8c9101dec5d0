"""Compiled kernels on disk, shared by processes and users without a lock.

An entry is one file, named by the key of everything it was made from, and written beside its place, then renamed: a
reader sees a whole entry or none. Each entry holds a digest of itself, so a damaged one reads as absent and is rebuilt.
A folder that cannot be read or written is no error; it only costs compiling again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

_MAGIC = b"graphkv kernel 1"
_DIGEST_SIZE = hashlib.sha256().digest_size
_ABANDONED_S = 3600.0  # a temporary file this old belongs to a process that died while writing


def cache_dir() -> Path:
    """$GRAPHKV_CACHE_DIR, else graphkv/kernels in the user's cache folder."""
    chosen = os.environ.get("GRAPHKV_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(os.path.expanduser("~"), ".cache")) / "graphkv" / "kernels"


def read(key: str) -> tuple[dict[str, Any], bytes] | None:
    """The facts and the machine code stored under `key` (hex digits); None if absent, damaged or not readable."""
    try:
        entry = _path(key).read_bytes()
    except OSError:
        return None
    head = len(_MAGIC) + _DIGEST_SIZE
    digest, body = entry[len(_MAGIC) : head], entry[head:]
    if entry[: len(_MAGIC)] != _MAGIC or digest != _digest(key, body):
        return None
    size = int.from_bytes(body[:8], "little")
    return json.loads(body[8 : 8 + size]), body[8 + size :]


def write(key: str, facts: dict[str, Any], code: bytes) -> bool:
    """Store an entry, replacing what is there. False if the folder cannot be written or is full."""
    path = _path(key)
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    text = json.dumps(facts).encode()
    body = len(text).to_bytes(8, "little") + text + code
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        # "x": never through a link that someone else placed there. The usual mode: other users may read the entry.
        with open(temporary, "xb") as file:
            file.write(_MAGIC + _digest(key, body) + body)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True


def _path(key: str) -> Path:
    return cache_dir() / f"{key}.kernel"


def _digest(key: str, body: bytes) -> bytes:
    """Covers the key too: an entry under another's name is damaged."""
    return hashlib.sha256(key.encode() + b"\0" + body).digest()


def _sweep(folder: Path) -> None:
    """Remove what killed writers left behind."""
    oldest = time.time() - _ABANDONED_S
    for file in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if file.stat().st_mtime < oldest:
                file.unlink()
