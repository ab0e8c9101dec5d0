"""How the demo shows itself: with rich where it is installed, in plain lines where it is not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

PLAIN_EVERY = 0.25
"""Share of the work between two plain progress lines."""


class Progress:
    """A progress bar on stderr. Call it with how much of how much is done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Any = None
        self._task: Any = None
        self._next_line = 0.0

    def __enter__(self) -> Progress:
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            self._bar = RichProgress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(self._what, total=None)
            self._bar.start()
        return self

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif done >= self._next_line * total:
            self._next_line += PLAIN_EVERY
            print(f"{self._what} {done}/{total}", file=sys.stderr)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def show_table(title: str, facts: Mapping[str, Any]) -> None:
    """Prints the facts, one a line, to stdout."""
    rows = [(name.replace("_", " "), _text(value)) for name, value in facts.items()]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        width = max(len(name) for name, _ in rows)
        print("\n".join([title, *(f"  {name:{width}}  {value}" for name, value in rows)]))
        return
    table = Table("fact", "value", title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
