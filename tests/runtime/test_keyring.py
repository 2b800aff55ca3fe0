"""Key folders: creation, rejected folders, and changes of the list."""

import contextlib
import os
import socket
import stat

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.proto.errors import ConfigError
from baton.runtime.keys import keyring as module
from baton.runtime.keys.allowed import ROLES, AllowedKeys, KeyEntry, parse_allowed, write_allowed
from baton.runtime.keys.keyring import (
    KeyRing,
    add_key,
    client_keys,
    load_keys,
    make_folder,
    read_allowed,
    read_pair,
    retire,
    revoke,
    role_without_key,
    rotate,
)
from baton.runtime.process import log


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def at_once(monkeypatch):
    """Check the list's file for changes on every call."""
    monkeypatch.setattr(module, "REREAD_S", 0.0)


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_its_users_alone(folder):
    assert mode(folder) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["allowed.toml", *(f"{role}.key" for role in ROLES)]
    )
    for role in ROLES:
        assert mode(folder / f"{role}.key") == 0o600
        ring = KeyRing(folder, role)
        assert ring.entry.role == role
        assert zmq.curve_public(ring.pair.secret) == ring.public
    assert len({entry.public for entry in read_allowed(folder / "allowed.toml").entries}) == 5


def test_what_is_there_is_never_overwritten(folder, tmp_path):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for _ in range(2):
        with pytest.raises(ConfigError, match="not empty"):
            make_folder(folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "empty").mkdir()
    make_folder(tmp_path / "empty")
    assert mode(tmp_path / "empty") == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not empty"):
        make_folder(tmp_path / "file")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_secrets_are_not_shown(folder):
    ring = KeyRing(folder, "router")
    secret = ring.pair.secret.decode()
    assert secret not in f"{ring!r} {ring.pair!r} {read_pair(ring.file)!r}"
    assert secret not in f"{ring.connecting('router')!r}"


@pytest.mark.parametrize("human", [False, True])
def test_a_log_line_that_is_given_keys_does_not_show_the_secret(folder, capsys, human):
    ring = KeyRing(folder, "router")
    holders = [ring, ring.pair, ring.connecting("router"), read_pair(ring.file)]
    log.configure("router", human=human)
    try:
        log.get_logger().warning("x", one=ring, all=holders, deep={"a": (ring.pair,)})
    finally:
        log.configure(level="warning", human=True)
    said = capsys.readouterr().err
    assert ring.public.decode() in said and ring.pair.secret.decode() not in said


def test_no_setting_means_no_keys():
    assert load_keys("", "router") is None
    assert client_keys("") is None
    assert client_keys(None) is None
    with pytest.raises(TypeError):
        client_keys(7)


