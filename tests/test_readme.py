"""What the README shows is true: its example runs, its table of bytes is what the code says, its modules exist."""

from __future__ import annotations

import re
from pathlib import Path

from graphkv import CacheConfig, CacheSize, IndexKFormat, LatentFormat

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def block(name: str) -> str:
    """The fenced block behind the line `<!-- name -->`."""
    found = re.search(rf"^<!-- {name} -->\n```\w*\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no block marked {name}"
    return found.group(1)


def test_the_example_runs_as_it_stands(capsys: object) -> None:
    scope: dict[str, object] = {}
    exec(compile(block("example"), "README.md", "exec"), scope)
    batch = scope["batch"]
    lengths = [sequence.tokens.size for sequence in batch]  # type: ignore[attr-defined]
    assert lengths == [3 + 1 + 16, 70 + 1 + 16]
    exec(compile(block("tiers"), "README.md", "exec"), scope)
    assert [scope[name].tokens.size for name in ("chat", "other")] == [70 + 1 + 1, 3 + 1 + 9]  # type: ignore[attr-defined]


def test_the_table_of_bytes_is_what_sizing_says() -> None:
    rows = re.findall(r"^\| (fp8|fp8_ds_mla|bf16|fp32) \| (.*) \|$", README, re.MULTILINE)
    assert [latent for latent, _ in rows] == ["fp8", "fp8_ds_mla", "bf16", "fp32"]
    for latent, cells in rows:
        for index_k, cell in zip(("fp8", "fp4", "bf16", "fp32"), cells.split(" | "), strict=True):
            config = CacheConfig.named("deepseek-v3.2", latent=LatentFormat(latent), index_k=IndexKFormat(index_k))
            assert CacheSize.of(config).token_bytes() == int(cell.replace(",", "")), (latent, index_k)


def test_the_map_names_every_module_once() -> None:
    table = README.split("## Map")[1].split("`cuda/` holds")[0]
    named = re.findall(r"`(\w+)/?`", table)
    modules = [path.stem for path in (ROOT / "graphkv").glob("*.py") if not path.stem.startswith("__")]
    folders = [path.parent.name for path in (ROOT / "graphkv").glob("*/__init__.py")]
    assert sorted(named) == sorted(set(named))
    missing = sorted({*modules, *folders} - set(named))
    assert not missing, f"the README's map does not name {missing}"
    assert sorted(set(named) - {*modules, *folders}) == []
