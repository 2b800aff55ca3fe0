"""The list of public keys a cluster knows, and what each of them may be.

The file ``allowed.toml`` of a key folder has one ``[[key]]`` table per key::

    [[key]]
    public = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"  # z85, 40 characters
    role = "decode"                                      # one of ROLES
    names = ["decode-*"]                                 # shell patterns of names
    file = "decode"                                      # the pair's file, without .key

Invariant: a key that is not in the list may do nothing; a name that an entry spells out belongs
to that entry's keys alone, whatever the patterns of others match.
"""

from __future__ import annotations

import fnmatch
import tomllib

import msgspec

from ..proto.errors import ConfigError

ROUTER, PREFILL, DECODE, CLIENT, OPERATOR = ROLES = (
    "router", "prefill", "decode", "client", "operator",
)  # fmt: skip
MAX_LIST_BYTES = 1 << 20
Z85_LENGTH = 40
_Z85 = frozenset(
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)
_WILD = frozenset("*?[")


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A public key (z85), its role, the names it may use, and the stem of its pair's file."""

    public: str
    role: str
    names: tuple[str, ...] = ("*",)
    file: str = ""

    def __post_init__(self) -> None:
        """Refuse what no process could use."""
        if not is_z85(self.public):
            raise ConfigError(f"public {self.public[:60]!r} is not a key of 40 z85 characters")
        if self.role not in ROLES:
            known = ", ".join(ROLES)
            raise ConfigError(f"role is {self.role[:60]!r}, must be one of {known}")
        if not self.names or not all(self.names):
            raise ConfigError(f"names of the key {self.public} must not be empty")

    def spells_out(self, name: str) -> bool:
        """Whether it has the name itself, not by a pattern."""
        return name in self.names and not _WILD & set(name)

    def matches(self, name: str) -> bool:
        """Whether one of its patterns fits the name."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    key: list[KeyEntry] = []


class AllowedKeys:
    """A list that was read. Raises ConfigError for two entries of one key."""

    def __init__(self, entries: list[KeyEntry]) -> None:
        self.entries = tuple(entries)
        self._by_key = {entry.public.encode(): entry for entry in entries}
        if len(self._by_key) != len(entries):
            raise ConfigError("a public key is listed twice")

    def get(self, public: bytes) -> KeyEntry | None:
        """The entry of a key (z85); None for a stranger's."""
        return self._by_key.get(public)

    def may_be(self, entry: KeyEntry, role: str, name: str) -> bool:
        """Whether the holder of this entry's key may call itself ``name`` in ``role``."""
        if entry.role != role or not entry.matches(name):
            return False
        return entry.spells_out(name) or not any(
            other.role == role and other.spells_out(name) for other in self.entries
        )

    def servers(self, role: str, name: str = "") -> tuple[bytes, ...]:
        """Keys (z85) that may listen as ``role`` and ``name``, newest first; any name if empty.

        There is more than one while a key is replaced, or where hosts have keys of their own.
        """
        return tuple(
            entry.public.encode()
            for entry in reversed(self.entries)
            if (self.may_be(entry, role, name) if name else entry.role == role)
        )


def is_z85(text: str) -> bool:
    """Whether it can be a key."""
    return len(text) == Z85_LENGTH and _Z85.issuperset(text)


def parse_allowed(text: str, source: str) -> AllowedKeys:
    """Read a list. Raises ConfigError that names ``source`` and what is wrong in it."""
    try:
        return AllowedKeys(msgspec.convert(tomllib.loads(text), _File).key)
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{source} is not valid TOML: {problem}") from problem
    except (msgspec.ValidationError, ConfigError) as problem:
        raise ConfigError(f"{source}: {problem}") from problem
    except RecursionError as problem:
        raise ConfigError(f"{source} is nested too deeply") from problem


def write_allowed(entries: list[KeyEntry]) -> str:
    """The list as the text of its file."""
    parts = [_HEAD]
    for entry in entries:
        names = ", ".join(f'"{name}"' for name in entry.names)
        parts.append(
            f'\n[[key]]\npublic = "{entry.public}"\nrole = "{entry.role}"\n'
            f'names = [{names}]\nfile = "{entry.file}"\n'
        )
    return "".join(parts)


_HEAD = """\
# Public keys that may take part in this cluster; made by baton keygen. Nothing here is secret,
# but who can write to it decides who is let in. Processes read it again when it changes.
"""
