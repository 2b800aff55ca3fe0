"""Parsing of settings: every error names the invalid key."""

from __future__ import annotations

import msgspec
import pytest

from baton.proto.errors import ConfigError
from baton.runtime.process.main import dump_settings, load_settings, parse_json, parse_toml


class Inner(msgspec.Struct, frozen=True):
    depth: int = 1


class Outer(msgspec.Struct, frozen=True):
    name: str
    inner: Inner = Inner()
    ratio: float = 0.5


def test_json_and_toml_read_alike(tmp_path):
    expected = Outer("x", Inner(3))
    assert parse_json('{"name": "x", "inner": {"depth": 3}}', Outer) == expected
    path = tmp_path / "a.toml"
    path.write_text('name = "x"\n[inner]\ndepth = 3\n')
    assert load_settings(path, Outer) == expected
    assert parse_json(dump_settings(expected), Outer) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "x", "label": 1}', "unknown key 'label'.*known: name, inner, ratio"),
        ('{"name": "x", "inner": {"deep": 1}}', "unknown key 'inner.deep'"),
        ('{"name": 3}', r"Expected `str`.*\$.name"),
        ("{}", "missing required field `name`"),
        ("{", "not valid JSON"),
        ("[]", "Expected `object`"),
        ('{"name": "\\ud800"}', "settings"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_json(text, Outer)


def test_bad_toml_and_missing_files(tmp_path):
    with pytest.raises(ConfigError, match="not valid TOML"):
        parse_toml("name = ", Outer)
    with pytest.raises(ConfigError, match="cannot read settings"):
        load_settings(tmp_path / "none.json", Outer)
    (tmp_path / "bad.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot read settings"):
        load_settings(tmp_path / "bad.json", Outer)
