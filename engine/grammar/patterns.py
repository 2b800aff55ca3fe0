r"""Regular expressions of JSON schemas, which are those of ECMA-262, in the library's syntax. Pure.

The library reads a class, ``.`` and ``\s`` as Rust's regex crate does: ``\s`` would match U+0085
and not U+FEFF, ``.`` would match U+000D, U+2028 and U+2029, and ``[[a]`` or ``[a&&b]`` would be
operations on sets. It replaces ``\d`` and ``\w`` by their ASCII classes, and refuses ``\b``.
"""

from __future__ import annotations

import re

_SPACES = r"\t\n\x0B\f\r \xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
"""What ``\\s`` matches: WhiteSpace and LineTerminator of ECMA-262."""
_OUTSIDE = {
    r"\s": f"[{_SPACES}]",
    r"\S": f"[^{_SPACES}]",
    ".": r"[^\n\r\u2028\u2029]",
}
_INSIDE = {
    r"\s": _SPACES,
    r"\S": f"[^{_SPACES}]",
    "[": r"\[",
    "&&": r"\&\&",
    "--": r"-\-",
    "~~": r"\~\~",
}
_PART = re.compile(r"\\.|\[\^?|.", re.DOTALL)
_CLASS_PART = re.compile(r"\\.|&&|--|~~|.", re.DOTALL)


def as_library_pattern(pattern: str) -> str:
    """Return a pattern that matches in the library what ``pattern`` matches by ECMA-262."""
    found: list[str] = []
    at, inside = 0, False
    while at < len(pattern):
        part = (_CLASS_PART if inside else _PART).match(pattern, at)
        text = part[0] if part else pattern[at]  # a last backslash
        at += len(text)
        if not inside and text[0] == "[":
            inside = True
            found.append(text)
        elif inside and text == "]":
            inside = False
            found.append(text)
        elif text == "--" and found[-1] in ("[", "[^"):
            found.append(r"\--")  # a range that begins with a hyphen
        else:
            found.append((_INSIDE if inside else _OUTSIDE).get(text, text))
    return "".join(found)
