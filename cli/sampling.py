"""The sampling flags of ``generate``, ``chat`` and ``speak``."""

from __future__ import annotations

import argparse

from baton.proto.errors import ConfigError, InputError
from baton.proto.sampling import SamplingParamsInput

from .numbers import number, whole

_FLAGS = (
    ("--temperature", number, "T", "randomness; 0: always take the most likely token"),
    ("--top-p", number, "P", "keep the most likely tokens with this total probability"),
    ("--top-k", whole, "K", "keep this many of the most likely tokens (-1: all)"),
    ("--min-p", number, "P", "minimum probability, as a share of the most likely token's"),
    ("--seed", whole, "N", "seed of the random numbers, for reproducible answers"),
)


def add_sampling(
    parser: argparse.ArgumentParser, max_new_tokens: int, *, stop: bool = True
) -> None:
    """Register the flags. Their defaults come from the model's generation config.

    ``stop``: whether the answers are texts, which stop strings can end.
    """
    group = parser.add_argument_group("sampling", "defaults: the model's generation config")
    group.add_argument(
        "--max-new-tokens",
        type=whole,
        default=max_new_tokens,
        metavar="N",
        help=f"maximum tokens to generate [{max_new_tokens}]",
    )
    for flag, kind, metavar, text in _FLAGS:
        group.add_argument(flag, type=kind, metavar=metavar, help=text)
    parser.set_defaults(stop=None)
    if stop:
        group.add_argument(
            "--stop", action="append", metavar="TEXT", help="text that ends the answer; repeatable"
        )


def sampling_of(arguments: argparse.Namespace) -> SamplingParamsInput:
    """Return the sampling parameters of the flags. Raises ConfigError for a value out of range."""
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
