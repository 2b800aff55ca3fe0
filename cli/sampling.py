"""The sampling flags ``generate`` and ``chat`` share."""

from __future__ import annotations

import argparse

from ..proto.errors import ConfigError, InputError
from ..proto.sampling import SamplingParamsInput
from .numbers import number, whole

_FLAGS = (
    ("--temperature", number, "T", "0 always takes the likeliest token"),
    ("--top-p", number, "P", "keep the likeliest tokens up to this mass"),
    ("--top-k", whole, "K", "keep so many of the likeliest tokens; -1 keeps all"),
    ("--min-p", number, "P", "drop tokens less likely than this share of the likeliest"),
    ("--seed", whole, "N", "the same seed gives the same answer"),
)


def add_sampling(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Register the flags; what is not given comes from the model's generation config."""
    group = parser.add_argument_group("sampling", "defaults: the model's generation config")
    group.add_argument(
        "--max-new-tokens",
        type=whole,
        default=max_new_tokens,
        metavar="N",
        help=f"most tokens to generate [{max_new_tokens}]",
    )
    for flag, kind, metavar, text in _FLAGS:
        group.add_argument(flag, type=kind, metavar=metavar, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end here; repeatable")


def sampling_of(arguments: argparse.Namespace) -> SamplingParamsInput:
    """What the user asked for. ConfigError for a value out of range."""
    try:
        return SamplingParamsInput(
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
            min_p=arguments.min_p,
            seed=arguments.seed,
            stop=arguments.stop,
        )
    except InputError as problem:
        raise ConfigError(str(problem)) from None
