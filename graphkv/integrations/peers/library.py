"""Finds another library's functions, or says which package is missing and what to do without it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from graphkv.errors import LibraryMissing


@dataclass(frozen=True, slots=True)
class Library:
    """What an adapter needs of a library.

    Attributes:
        module: its name in Python.
        option: the choice that asks for it, as a caller writes it.
        source: where an installable one is.
        instead: the choice that does without.
        functions: needed functions, with the parameters of each that older releases lack.
    """

    module: str
    option: str
    source: str
    instead: str
    functions: Mapping[str, tuple[str, ...]]

    def load(self) -> dict[str, Callable[..., Any]]:
        """The functions by name.

        Raises:
            LibraryMissing: it cannot be imported, or lacks a function or a parameter.
        """
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise self._missing(f"cannot be imported ({error})") from error
        found = {}
        for name, parameters in self.functions.items():
            function = getattr(module, name, None)
            if not callable(function):
                raise self._missing(f"{_version(module)} has no function {name}")
            if lacking := [p for p in parameters if not _takes(function, p)]:
                raise self._missing(f"{_version(module)} lacks {', '.join(lacking)} in {name}")
            found[name] = function
        return found

    def _missing(self, fact: str) -> LibraryMissing:
        return LibraryMissing(
            f"{self.option} needs the package {self.module}, which {fact}; install it from {self.source}, or use "
            f"{self.instead}"
        )


def _version(module: Any) -> str:
    return str(getattr(module, "__version__", "as installed"))


def _takes(function: Callable[..., Any], parameter: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a compiled function need not tell; its own check has the word then
        return True
    return parameter in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