def test_a_folder_with_an_operators_key_makes_an_operator(folder):
    assert client_keys(folder).role == "operator"
    (folder / "operator.key").unlink()
    assert client_keys(str(folder)).role == "client"


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "decode.key").unlink(), "no decode-0.key or .* or decode.key in"),
        (lambda f: (f / "decode.key").chmod(0o640), "mode 0640, others may use it: chmod 600"),
        (lambda f: (f / "decode.key").chmod(0o604), "mode 0604, others may use it"),
        (lambda f: f.chmod(0o770), "mode 0770, others may write to it: chmod 700"),
        (lambda f: (f / "allowed.toml").chmod(0o666), "mode 0666, others may write to it"),
        (lambda f: (f / "allowed.toml").unlink(), "cannot read .*allowed.toml: No such file"),
        (lambda f: (f / "decode.key").write_text("public = 'x'"), "decode.key is damaged"),
        (lambda f: (f / "decode.key").write_text("\0"), "decode.key is damaged"),
        (lambda f: (f / "decode.key").write_bytes(b"\xff"), "decode.key is not UTF-8 text"),
        (lambda f: (f / "decode.key").write_bytes(b"#" * 5000), "more than 4096 bytes"),
        (lambda f: swap_public(f / "decode.key", f / "client.key"), "do not match"),
        (lambda f: (f / "client.key").replace(f / "decode.key"), "is for role client"),
        (lambda f: revoke_but_keep(f, "decode"), "is not in .*allowed.toml"),
        (lambda f: (f / "allowed.toml").write_text("key = 3"), "allowed.toml: Expected `array`"),
        (lambda f: (f / "allowed.toml").write_text("[[key]"), "is not valid TOML"),
        (lambda f: (f / "allowed.toml").write_text("keys = []"), "unknown field `keys`"),
        (lambda f: (f / "allowed.toml").write_bytes(b"#" * (2 << 20)), "more than 1048576 bytes"),
        (lambda f: make_fifo(f / "decode.key"), "is not a regular file"),
        (lambda f: add_key(f, "decode", ["decode-0"]), None),
        (lambda f: add_named_away(f), "may not be used by 'decode-0'"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_used_says_why_at_once(folder, spoil, message):
    spoil(folder)
    if message is None:
        assert KeyRing(folder, "decode", "decode-0").file.name == "decode-0.key"
    else:
        with pytest.raises(ConfigError, match=message):
            KeyRing(folder, "decode", "decode-0")


def swap_public(path, other):
    mine, theirs = read_pair(path), read_pair(other)
    path.write_text(f'public = "{theirs.public}"\nsecret = "{mine.secret}"\n')


def revoke_but_keep(folder, stem):
    text = (folder / f"{stem}.key").read_text()
    revoke(folder, stem)
    (folder / f"{stem}.key").touch(0o600)
    (folder / f"{stem}.key").write_text(text)


def make_fifo(path):
    path.unlink()
    os.mkfifo(path, 0o600)


def add_named_away(folder):
    add_key(folder, "decode", ["decode-0"])
    (folder / "decode-0.key").unlink()


def test_a_missing_key_of_a_process_named_like_its_role_is_named_once(folder):
    (folder / "router.key").unlink()
    with pytest.raises(ConfigError) as caught:
        load_keys(str(folder), "router", "router")
    assert str(caught.value).count("router.key") == 1


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="create it with baton keygen"):
        KeyRing(tmp_path / "none", "router")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        KeyRing(tmp_path / "file", "router")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_somebody_elses_file(folder):
    os.chown(folder / "decode.key", 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        KeyRing(folder, "decode")


def test_a_message_never_quotes_the_secret(folder):
    secret = read_pair(folder / "decode.key").secret
    (folder / "decode.key").write_text(f'public = "x"\nsecret = {secret}')
    with pytest.raises(ConfigError) as caught:
        KeyRing(folder, "decode")
    assert secret not in str(caught.value)


# ------------------------------------------------------------------------------ the list


def entry(role, *names, number=[0]):  # noqa: B006
    number[0] += 1
    return KeyEntry(public=f"{number[0]:040d}", role=role, names=names or ("*",))


def test_a_name_that_is_spelled_out_belongs_to_its_key_alone():
    pool, named, other = entry("decode"), entry("decode", "decode-1"), entry("prefill", "decode-2")
    allowed = AllowedKeys([pool, named, other])
    assert allowed.may_be(pool, "decode", "decode-0")
    assert not allowed.may_be(pool, "decode", "decode-1")
    assert allowed.may_be(named, "decode", "decode-1")
    assert not allowed.may_be(named, "decode", "decode-0")
    assert allowed.may_be(pool, "decode", "decode-2")  # listed literally for another role only
    assert not allowed.may_be(pool, "prefill", "decode-0")
    assert allowed.servers("decode", "decode-1") == (named.public.encode(),)
    assert allowed.servers("decode") == (named.public.encode(), pool.public.encode())
    assert allowed.servers("router") == ()


def test_the_list_round_trips():
    entries = [entry("decode", "a-*", "b"), entry("client")]
    assert parse_allowed(write_allowed(entries), "list").entries == tuple(entries)


def test_a_key_is_listed_once():
    one = entry("client")
    with pytest.raises(ConfigError, match="twice"):
        AllowedKeys([one, one])


@settings(max_examples=300)
@given(st.text(max_size=300) | st.builds("[[key]]\n{}".format, st.text(max_size=200)))
def test_any_text_is_a_list_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        parse_allowed(text, "list")


def test_deep_nesting_is_a_config_error():
    with pytest.raises(ConfigError):
        parse_allowed("key = " + "[" * 100_000, "list")


# ------------------------------------------------------------------------------ changes


def test_a_key_of_a_host_or_a_name_goes_before_the_roles(folder):
    host = socket.gethostname()
    added = add_key(folder, "prefill", [], host)
    assert added.file == f"prefill@{host}"
    assert KeyRing(folder, "prefill", "prefill-0").entry == added
    named = add_key(folder, "prefill", ["prefill-0"])
    assert KeyRing(folder, "prefill", "prefill-0").entry == named
    assert KeyRing(folder, "prefill", "prefill-1").entry == added
    assert mode(folder / "prefill-0.key") == 0o600


@pytest.mark.parametrize(
    ("role", "names", "host"),
    [("decode", [], ""), ("decode", ["*"], ""), ("decode", ["../x"], ""), ("boss", ["x"], ""),
     ("decode", ["x"], "a/b"), ("decode", ["ok", 'q"'], ""), ("decode", ["decode"], "")],
)  # fmt: skip
def test_a_further_key_needs_a_plain_name(folder, role, names, host):
    before = (folder / "allowed.toml").read_bytes()
    with pytest.raises(ConfigError):
        add_key(folder, role, names, host)
    assert (folder / "allowed.toml").read_bytes() == before


def test_a_process_can_have_the_roles_of_its_keys(folder):
    pools = ("prefill", "decode")
    assert role_without_key("", pools, "decode-0") == ""
    assert role_without_key(str(folder), pools, "decode-0") == ""
    add_key(folder, "decode", ["decode-1"])  # its own key comes before that of the role
    assert role_without_key(str(folder), pools, "decode-1") == "prefill"
    (folder / "decode.key").unlink()
    assert role_without_key(str(folder), pools, "prefill-0") == "decode"


def test_a_key_is_added_once(folder):
    add_key(folder, "decode", ["decode-1"])
    with pytest.raises(ConfigError, match="--rotate decode-1 replaces it"):
        add_key(folder, "decode", ["decode-1"])


def test_a_rotation_keeps_the_old_key_until_it_is_retired(folder, at_once):
    old, watcher = KeyRing(folder, "router"), KeyRing(folder, "client")
    new = rotate(folder, "router")
    assert KeyRing(folder, "router").entry == new
    assert mode(folder / "router.key") == 0o600
    servers = watcher.connecting("router").servers
    assert servers == (new.public.encode(), old.public)  # the newest key comes first
    assert [struck.public.encode() for struck in retire(folder, "router")] == [old.public]
    assert watcher.connecting("router").servers == (new.public.encode(),)


def test_a_revoked_key_is_gone(folder, at_once):
    router = KeyRing(folder, "router")
    added = add_key(folder, "client", ["alice"])
    assert router.refresh()
    assert router.allowed.get(added.public.encode()) == added
    assert revoke(folder, "alice") == [added]
    assert not (folder / "alice.key").exists()
    assert router.refresh()
    assert router.allowed.get(added.public.encode()) is None
    assert not router.refresh()
    with pytest.raises(ConfigError, match="has no key 'alice'; it has client, decode"):
        revoke(folder, "alice")


def test_a_spoiled_list_changes_nothing(folder, at_once):
    ring = KeyRing(folder, "router")
    known = ring.allowed
    (folder / "allowed.toml").write_text("[[key")
    assert not ring.refresh()
    (folder / "allowed.toml").unlink()
    assert not ring.refresh()
    assert ring.allowed is known


def test_the_list_is_not_looked_at_more_often_than_it_should(folder):
    ring = KeyRing(folder, "router")
    add_key(folder, "client", ["alice"])
    assert not ring.refresh()


def test_nobody_to_connect_to(folder):
    ring = KeyRing(folder, "client")
    assert len(ring.connecting("router", "router-1").servers) == 1
    add_key(folder, "router", ["router-0"])
    ring = KeyRing(folder, "client")
    assert len(ring.connecting("router").servers) == 2
    revoke(folder, "router")
    ring = KeyRing(folder, "client")
    with pytest.raises(ConfigError, match="has no key for router 'router-1'"):
        ring.connecting("router", "router-1")
