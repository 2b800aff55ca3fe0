"""The list of public keys allowed in a cluster, with the role and names of each.

The file ``allowed.toml`` of a key folder has one ``[[key]]`` table per key::

    [[key]]
    public = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"  # z85, 40 characters
    role = "decode"                                      # one of ROLES
    names = ["decode-*"]                                 # shell patterns of names
    file = "decode"                                      # the pair's file, without .key

Invariant: an unlisted key has no rights. If an entry lists a name literally, only entries that
list it literally may use it; patterns that match it do not count.
"""

from __future__ import annotations

import fnmatch
import tomllib

import msgspec

from baton.proto.errors import ConfigError

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
        """Validate. Raises ConfigError for an invalid key, role or name list."""
        if not is_z85(self.public):
            raise ConfigError(f"public {self.public[:60]!r} is not a key of 40 z85 characters")
        if self.role not in ROLES:
            known = ", ".join(ROLES)
            raise ConfigError(f"role is {self.role[:60]!r}, must be one of {known}")
        if not self.names or not all(self.names):
            raise ConfigError(f"names of the key {self.public} must not be empty")

    def spells_out(self, name: str) -> bool:
        """Whether the entry lists ``name`` literally, not by a pattern."""
        return name in self.names and not _WILD & set(name)

    def matches(self, name: str) -> bool:
        """Whether a pattern of the entry matches ``name``."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    key: list[KeyEntry] = []


class AllowedKeys:
    """A parsed list. Raises ConfigError for a duplicate key."""

    def __init__(self, entries: list[KeyEntry]) -> None:
        self.entries = tuple(entries)
        self._by_key = {entry.public.encode(): entry for entry in entries}
        if len(self._by_key) != len(entries):
            raise ConfigError("a public key is listed twice")

    def get(self, public: bytes) -> KeyEntry | None:
        """Return the entry of a z85 key, or None if it is not listed."""
        return self._by_key.get(public)

    def may_be(self, entry: KeyEntry, role: str, name: str) -> bool:
        """Whether a process with this entry's key may use ``name`` in ``role``."""
        if entry.role != role or not entry.matches(name):
            return False
        return entry.spells_out(name) or not any(
            other.role == role and other.spells_out(name) for other in self.entries
        )

    def servers(self, role: str, name: str = "") -> tuple[bytes, ...]:
        """Return the z85 keys that may listen as ``role`` and ``name``, newest first.

        An empty ``name`` matches every entry of the role. There are several keys during a key
        rotation, or if each host has its own key.
        """
        return tuple(
            entry.public.encode()
            for entry in reversed(self.entries)
            if (self.may_be(entry, role, name) if name else entry.role == role)
        )


def is_z85(text: str) -> bool:
    """Whether ``text`` has the form of a z85 key."""
    return len(text) == Z85_LENGTH and _Z85.issuperset(text)


def parse_allowed(text: str, source: str) -> AllowedKeys:
    """Parse a list. Raises ConfigError with ``source`` and the cause."""
    try:
        return AllowedKeys(msgspec.convert(tomllib.loads(text), _File).key)
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{source} is not valid TOML: {problem}") from problem
    except (msgspec.ValidationError, ConfigError) as problem:
        raise ConfigError(f"{source}: {problem}") from problem
    except RecursionError as problem:
        raise ConfigError(f"{source} is nested too deeply") from problem


def write_allowed(entries: list[KeyEntry]) -> str:
    """Return the text of ``allowed.toml`` for these entries."""
    parts = [_HEAD]
    for entry in entries:
        names = ", ".join(f'"{name}"' for name in entry.names)
        parts.append(
            f'\n[[key]]\npublic = "{entry.public}"\nrole = "{entry.role}"\n'
            f'names = [{names}]\nfile = "{entry.file}"\n'
        )
    return "".join(parts)


_HEAD = """\
# Public keys allowed in this cluster, written by baton keygen. The list is not secret, but anyone
# with write access to it controls access to the cluster. Processes reload it when it changes.
"""
