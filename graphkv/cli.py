"""The command line: `graphkv demo` and `graphkv info`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from graphkv.errors import GraphKVError
from graphkv.layout import IndexKFormat, LatentFormat

USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code is 0 if it succeeded, 1 if a check failed, 2 if it could not run."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except GraphKVError as error:
        print(f"graphkv {arguments.command}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except ImportError as error:
        print(f"graphkv {arguments.command}: {error}; pip install 'graphkv[demo]' brings it", file=sys.stderr)
        return USAGE_ERROR
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="graphkv", description="The KV-cache runtime for captured decode loops.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands.add_parser("demo", help="decode with a small DSA model and compare it with its own forward"))
    info = commands.add_parser("info", help="show versions, the device and what a token costs")
    info.set_defaults(run=_info)
    return parser


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--model", choices=("glm_moe_dsa", "deepseek_v32"), default="glm_moe_dsa")
    demo.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    demo.add_argument("--batch", type=int, default=8, help="sequences decoded at once (default 8)")
    demo.add_argument("--new-tokens", type=int, default=72, help="most tokens added to a prompt (default 72)")
    demo.add_argument("--latent", choices=[str(f) for f in LatentFormat], default="fp32", help="latent format")
    demo.add_argument("--index-k", choices=[str(f) for f in IndexKFormat], default="fp32", help="index K format")
    demo.add_argument("--prompt-file", type=Path, help="text to cut prompts from (default: one in the package)")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--json", action="store_true", help="print the facts as one JSON object on the last line")
    demo.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from graphkv.demo import session

    options = session.DemoOptions(
        model=arguments.model,
        device=arguments.device,
        batch=arguments.batch,
        new_tokens=arguments.new_tokens,
        latent=LatentFormat(arguments.latent),
        index_k=IndexKFormat(arguments.index_k),
        prompt_file=arguments.prompt_file,
        seed=arguments.seed,
    )
    return session.main(options, as_json=arguments.json)


def _info(_: argparse.Namespace) -> int:
    from graphkv import info

    print(info.report())
    return 0
