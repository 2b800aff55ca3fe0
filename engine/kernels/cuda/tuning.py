"""Variants of the CUDA kernels that are chosen per card, by measurement.

``csrc/tuning.json`` has one entry per card, written by the part ``sweep`` of ``make gpu-bench``. A
card without an entry gets the defaults of its compute capability. Only :attr:`Tuning.decode_chunk`
and :attr:`Tuning.prefill` change bits of results; of :attr:`Tuning.dependent`, whose kernels are
compiled in another way, it is not known.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from baton.proto.errors import ConfigError

SHARED_BYTES = 227 * 1024
"""Shared memory of a multiprocessor from sm_90 on that blocks can have, 1 KiB less for each."""
WGMMA = "90"
"""The compute capability whose cards have the instructions wgmma."""
_STAGE_BYTES = 32 * 1024
_WIDE_ROWS = 64

Steps = tuple[tuple[Annotated[int, msgspec.Meta(ge=0)], Literal[1, 2]], ...]
RingTiles = Literal[0, 1, 2, 4]
RingSteps = tuple[tuple[Annotated[int, msgspec.Meta(ge=0)], RingTiles], ...]


class Tuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choices for one card.

    ``decode_bounds``: blocks of decode attention on a multiprocessor; ``decode_stages``: tiles of
    16 tokens that each of a block's four warps has in shared memory; ``decode_chunk``: fewest
    positions of a split; ``combine_warps``: warps per head that combine splits. ``skinny_tiles``:
    pairs of a number of weight rows and the tiles of 16 rows that a block of :mod:`.linear` takes
    from there on; empty: two tiles if those still give every multiprocessor two blocks.
    ``skinny_ring``: likewise for 9 to 16 rows, the tiles of a block whose weights in flight are in
    shared memory (``ring_linear.cu``); 0 tiles, and empty: the kernel of fewer rows.
    ``fuse_from``: channels of a gated MLP from which on one kernel computes gate, up and activation
    of few rows; None: where a product of gate and up takes two tiles, as the fused kernel does.
    ``norm_rows``: up to so many rows, a thread of RMSNorm has 8 values of a row instead of 16.
    ``prefill``: instructions of prefill attention with heads of 64 or 128. "wgmma", and "bulk" with
    copies by the bulk copy engine, exist on sm_90 alone. ``dependent``: captured kernels of decode
    steps may begin before the kernel before them has ended (:mod:`.dependent`), from sm_90 on.
    """

    decode_bounds: Annotated[int, msgspec.Meta(ge=1, le=4)] = 2
    decode_stages: Annotated[int, msgspec.Meta(ge=2, le=6)] = 3
    decode_chunk: Literal[256, 512, 1024] = 256
    combine_warps: Literal[1, 2, 4] = 4
    skinny_tiles: Steps = ()
    skinny_ring: RingSteps = ()
    fuse_from: Annotated[int, msgspec.Meta(ge=0)] | None = None
    norm_rows: Annotated[int, msgspec.Meta(ge=0)] = 0
    prefill: Literal["mma", "wgmma", "bulk"] = "mma"
    dependent: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for choices that do not go together."""
        needed = self.decode_bounds * (self.decode_shared_bytes + 1024)
        if needed > SHARED_BYTES + 1024:
            raise ValueError(
                f"{self.decode_bounds} blocks of {self.decode_stages} stages take {needed} bytes "
                f"of shared memory, a multiprocessor has {SHARED_BYTES + 1024}"
            )
        for name, steps in (("skinny_tiles", self.skinny_tiles), ("skinny_ring", self.skinny_ring)):
            starts = [start for start, _ in steps]
            if starts != sorted(set(starts)) or starts[:1] not in ([], [0]):
                raise ValueError(f"{name} must start at 0 rows and rise, not {starts}")

    @property
    def decode_shared_bytes(self) -> int:
        """Dynamic shared memory of a block of decode attention, for every head size."""
        return self.decode_stages * _STAGE_BYTES

    @property
    def defines(self) -> tuple[str, ...]:
        """Macros ``NAME=VALUE`` of the compiled kernels that differ from the defaults."""
        usual = Tuning()
        names = ("decode_bounds", "decode_stages", "combine_warps")
        chosen = {name: getattr(self, name) for name in names}
        return tuple(
            f"BATON_{name.upper()}={value}"
            for name, value in chosen.items()
            if value != getattr(usual, name)
        )

    @property
    def numerics(self) -> str:
        """What of this changes bits of results, for the name of a device; empty for defaults."""
        usual = Tuning().decode_chunk
        chunk = "" if self.decode_chunk == usual else f"-chunk{self.decode_chunk}"
        return chunk + "-wgmma" * (self.prefill != "mma") + "-dependent" * self.dependent

    def wide(self, width: int, multiprocessors: int) -> bool:
        """Whether a block of a skinny product takes two tiles of a matrix with ``width`` rows."""
        if not self.skinny_tiles:
            return width >= _WIDE_ROWS * multiprocessors
        return [tiles for start, tiles in self.skinny_tiles if start <= width][-1] == 2

    def ring_tiles(self, width: int) -> int:
        """Return the tiles of a block for 9 to 16 rows, if its weights are in shared memory."""
        found: list[int] = [tiles for start, tiles in self.skinny_ring if start <= width]
        return found[-1] if found else 0

    def fuses(self, width: int, multiprocessors: int) -> bool:
        """Whether one kernel computes gate, up and activation of an MLP of ``width`` channels."""
        if self.fuse_from is None:
            return self.wide(2 * width, multiprocessors)
        return width >= self.fuse_from


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the table. ``commit``: of the sources that were measured."""

    name: str
    capability: str
    commit: str
    tuning: Tuning

    def __post_init__(self) -> None:
        """Raise ValueError for a choice that the card cannot run."""
        needed = f"needs capability {WGMMA}"
        if self.tuning.prefill != "mma" and self.capability != WGMMA:
            raise ValueError(f"prefill by {self.tuning.prefill} {needed}, not {self.capability}")
        if self.tuning.dependent and int(self.capability) < int(WGMMA):
            raise ValueError(f"dependent launches need capability {WGMMA}, not {self.capability}")


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    cards: tuple[Card, ...]


