"""FLAC streams, read by a decoder of the tests that follows RFC 9639."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest

from baton.engine.audio.flac import FlacEncoder


class Reader:
    """Bits of a stream, most significant first."""

    def __init__(self, data: bytes) -> None:
        self.bits = np.unpackbits(np.frombuffer(data, np.uint8))
        self.data, self.at = data, 0

    def take(self, width: int) -> int:
        value = 0
        for bit in self.bits[self.at : self.at + width].tolist():
            value = value << 1 | bit
        self.at += width
        return value

    def signed(self, width: int) -> int:
        value = self.take(width)
        return value - (1 << width) if value >> (width - 1) else value

    def unary(self) -> int:
        count = 0
        while not self.bits[self.at]:
            count, self.at = count + 1, self.at + 1
        self.at += 1
        return count

    def number(self) -> int:
        """A number in the form of UTF-8."""
        lead = self.take(8)
        if lead < 0x80:
            return lead
        more = 0
        while lead & (0x80 >> (more + 1)):
            more += 1
        value = lead & (0xFF >> (more + 2))
        for _ in range(more):
            value = value << 6 | self.take(8) & 0x3F
        return value


def crc(data: bytes, polynomial: int, width: int) -> int:
    value = 0
    for byte in data:
        value ^= byte << (width - 8)
        for _ in range(8):
            value <<= 1
            if value >> width:
                value ^= 1 << width | polynomial
    return value


COEFFICIENTS = ((), (1,), (2, -1), (3, -3, 1), (4, -6, 4, -1))


def decode(stream: bytes, expected: int = 0) -> tuple[int, list[int], set[str]]:
    """Return rate, samples and the kinds of subframes; ``expected``: the length in the header."""
    assert stream[:4] == b"fLaC"
    reader = Reader(stream[4:])
    assert (reader.take(1), reader.take(7), reader.take(24)) == (1, 0, 34)
    shortest, longest = reader.take(16), reader.take(16)
    reader.take(48)
    rate, channels, width, total = (reader.take(w) for w in (20, 3, 5, 36))
    assert (channels, width, total, shortest, longest) == (0, 15, expected, 16, 65535)
    reader.take(128)
    samples: list[int] = []
    kinds: set[str] = set()
    while reader.at < len(reader.bits):
        frame(reader, samples, kinds, rate)
    return rate, samples, kinds


def frame(reader: Reader, samples: list[int], kinds: set[str], rate: int) -> None:
    begin = reader.at // 8
    assert reader.take(16) == 0xFFF9
    assert reader.take(4) == 7
    code = reader.take(4)
    assert (reader.take(4), reader.take(3), reader.take(1)) == (0, 4, 0)
    assert reader.number() == len(samples)
    size = reader.take(16) + 1
    if code == 13:
        assert reader.take(16) == rate
    assert reader.take(8) == crc(reader.data[begin : reader.at // 8 - 1], 0x07, 8)
    kind = reader.take(8) >> 1
    block: list[int] = []
    if kind == 1:
        kinds.add("verbatim")
        block = [reader.signed(16) for _ in range(size)]
    else:
        order = kind & 7
        assert kind >> 3 == 1
        kinds.add(f"fixed {order}")
        block = [reader.signed(16) for _ in range(order)]
        assert reader.take(2) == 0
        split = reader.take(4)
        for index in range(1 << split):
            parameter = reader.take(4)
            assert parameter < 15
            for _ in range((size >> split) - (order if index == 0 else 0)):
                folded = reader.unary() << parameter | reader.take(parameter)
                residue = -(folded + 1 >> 1) if folded & 1 else folded >> 1
                past = zip(COEFFICIENTS[order], reversed(block), strict=False)
                block.append(residue + sum(factor * value for factor, value in past))
    reader.at += -reader.at % 8
    assert reader.take(16) == crc(reader.data[begin : reader.at // 8 - 2], 0x8005, 16)
    assert len(block) == size
    samples += block


def signal(kind: str, count: int) -> np.ndarray:
    rng = np.random.default_rng(count)
    time = np.arange(count)
    made = {
        "silence": np.zeros(count),
        "noise": rng.integers(-32768, 32768, count),
        "tone": 20000 * np.sin(time / 30),
        "speech": 8000 * np.sin(time / 9) * np.sin(time / 700) + rng.normal(0, 30, count),
        "steps": np.where(time // 50 % 2, 32767, -32768),
        "ramp": time % 60000 - 30000,
    }
    return made[kind].astype(np.int16)


@pytest.mark.parametrize("kind", ["silence", "noise", "tone", "speech", "steps", "ramp"])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 17, 96, 2048, 5000])
def test_a_stream_is_decoded_to_the_same_samples(kind, count):
    encoder, samples = FlacEncoder(24000), signal(kind, count)
    stream = encoder.header() + encoder.encode(samples)
    rate, found, kinds = decode(stream)
    assert (rate, found) == (24000, samples.tolist())
    if count == 5000:
        assert ("verbatim" in kinds) == (kind == "noise")
        if kind in ("tone", "speech", "silence", "ramp"):
            assert len(stream) < 5000 * 2 * 0.8


@pytest.mark.parametrize("rate", [8000, 11025, 24000, 96000])
def test_chunks_make_one_stream(rate):
    encoder, samples = FlacEncoder(rate), signal("speech", 9000)
    parts = [encoder.encode(part) for part in np.split(samples, [96, 192, 1000, 1003, 8000])]
    assert decode(encoder.header() + b"".join(parts))[:2] == (rate, samples.tolist())


@pytest.mark.parametrize("number", [0, 127, 128, 2047, 2048, 65535, 65536, 1 << 25, (1 << 36) - 1])
def test_numbers_of_samples_are_coded_as_in_utf8(number):
    encoder = FlacEncoder(24000)
    encoder._done = number
    stream = encoder.encode(np.zeros(4, np.int16))
    reader = Reader(stream)
    reader.take(32)
    assert reader.number() == number
    if number < 0xD800:
        assert stream[4:].startswith(chr(number).encode())


@pytest.mark.skipif(shutil.which("flac") is None, reason="needs the flac command")
def test_the_flac_command_accepts_the_stream(tmp_path):
    encoder, samples = FlacEncoder(24000), signal("speech", 30000)
    file = tmp_path / "a.flac"
    file.write_bytes(encoder.header() + encoder.encode(samples))
    raw = ["--decode", "--force-raw-format", "--endian=little", "--sign=signed", "--stdout"]
    done = subprocess.run(["flac", "--silent", *raw, str(file)], capture_output=True, check=True)
    assert done.stdout == samples.astype("<i2").tobytes()
