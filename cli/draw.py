"""``baton draw TEXT``: write a picture of a text to a PNG file or a pipe."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from baton.client.pictures import Picture
from baton.proto.errors import ConfigError, InputError

from .cluster import add_deadline, connect
from .media import add_text_and_output, check_output, text_of, write_error
from .numbers import number, whole


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("draw", help="draw a picture of a text, with a picture model")
    add_text_and_output(parser, "PNG file; - writes it to standard output")
    parser.add_argument(
        "--negative", metavar="TEXT", help="what the picture must not show; takes twice as long"
    )
    for name in ("width", "height"):
        parser.add_argument(
            f"--{name}", type=whole, metavar="PIXELS", help=f"{name}, multiple of 16 [the model's]"
        )
    parser.add_argument("--steps", type=whole, metavar="N", help="steps, 1 to 250 [the model's]")
    parser.add_argument(
        "--guidance", type=number, metavar="SCALE", help="how closely to follow TEXT [the model's]"
    )
    parser.add_argument(
        "--true-cfg", type=number, metavar="SCALE", help="weight of --negative, above 1 [4]"
    )
    parser.add_argument(
        "--seed", type=whole, metavar="N", help="the same seed draws the same picture [random]"
    )
    parser.add_argument(
        "--previews", type=whole, metavar="N",
        help="also write N previews while the steps run, as NAME.preview-1.png and so on, 1 to 16",
    )  # fmt: skip
    add_deadline(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the picture, and show the steps if standard error is a terminal."""
    text = text_of(arguments)
    check_output(arguments.output, {".png": "PNG"})
    if arguments.previews and arguments.output == "-":
        raise ConfigError("--previews needs a file: with -o - only the picture is written")
    previews = Previews(Path(arguments.output)) if arguments.previews else None
    began = time.monotonic()
    with connect(arguments) as client:
        try:
            picture = client.image(
                text,
                negative_prompt=arguments.negative,
                width=arguments.width,
                height=arguments.height,
                steps=arguments.steps,
                guidance=arguments.guidance,
                true_cfg=arguments.true_cfg,
                seed=arguments.seed,
                deadline=arguments.deadline,
                previews=arguments.previews,
                on_preview=previews,
                on_progress=_show if sys.stderr.isatty() else None,
            )
        except InputError as problem:
            if type(problem) is not InputError:  # such as a model that draws no pictures
                raise
            raise ConfigError(str(problem)) from None
    _write(arguments.output, picture)
    if arguments.output != "-":
        size, took = f"{picture.width} x {picture.height}", time.monotonic() - began
        print(f"{arguments.output}: {size}, seed {picture.seed}, {took:.1f} s")
    return 0


class Previews:
    """Writes previews beside the picture's file."""

    def __init__(self, output: Path) -> None:
        self._output, self._count = output, 0

    def __call__(self, png: bytes, done: int, total: int) -> None:
        """Write the next preview. Raises ConfigError if that fails."""
        self._count += 1
        path = self._output.with_suffix(f".preview-{self._count}.png")
        try:
            path.write_bytes(png)
        except OSError as problem:
            raise write_error(path, problem) from None


def _show(done: int, total: int) -> None:
    """Show the steps in one line, which the last step clears."""
    line = f"step {done} of {total}" if done < total else ""
    sys.stderr.write(f"\r\x1b[K{line}")
    sys.stderr.flush()


def _write(output: str, picture: Picture) -> None:
    if output == "-":
        sys.stdout.buffer.write(picture.png)
        return
    try:
        picture.save(output)
    except OSError as problem:
        raise write_error(output, problem) from None
