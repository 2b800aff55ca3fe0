"""Untrusted templates and tokenizers in a helper process, which limits can end.

:meth:`GuardedProcess.ask` always ends within its time limit and that of a helper's start. After a
request that exceeds a limit on time or memory, the helper is replaced. Thread-safe: requests run
one after the other.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from baton.runtime.process.helper import HelperProcess

from .render_errors import MAX_OUTPUT_CHARS, RenderError, RenderLimit
from .stated_tokens import StatedToken
from .tokenizer_core import AddedToken, TokenizerFailed

# The template cannot read the environment; as a second barrier, the helper gets few variables.
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "TZ")

MAX_ANSWER_BYTES = 256 << 20
"""More than the token ids of any accepted text. A longer answer is treated as endless."""
TIMEOUT_S = 10.0
TEMPLATE_CPU_S = 5
TEMPLATE_MEMORY_BYTES = 512 << 20
TOKENIZER_CPU_S = 8
TOKENIZER_MEMORY_BYTES = 2 << 30
"""Limit of the address space; the largest vocabularies in use need a quarter of it to load."""


class GuardedProcess:
    """A helper process with limits on memory, CPU time and wall-clock time, started when needed.

    ``kind``: ``template`` or ``tokenizer`` (:mod:`.guarded_worker`). ``first_request``: sent to
    every new helper before other requests.
    """

    def __init__(self, kind: str, timeout: float, cpu_seconds: int, memory_bytes: int) -> None:
        self.first_request: dict[str, Any] | None = None
        self._name = f"the {kind}"
        self._timeout = timeout
        self._arguments = (kind, str(memory_bytes), str(cpu_seconds))
        self._lock = threading.Lock()
        self._helper: HelperProcess | None = None

    def ask(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """Return the helper's reply, or ``{"limit": reason}``. None repeats the first request.

        Raises CapacityError if a helper cannot start.
        """
        with self._lock:
            helper = self._helper
            if helper is None or not helper.running:
                helper = self._start()
                if self.first_request is not None:
                    reply = self._exchange(helper, self.first_request)
                    if request is None or "limit" in reply or "error" in reply:
                        return reply
            return self._exchange(helper, request or self.first_request or {})

    def close(self) -> None:
        """End the process, also during a request. A later request starts another process."""
        helper = self._helper
        if helper is not None:
            helper.kill()
        with self._lock:
            self._end()

    def _exchange(self, helper: HelperProcess, request: dict[str, Any]) -> dict[str, Any]:
        try:
            body = json.dumps(request).encode()
            answer = helper.exchange(body, self._timeout, MAX_ANSWER_BYTES)
            reply: dict[str, Any] = json.loads(answer)
        except TimeoutError:
            reply = {"limit": f"{self._name} took longer than {self._timeout:g} seconds"}
        except (OSError, EOFError):
            reply = {"limit": self._why_ended(helper)}
        except BaseException:
            self._end()  # an interrupted exchange leaves a stale answer in the pipe
            raise
        if "limit" in reply:
            self._end()
        return reply

    def _why_ended(self, helper: HelperProcess) -> str:
        code = helper.exit_code(1.0) or 0
        if code < 0:  # killed by SIGXCPU, or by SIGKILL on a machine without free memory
            return f"{self._name} used too much processor time or memory"
        return f"the process of {self._name} failed with exit code {code}"

    def _start(self) -> HelperProcess:
        self._end()
        helper = self._helper = HelperProcess(
            f"{__package__}.guarded_worker",
            *self._arguments,
            environment={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            own_session=True,  # Ctrl-C in a terminal must reach the parent only
        )
        return helper

    def _end(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()


class GuardedRenderer(GuardedProcess):
    """Renders templates in a separate, killable process."""

    def __init__(
        self,
        timeout: float = TIMEOUT_S,
        cpu_seconds: int = TEMPLATE_CPU_S,
        memory_bytes: int = TEMPLATE_MEMORY_BYTES,
    ) -> None:
        super().__init__("template", timeout, cpu_seconds, memory_bytes)

    def render(
        self, source: str, variables: Mapping[str, Any], max_output_chars: int = MAX_OUTPUT_CHARS
    ) -> str:
        """Render like :func:`.sandbox.render`; ``variables`` must be JSON values.

        Raises:
            RenderLimit: a limit on size, time or memory was exceeded.
            RenderError: the template is invalid or rejected its variables.
            CapacityError: the process cannot start.

        """
        reply = self.ask(
            {"template": source, "variables": dict(variables), "max_output": max_output_chars}
        )
        if "text" in reply:
            return str(reply["text"])
        if "limit" in reply:
            raise RenderLimit(reply["limit"])
        raise RenderError(reply.get("error", "the template process sent no answer"))


class GuardedTokenizer(GuardedProcess):
    """A :class:`.tokenizer_core.TokenizerCore` whose library runs in another process.

    For tokenizer files outside :mod:`.plain_tokenizers`. Whatever the file does, every call
    returns or raises TokenizerFailed within its time limit. CapacityError: no helper can start.
    """

    def __init__(
        self,
        text: str,
        timeout: float = TIMEOUT_S,
        cpu_seconds: int = TOKENIZER_CPU_S,
        memory_bytes: int = TOKENIZER_MEMORY_BYTES,
        stated: Sequence[StatedToken] = (),
    ) -> None:
        """Load a ``tokenizer.json`` and add the ``stated`` tokens. Raises TokenizerFailed."""
        super().__init__("tokenizer", timeout, cpu_seconds, memory_bytes)
        self.first_request = {"load": text, "stated": list(stated)}
        facts = self._call(None)
        self.vocab_size = int(facts["vocab_size"])
        self.is_byte_level = bool(facts["byte_level"])
        self.added_tokens = [AddedToken(*one) for one in facts["added"]]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        text.encode()  # raises for a lone surrogate, as the library does
        ids: list[int] = self._call({"encode": text, "special": add_special_tokens})["ids"]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        return str(self._call({"decode": list(ids), "skip": skip_special_tokens})["text"])

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry."""
        found: int | None = self._call({"token": token})["id"]
        return found

    def id_to_token(self, index: int) -> str | None:
        """The vocabulary entry of an id."""
        found: str | None = self._call({"id": index})["token"]
        return found

    def _call(self, request: dict[str, Any] | None) -> dict[str, Any]:
        reply = self.ask(request)
        if "limit" in reply or "error" in reply:
            raise TokenizerFailed(reply.get("limit") or reply["error"])
        return reply
