"""``baton scale prefill=2 decode=3 gateway=2``: change the numbers of workers and gateways."""

from __future__ import annotations

import argparse

from baton.deploy.controller.admin import ScalePools
from baton.proto.errors import ConfigError

from .operator import add_operator, assignments, carry_out, operator
from .output import say

POOLS = ("prefill", "decode", "gateway")
_MOST_DIGITS = 9


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("scale", help="change the number of workers per pool, or of gateways")
    parser.add_argument("pools", metavar="POOL=N", nargs="+", help="such as decode=3")
    add_operator(parser)
    parser.add_argument("--wait", action="store_true", help="return after the pools have that size")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Order the new sizes. The controller rejects an impossible order and changes nothing."""
    request = ScalePools(targets=sizes(arguments.pools))
    with operator(arguments) as client:
        text = carry_out(client, request, wait=arguments.wait)
    say(f"{'reached' if arguments.wait else 'scaling to'} {text}")
    return 0


def sizes(words: list[str]) -> dict[str, int]:
    """Parse numbers of workers by pool. Raises ConfigError for an unknown pool or bad number."""
    found = {}
    for pool, text in assignments(words).items():
        if pool not in POOLS:
            raise ConfigError(f"no pool {pool!r}; scale prefill, decode or gateway")
        if not text.isdecimal():
            raise ConfigError(f"{pool}={text}: {text!r} is not a number of workers or gateways")
        if len(text) > _MOST_DIGITS:
            raise ConfigError(f"{pool}={text}: the number of workers or gateways is too large")
        found[pool] = int(text)
    return found
