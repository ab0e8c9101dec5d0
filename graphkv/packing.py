"""Kernel arguments laid out for the driver: an array of pointers, and behind it the values that they point at."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch

from graphkv.errors import InvalidValue

# letter: (struct code, bytes, what a caller may give)
_LETTERS = {
    "P": ("Q", 8, "a tensor on the kernel's device, a pinned tensor, an address, or None"),
    "i": ("i", 4, "a 32-bit signed integer"),
    "q": ("q", 8, "a 64-bit signed integer"),
    "f": ("f", 4, "a number in float32's range"),
    "S": ("", 0, "a ctypes.Structure"),
}


class PackedArgs:
    """Arguments of one kernel, ready to launch any number of times. Keeps every tensor and struct in it alive."""

    __slots__ = ("_buffer", "_owners", "address", "packer")

    def __init__(self, packer: ArgumentPacker, buffer: Any, owners: tuple[Any, ...]) -> None:
        self.packer = packer
        self.address = ctypes.addressof(buffer)
        self._buffer = buffer
        self._owners = owners


class ArgumentPacker:
    """Lays out one kernel's arguments: the array of pointers first, then the values that they point at."""

    def __init__(self, entry: str, signature: str, device: torch.device, struct_sizes: Sequence[int] = ()) -> None:
        """`struct_sizes`: bytes of each S in `signature`, in order."""
        if unknown := set(signature) - set(_LETTERS):
            raise InvalidValue(f"{entry}: unknown letters {sorted(unknown)} in signature {signature!r}; use PiqfS")
        if signature.count("S") != len(struct_sizes):
            raise InvalidValue(f"{entry}: signature {signature!r} needs a size for each S, got {list(struct_sizes)}")
        self.entry = entry
        self.signature = signature
        self.device = device
        self._device_index = -1 if device.type == "cpu" else device.index  # as Tensor.get_device() tells it
        sizes = iter(struct_sizes)
        self.sizes = tuple(next(sizes) if letter == "S" else _LETTERS[letter][1] for letter in signature)
        at = 8 * len(signature)
        layout = f"<{len(signature)}Q"
        offsets = []
        for letter, size in zip(signature, self.sizes, strict=True):
            padding = -at % 16  # the widest alignment a struct may ask for
            layout += f"{padding}x" + (f"{size}s" if letter == "S" else _LETTERS[letter][0])
            offsets.append(at + padding)
            at += padding + size
        self._offsets = tuple(offsets)
        self._struct = struct.Struct(layout)
        self._buffer_type = ctypes.c_char * max(1, self._struct.size)

    def pack(self, args: Sequence[Any]) -> PackedArgs:
        """Check and lay out `args`; InvalidValue names the first that does not fit."""
        if len(args) != len(self.signature):
            raise InvalidValue(
                f"{self.entry} takes {len(self.signature)} arguments ({self.signature}), {len(args)} were given"
            )
        buffer = self._buffer_type()
        base = ctypes.addressof(buffer)
        values = [
            self._pointer(n, arg) if letter == "P" else self._bytes(n, arg) if letter == "S" else arg
            for n, (letter, arg) in enumerate(zip(self.signature, args, strict=True))
        ]
        try:
            self._struct.pack_into(buffer, 0, *(base + offset for offset in self._offsets), *values)
        except (struct.error, OverflowError) as error:
            raise self._misfit(values) from error
        return PackedArgs(self, buffer, tuple(args))

    def _pointer(self, number: int, arg: Any) -> int:
        if isinstance(arg, torch.Tensor):
            if arg.get_device() != self._device_index and not arg.is_pinned():
                raise InvalidValue(
                    f"{self.entry}, argument {number}: the tensor is on {arg.device} and the kernel on {self.device}"
                )
            return arg.data_ptr()
        if arg is None:
            return 0
        if isinstance(arg, int):
            return arg
        raise self._refusal(number, arg)

    def _bytes(self, number: int, arg: Any) -> bytes:
        if not isinstance(arg, ctypes.Structure):
            raise self._refusal(number, arg)
        size = ctypes.sizeof(arg)
        if size != self.sizes[number]:
            raise InvalidValue(
                f"{self.entry}, argument {number}: {type(arg).__name__} has {size} bytes and the kernel's struct "
                f"{self.sizes[number]}"
            )
        return bytes(arg)

    def _misfit(self, values: list[Any]) -> InvalidValue:
        for number, (letter, value) in enumerate(zip(self.signature, values, strict=True)):
            try:
                struct.pack("<" + (_LETTERS[letter][0] or f"{self.sizes[number]}s"), value)
            except (struct.error, OverflowError):
                return self._refusal(number, value)
        raise AssertionError("every argument fits on its own, yet together they do not")

    def _refusal(self, number: int, value: Any) -> InvalidValue:
        wanted = _LETTERS[self.signature[number]][2]
        return InvalidValue(f"{self.entry}, argument {number}: {wanted} is wanted, got {value!r}")
