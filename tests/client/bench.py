"""Bench: the core of a client, without sockets and clock."""

from __future__ import annotations

import numpy as np

from baton.client.core import ClientCore
from baton.client.events import (
    Connected,
    Ended,
    NewTokens,
    Received,
    RequestSpec,
    Send,
    Start,
    Tick,
)
from baton.proto.ids import request_key
from baton.proto.wire.messages import Submitted, Terminal, TokenRun, Tokens
from baton.proto.wire.wire_context import WireContext, WireTokens

ME = b"me"

KEY = request_key(ME, "r", 1)

SECRET = b"s" * 16


def spec(request_id="r", deadline=None, prompt=3):
    context = WireContext(tokens=WireTokens(np.arange(prompt, dtype=np.int32)), max_length=50)
    return RequestSpec(request_id=request_id, context=context, deadline=deadline)


class Bench:
    """A core with a clock, and its actions so far."""

    def __init__(self, *addresses, connected=True, reconnect_timeout=30.0):
        addresses = addresses or ("ipc:///x",)
        self.core = ClientCore(*addresses, connect_timeout=5.0, reconnect_timeout=reconnect_timeout)
        self.now = 100.0
        if connected:
            self.do(Connected(ME))

    def do(self, event):
        actions = self.core.handle(event, self.now)
        self.sent = [a.message for a in actions if isinstance(a, Send)]
        self.tokens = [t for a in actions if isinstance(a, NewTokens) for t in a.tokens]
        self.ended = [a for a in actions if isinstance(a, Ended)]
        self.actions = actions
        return actions

    def hear(self, message):
        return self.do(Received(message))

    def run(self, position, tokens, attempt=1, logprobs=None):
        return self.hear(Tokens(runs=[TokenRun(KEY, attempt, position, tokens, logprobs)]))

    def later(self, seconds, step=0.05):
        """Tick for so long, and return all actions."""
        done = []
        until = self.now + seconds
        while self.now < until:
            self.now += step
            done += self.do(Tick())
        return done

    def open(self):
        self.do(Start(spec()))
        self.hear(Submitted(request_id="r", request=KEY, secret=SECRET))

    def finish(self, position, **kwargs):
        return self.hear(
            Terminal(request=KEY, status="maximum_length", position=position, **kwargs)
        )


def messages(actions, kind):
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]