def table_path() -> Path:
    """Return the path of the table that is installed with the sources of the kernels."""
    return Path(str(files("baton.engine.kernels").joinpath("csrc", "tuning.json")))


def read_table(path: Path) -> Table:
    """Return the table. Raises ConfigError for a file that is missing or invalid."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Table)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"the table of kernel variants {path} cannot be used ({error}): restore it, "
            'or write {"cards": []} into it for the defaults'
        ) from error


def tuning_of(name: str, capability: str, path: Path | None = None) -> Tuning:
    """Return the choices for a card, or the defaults if the table does not have it.

    ``capability`` is "90" for sm_90. Raises ConfigError for an invalid table.
    """
    for card in read_table(path or table_path()).cards:
        if (card.name, card.capability) == (name, capability):
            return card.tuning
    return default_tuning(capability)


def default_tuning(capability: str) -> Tuning:
    """Return the choices for a card of this compute capability that nobody has measured."""
    return Tuning(prefill="wgmma" if capability == WGMMA else "mma")


def write_card(path: Path, card: Card) -> None:
    """Add an entry to a table, or replace the card's entry. Raises ConfigError for a bad table."""
    others = [
        other
        for other in read_table(path).cards
        if (other.name, other.capability) != (card.name, card.capability)
    ]
    ranked = sorted([*others, card], key=lambda each: (each.name, each.capability))
    text = msgspec.json.format(msgspec.json.encode(Table(cards=tuple(ranked))), indent=1)
    path.write_bytes(text + b"\n")
