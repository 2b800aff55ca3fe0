"""Writes the message tables of docs/protocol.md from the structs, so they cannot drift.

``python docs/make_protocol.py`` rewrites the part between the markers. With ``--check`` the exit
code is 1 if that would change the page.
"""

from __future__ import annotations

import inspect
import sys
import typing
from pathlib import Path

import msgspec

from baton.proto.contexts import outputs
from baton.proto.wire import arrays, messages, wire_context

PAGE = Path(__file__).with_name("protocol.md")
START, END = "<!-- tables: begin -->", "<!-- tables: end -->"
DIRECTIONS = {
    "ClientToRouter": "Client to router",
    "RouterToClient": "Router to client",
    "WorkerToRouter": "Worker to router",
    "RouterToWorker": "Router to worker",
    "RouterToSupervisor": "Router to supervisor",
    "PrefillToDecode": "Prefill worker to decode worker",
    "DecodeToPrefill": "Decode worker to prefill worker",
}
PARTS = (
    wire_context.WireContext,
    wire_context.WireVisionContext,
    wire_context.WireSpeechContext,
    wire_context.WirePixelContext,
    wire_context.WireImage,
    wire_context.WireTokens,
    wire_context.WireRange,
    wire_context.WireRequestID,
    arrays.ArrayMap,
    wire_context.WireSampling,
    messages.TokenRun,
    outputs.TokenLogProbs,
    messages.GrantRef,
    messages.GrammarSpec,
    messages.RequestState,
    messages.WorkerLoad,
    messages.ExtensionCounts,
    messages.KVFrame,
)


def fields(struct: type[msgspec.Struct]) -> str:
    """One struct's fields, required ones plain, optional ones with their default."""
    shown = []
    for field in msgspec.structs.fields(struct):
        if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
            shown.append(f"`{field.encode_name}`")
        else:
            default = field.default
            if default is msgspec.NODEFAULT:
                default = field.default_factory() if field.default_factory else None
            text = "..." if isinstance(default, msgspec.Struct) else repr(default)
            shown.append(f"`{field.encode_name}={text}`")
    return ", ".join(shown) or "none"


def first_line(struct: type) -> str:
    """The docstring's first sentence."""
    return (inspect.getdoc(struct) or "").split("\n")[0]


def tables() -> str:
    """All tables as Markdown."""
    lines: list[str] = []
    for name, title in DIRECTIONS.items():
        lines += ["", f"### {title}", "", "| message | meaning | fields |", "|---|---|---|"]
        for struct in typing.get_args(getattr(messages, name)):
            lines.append(f"| `{struct.__name__}` | {first_line(struct)} | {fields(struct)} |")
    lines += [
        "",
        "### Parts",
        "",
        "| struct | meaning | encoded as | fields |",
        "|---|---|---|---|",
    ]
    for struct in PARTS:
        form = "array" if struct.__struct_config__.array_like else "map"
        lines.append(f"| `{struct.__name__}` | {first_line(struct)} | {form} | {fields(struct)} |")
    return "\n".join(lines) + "\n"


def render(page: str) -> str:
    """``page`` with fresh tables."""
    head, rest = page.split(START)
    return f"{head}{START}\n{tables()}\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Rewrite or check the page."""
    page = PAGE.read_text("utf-8")
    fresh = render(page)
    if "--check" in sys.argv:
        return int(fresh != page)
    PAGE.write_text(fresh, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
