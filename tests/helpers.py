"""Small things that several test files need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "cuda"
POISON = 0xA5
_VARIANT = re.compile(r"^// variant: (.+)$", re.MULTILINE)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a contiguous tensor's bytes with 0xA5, so that what was never written shows. Returns the tensor."""
    tensor.view(torch.uint8).fill_(POISON)
    return tensor


def kernel_files() -> list[Path]:
    return sorted(CUDA.glob("*.cu"))


def variants(file: Path) -> list[dict[str, int | str]]:
    """Each set of defines that a kernel source lists on a line `// variant: NAME=VALUE ...`; one empty set if none."""
    listed = [dict(item.split("=", 1) for item in line.split()) for line in _VARIANT.findall(file.read_text())]
    return listed or [{}]


def run_python(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter at the root of the checkout; None removes a variable."""
    return subprocess.run(**python_call(code, **environment), capture_output=True, text=True, check=False, timeout=300)


def python_call(code: str, **environment: str | None) -> dict[str, object]:
    """What subprocess.run or Popen takes to run `code`."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **environment}
    return {
        "args": [sys.executable, "-c", code],
        "cwd": ROOT,
        "env": {name: value for name, value in env.items() if value is not None},
    }
