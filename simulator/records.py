"""A request of a simulated cluster, as its user sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from baton.client import events as client
from baton.proto.wire.wire_context import WireContext, WirePixelContext, WireSampling, WireTokens

from .toy_model import EOS, MAX_LENGTH

FINISHED = ("end_of_sequence", "maximum_length")
"""The final statuses of a complete answer."""


@dataclass(slots=True)
class Record:
    """One request as its user sees it; ``deadline`` in seconds from its start."""

    request_id: str
    prompt: list[int]
    max_new_tokens: int
    deadline: float | None = None
    endpoint: str | None = None
    pin: str = "prefer"
    fallback: bool = False
    poison: bool = False
    schema: str | None = None
    embed: bool = False  # requests an embedding
    draws: bool = False  # requests a picture, with a step for each of ``max_new_tokens``
    mute: bool = False  # the model returns no embedding for this text
    started: float = 0.0
    tokens: list[int] = field(default_factory=list)
    ends: list[client.Ended] = field(default_factory=list)
    ended_at: float = 0.0
    heard_at: float = 0.0
    longest_wait: float = 0.0  # longest time without a token or the end, seconds
    stopped: bool = False  # cancelled by the user
    orphaned: bool = False  # its client died, so no process waits for it

    @property
    def done(self) -> bool:
        """True if no client waits for this request any more."""
        return bool(self.ends) or self.orphaned

    def spec(self) -> client.RequestSpec:
        """Return the request as the user submits it."""
        if self.embed:
            context = WireContext(
                tokens=WireTokens(np.array(self.prompt, np.int32)),
                max_length=len(self.prompt),
                target_endpoint=self.endpoint,
                task="embed",
            )
            return self._spec(context)
        if self.draws:
            return self._spec(self.picture())
        context = WireContext(
            tokens=WireTokens(np.array(self.prompt, np.int32)),
            max_length=MAX_LENGTH,
            sampling=WireSampling(temperature=0.0, max_new_tokens=self.max_new_tokens),
            eos_token_ids=[EOS],
            target_endpoint=self.endpoint,
            json_schema=self.schema,
        )
        return self._spec(context)

    def picture(self) -> WirePixelContext:
        """Return the request for a picture of the prompt, with a step per new token."""
        ids = WireTokens(np.array(self.prompt, np.int32))
        return WirePixelContext(
            tokens=ids,
            tokens_2=ids,
            extra_params={
                "seed": np.array([self.max_new_tokens]),
                "previews": np.array([len(self.prompt) % 4]),
            },
            height=16,
            width=16 * (1 + len(self.prompt) % 8),
            num_inference_steps=self.max_new_tokens,
            target_endpoint=self.endpoint,
        )

    def _spec(self, context: WireContext) -> client.RequestSpec:
        return client.RequestSpec(
            request_id=self.request_id,
            context=context,
            deadline=self.deadline,
            pin=self.pin,
            fallback=self.fallback,
            whole=self.max_new_tokens % 2 == 0,
        )
