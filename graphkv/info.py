"""What is installed, which device would be used, and what a token of each published model costs."""

from __future__ import annotations

from importlib import metadata

from graphkv.config import MODELS
from graphkv.device import Device
from graphkv.layout import IndexKFormat, LatentFormat
from graphkv.sizing import CacheSize

PACKAGES = ("graphkv", "torch", "numpy", "cuda-bindings", "nvidia-cuda-nvrtc", "transformers")


def report() -> str:
    """Versions, the device and a table of bytes a token, as text."""
    device = Device.of("auto")
    lines = [f"{name:20} {_version(name)}" for name in PACKAGES]
    lines += [f"{'device':20} {device.name} ({device.sm_count} multiprocessors)", "", "bytes a token, all layers"]
    for name, config in MODELS.items():
        for latent in LatentFormat:
            for index_k in (IndexKFormat.FP8, IndexKFormat.FP4):
                size = CacheSize.of(config.with_options(latent=latent, index_k=index_k)).token_bytes()
                lines.append(f"{name:20} latent {latent:12} index_k {index_k:6} {size:>9,}")
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
