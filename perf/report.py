"""The tables of RESULTS.md out of pytest-benchmark's JSON: python -m perf.report FILE... [--stat median|min].

Several files are joined; where a benchmark is in more than one, the later file counts. Times are microseconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

WAY_NAMES = {"graph-copy": "graph, copy", "graph-pull": "graph, pull", "eager": "eager", "engine": "the engines' way"}
TIER_NAMES = {
    "transfer": "transfers of whole blocks",
    "layers": "a copy a layer, role and block",
    "plain": "one plain pinned copy of the whole",
}


class Figure(NamedTuple):
    """One benchmark: its facts and its time."""

    info: dict[str, Any]
    us: float


class Run(NamedTuple):
    """What one or more JSON files say."""

    figures: list[Figure]
    machine: str

    def of(self, table: str, **facts: Any) -> list[Figure]:
        wanted = {"table": table, **facts}
        return [f for f in self.figures if all(f.info.get(name) == value for name, value in wanted.items())]

    def time(self, table: str, **facts: Any) -> float | None:
        found = self.of(table, **facts)
        return found[0].us if found else None


def read(paths: Iterable[Path], stat: str) -> Run:
    """Join the benchmarks of some JSON files."""
    figures: dict[str, Figure] = {}
    machines: dict[str, None] = {}
    for path in paths:
        data = json.loads(path.read_text())
        machines[_machine(data)] = None
        for bench in data["benchmarks"]:
            figures[bench["fullname"]] = Figure(bench["extra_info"], bench["stats"][stat] * 1e6)
    return Run(list(figures.values()), "\n\n".join(machines))


def _machine(data: dict[str, Any]) -> str:
    info = data["machine_info"]
    cpu = f"{info.get('cpu', {}).get('brand_raw', '?')}, {info.get('cpu', {}).get('count', '?')} cores"
    facts = ", ".join(f"{name} {value}" for name, value in info.get("graphkv", {}).items())
    return f"{data['datetime'][:10]}, commit {data['commit_info'].get('id', '?')[:10]}: {cpu}; {facts}."


def table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    """A markdown table, nothing if it has no rows."""
    cells = [tuple(_cell(value) for value in row) for row in rows]
    if not cells:
        return
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in cells:
        yield f"| {' | '.join(row)} |"
    yield ""


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return str(value)


def _ratio(above: float | None, below: float | None) -> str | None:
    return None if above is None or not below else f"{above / below:.1f}x"


def host(run: Run) -> Iterator[str]:
    rows = []
    for figure in run.of("host"):
        way, device, batch = (figure.info[name] for name in ("way", "device", "rows"))
        if way != "eager":
            twin = run.time("host", way="eager", device=device, rows=batch)
            name = "cpu" if device == "cpu" else f"GPU, {way}"
            rows.append((name, batch, figure.us, twin, _ratio(twin, figure.us)))
    yield from table(("device", "batch", "`test_host_step` us", "`test_host_step_eager` us", "ratio"), rows)


def parts(run: Run) -> Iterator[str]:
    ways = sorted({(f.info["device"], f.info["way"]) for f in run.of("parts")})
    names = list(dict.fromkeys(f.info["part"] for f in run.of("parts")))
    head = ("part, batch 256", *(device if device == "cpu" else f"GPU, {way}" for device, way in ways))
    rows = [(name, *(run.time("parts", part=name, device=d, way=w) for d, w in ways)) for name in names]
    yield from table(head, rows)


def around(run: Run) -> Iterator[str]:
    rows = [
        (f.info["way"], f.info["device"], f.info["rows"], f.us)
        for kind in ("retire", "index", "launch")
        for f in run.of(kind)
    ]
    yield from table(("once a step too", "device", "batch", "us"), rows)


def latch(run: Run) -> Iterator[str]:
    empty = {figure: run.time("latch", nodes="empty", figure=figure) for figure in ("isolated", "queued")}
    if None in empty.values():
        return
    yield f"An empty one-node graph reads {empty['isolated']:.2f} us isolated and {empty['queued']:.2f} us queued.\n"
    rows = []
    for figure in run.of("latch", figure="isolated"):
        if figure.info["nodes"] == "empty":
            continue
        facts = {name: figure.info[name] for name in ("nodes", "upload", "rows", "columns", "next_n", "contexts")}
        added, probe = figure.us - empty["isolated"], figure.info.get("probe_us")
        queued = run.time("latch", figure="queued", **facts)
        over = None if probe is None else f"{added - probe:+.1f}"
        rows.append((*facts.values(), added, probe, over, None if queued is None else queued - empty["queued"]))
    names = ("nodes", "upload", "batch", "columns", "next_n", "contexts")
    yield from table((*names, "added us, isolated", "probe us", "difference", "added us, queued"), rows)


def chain(run: Run) -> Iterator[str]:
    empty = run.time("latch", nodes="empty", figure="queued")
    shape = {"figure": "queued", "nodes": "latch+advance", "columns": 2048, "next_n": 1, "contexts": "up to the width"}
    rows = []
    for figure in run.of("chain"):
        batch = figure.info["rows"]
        ours = [run.time("latch", rows=batch, upload=upload, **shape) for upload in ("copy", "pull")]
        added = [None if us is None or empty is None else us - empty for us in ours]
        rows.append((batch, *added, figure.us, _ratio(figure.us, added[0])))
    head = ("GPU time of a step's metadata, batch", "copy, us", "pull, us", "chain of torch ops, us", "chain / copy")
    yield from table(head, rows)


def kernels(run: Run) -> Iterator[str]:
    rows = []
    for figure in run.of("kernels"):
        info = figure.info
        floor, peer = info.get("floor_us"), info.get("peer_us")
        rate = None if floor is None else f"{info['bytes'] / figure.us / 1e6:.2f}"
        rows.append(
            (
                info["kernel"],
                info["size"],
                figure.us,
                rate,
                floor,
                _ratio(figure.us, floor),
                peer,
                _ratio(figure.us, peer),
            )
        )
    head = ("kernel", "size", "us", "TB/s", "floor us", "over floor", "best peer us", "over peer")
    yield from table(head, rows)


def step(run: Run) -> Iterator[str]:
    rows = []
    for figure in run.of("step", way="graph-copy"):
        facts = {name: figure.info[name] for name in ("figure", "device", "rows")}
        times = {way: run.time("step", way=way, **facts) for way in WAY_NAMES}
        rows.append((*facts.values(), *times.values(), _ratio(times["engine"], figure.us)))
    head = ("figure", "device", "batch", *(f"{name}, us" for name in WAY_NAMES.values()), "engines' / graph, copy")
    yield from table(head, rows)


def tiers(run: Run) -> Iterator[str]:
    ways = list(dict.fromkeys((f.info["figure"], f.info.get("format", "bf16+fp8")) for f in run.of("tiers")))
    rows = []
    for figure, fmt in ways:
        rates = [
            next(
                (
                    f.info.get("gb_s")
                    for f in run.of("tiers", figure=figure, direction=direction)
                    if f.info.get("format", "bf16+fp8") == fmt
                ),
                None,
            )
            for direction in ("offload", "onload", "both")
        ]
        if any(rates):
            rows.append((TIER_NAMES.get(figure, figure), fmt, *rates))
    yield from table(("way", "formats", "offload GB/s", "onload GB/s", "both at once GB/s"), rows)
    beside = [(f.info["transfers"], f.info["step_ms"]) for f in run.of("tiers", figure="beside")]
    yield from table(("transfers both ways beside the steps", "step ms"), beside)
    growth = [(f.us / 1e3,) for f in run.of("tiers", figure="growth")]
    yield from table(("growing live pools by 1 GiB and back, host ms",), growth)


def peers(run: Run) -> Iterator[str]:
    figures = list(dict.fromkeys(f.info["figure"] for f in run.of("peers")))
    rows = []
    for way in dict.fromkeys(f.info["way"] for f in run.of("peers")):
        found = [run.of("peers", way=way, figure=figure) for figure in figures]
        version = next((f[0].info.get("version") for f in found if f), None)
        cells = [
            None if not f else f"{f[0].info['mean_us']:.0f} / {f[0].us:.0f} / {f[0].info['p99_us']:.0f}" for f in found
        ]
        rows.append((f"{way} {version}" if version else way, *cells))
    yield from table(("books, us: mean / median / p99", *figures), rows)


SECTIONS: dict[str, tuple[Callable[[Run], Iterator[str]], ...]] = {
    "Host side of a step": (host, parts, around),
    "Block managers side by side": (peers,),
    "Metadata in the graph": (latch, chain),
    "Kernels": (kernels,),
    "A whole step": (step,),
    "Blocks between tiers": (tiers,),
}


def report(run: Run) -> str:
    """All tables that the run has figures for, under its machines."""
    lines = [run.machine, ""]
    for title, makers in SECTIONS.items():
        body = [line for make in makers for line in make(run)]
        if body:
            lines += [f"## {title}", "", *body]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--stat", choices=("median", "min"), default="median")
    given = parser.parse_args()
    print(report(read(given.files, given.stat)))


if __name__ == "__main__":
    main()
