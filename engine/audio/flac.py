"""16-bit samples of one channel as a FLAC stream (RFC 9639), block by block, without loss.

A block is predicted from its last 0 to 4 samples by fixed polynomials, and the differences are Rice
codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]

BLOCK = 4096
"""Maximum samples per block."""
MAX_ORDER = 4
MAX_PARTITION_ORDER = 4
MAX_RICE = 14
"""Largest parameter of a Rice code; 15 is an escape, which is not written."""
_SHORTEST, _LONGEST = 16, 65_535
_RATES = {8000: 4, 16000: 5, 22050: 6, 24000: 7, 32000: 8, 44100: 9, 48000: 10}
_RATE_IN_HERTZ = 13
_MAX_HERTZ = 65_535


def _crc_table(polynomial: int, width: int) -> tuple[int, ...]:
    top, mask, table = 1 << (width - 1), (1 << width) - 1, []
    for byte in range(256):
        value = byte << (width - 8)
        for _ in range(8):
            value = ((value << 1) ^ polynomial if value & top else value << 1) & mask
        table.append(value)
    return tuple(table)


_CRC8, _CRC16 = _crc_table(0x07, 8), _crc_table(0x8005, 16)


def _crc8(data: bytes) -> int:
    value = 0
    for byte in data:
        value = _CRC8[value ^ byte]
    return value


def _crc16(data: bytes) -> int:
    value = 0
    for byte in data:
        value = (value << 8 & 0xFFFF) ^ _CRC16[value >> 8 ^ byte]
    return value


def _fixed_bits(value: int, width: int) -> Bits:
    return np.array([value >> at & 1 for at in range(width - 1, -1, -1)], np.uint8)


def _coded_number(number: int) -> bytes:
    """Return a number of up to 36 bits in the form of UTF-8."""
    if number < 0x80:
        return bytes([number])
    tail: list[int] = []
    while number >= 1 << max(0, 6 - len(tail)):
        tail.append(0x80 | number & 0x3F)
        number >>= 6
    lead = (0xFF00 >> (len(tail) + 1)) & 0xFF
    return bytes([lead | number, *reversed(tail)])


class FlacEncoder:
    """Encodes one stream. ``sample_rate``: samples per second."""

    def __init__(self, sample_rate: int) -> None:
        self._rate = sample_rate
        self._done = 0  # samples

    def header(self, samples: int = 0) -> bytes:
        """Return the beginning of the stream. ``samples``: their number, 0 if it is unknown."""
        info = b"".join(size.to_bytes(2, "big") for size in (_SHORTEST, _LONGEST))
        info += bytes(6)  # sizes of frames: unknown
        info += (self._rate << 44 | 15 << 36 | samples).to_bytes(8, "big")  # 1 channel, 16 bits
        info += bytes(16)  # no digest of the samples
        return b"fLaC" + bytes([0x80]) + len(info).to_bytes(3, "big") + info

    def encode(self, samples: npt.NDArray[np.signedinteger[Any]]) -> bytes:
        """Return the frames of the next samples, int16 ``[n]``."""
        wide = samples.astype(np.int64)
        blocks = (wide[at : at + BLOCK] for at in range(0, len(wide), BLOCK))
        return b"".join(self._frame(block) for block in blocks)

    def _frame(self, block: Integers) -> bytes:
        code = _RATES.get(self._rate, _RATE_IN_HERTZ if self._rate <= _MAX_HERTZ else 0)
        head = bytes([0xFF, 0xF9, 0x70 | code, 0x08])  # blocks of any size; mono, 16 bits
        head += _coded_number(self._done) + (len(block) - 1).to_bytes(2, "big")
        if code == _RATE_IN_HERTZ:
            head += self._rate.to_bytes(2, "big")
        head += bytes([_crc8(head)])
        self._done += len(block)
        frame = head + np.packbits(_subframe(block)).tobytes()
        return frame + _crc16(frame).to_bytes(2, "big")


def _subframe(block: Integers) -> Bits:
    """Return the shortest of the predictions, or the samples themselves if none is shorter."""
    verbatim = [_fixed_bits(1 << 1, 8), _words(block)]
    orders = range(min(MAX_ORDER, len(block) - 1) + 1)
    residues = [np.diff(block, order) for order in orders]
    order = min(orders, key=lambda at: int(np.abs(residues[at]).sum()))
    predicted = [_fixed_bits((8 | order) << 1, 8), _words(block[:order])]
    coded = _rice(residues[order], order)
    if sum(map(len, coded)) + 16 * order >= 16 * len(block):
        return np.concatenate(verbatim)
    return np.concatenate([*predicted, *coded])


def _words(samples: Integers) -> Bits:
    """Return samples as bits, 16 each."""
    return np.unpackbits(samples.astype(">i2").view(np.uint8))


def _rice(residue: Integers, order: int) -> list[Bits]:
    """Return the Rice codes of a block's residue, in partitions with a parameter each."""
    size, split = len(residue) + order, MAX_PARTITION_ORDER
    while size % (1 << split) or size >> split <= order:
        split -= 1
    parts = [_fixed_bits(split, 6)]  # method 0: parameters of 4 bits
    folded = np.where(residue < 0, -2 * residue - 1, 2 * residue)
    length = size >> split
    for index in range(1 << split):
        part = folded[max(0, index * length - order) : (index + 1) * length - order]
        costs = [int((part >> k).sum()) + k * len(part) for k in range(MAX_RICE + 1)]
        parameter = int(np.argmin(costs))
        parts += [_fixed_bits(parameter, 4), _codes(part, parameter)]
    return parts


def _codes(values: Integers, parameter: int) -> Bits:
    """Return Rice codes: the quotient as zeros before a one, and the remainder in bits."""
    quotients = values >> parameter
    ends = np.cumsum(quotients + 1 + parameter)
    bits = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    bits[ends - parameter - 1] = 1
    for bit in range(parameter):
        bits[ends - 1 - bit] = values >> bit & 1
    return bits
