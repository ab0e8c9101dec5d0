"""Case J6: importing graphkv touches no CUDA, and a forked child can use what it imported."""

from __future__ import annotations

from helpers import run_python

# torch alone may map a library of the driver; what matters is what graphkv adds to it.
IMPORT_ALL = """
import importlib, os, pkgutil, sys
import torch

def state():
    with open("/proc/self/maps") as maps:
        libraries = {name for line in maps for name in ("libcuda.so", "libnvrtc.so") if name in line}
    return libraries, {name for name in sys.modules if name.startswith("cuda.")}

before = state()
import graphkv
names = ["graphkv"]
for module in pkgutil.walk_packages(graphkv.__path__, "graphkv."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert error.name.split(".")[0] in ("transformers", "rich"), error
    names.append(module.name)
assert "graphkv.kernels" in names
assert state() == before, state()
assert not torch.cuda.is_initialized()
"""
FORK_AND_COMPILE = """
child = os.fork()
if child == 0:
    from graphkv.kernels import compile_source
    os._exit(0 if compile_source("latch.cu", "sm_90a").cubin else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_case_J6_import_touches_no_cuda() -> None:
    done = run_python(IMPORT_ALL)
    assert done.returncode == 0, done.stderr


def test_case_J6_fork_after_import_and_compile_in_the_child() -> None:
    done = run_python(IMPORT_ALL + FORK_AND_COMPILE)
    assert done.returncode == 0, done.stderr
