"""What a body asks for besides its prompt and its seed.

Most requests of a client differ in nothing else, so the result of the checks is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

from msgspec import inspect
from msgspec.structs import astuple

from baton.client.options import RequestOptions, check_options
from baton.proto.errors import InputError
from baton.proto.sampling import SamplingParams, SamplingParamsGenerationConfigDefaults

from .bodies import ChatBody, CompletionBody, GenerationBody
from .grammars import constraint_of
from .parameters import (
    content_of,
    options_of,
    renamed,
    sampling_of,
    seed_of,
    shared_sampling,
    whitespace_of,
)

_MOST_KNOWN = 1024
_APART = ("model", "prompt", "messages", "seed", "stream_options")
"""Fields that :class:`Asked` does not depend on; fields of any type are ignored or refused."""
_known: dict[object, Asked] = {}


def _reader(kind: type[GenerationBody]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function for the values that decide what a body of this type asks for."""
    fields = cast(inspect.StructType, inspect.type_info(kind)).fields
    return itemgetter(
        *(
            at
            for at, field in enumerate(fields)
            if field.name not in _APART and not isinstance(field.type, inspect.AnyType)
        )
    )


_KINDS: tuple[type[GenerationBody], ...] = (ChatBody, CompletionBody)
_readers: dict[type[GenerationBody], Callable[[Any], tuple[Any, ...]]] = {
    kind: _reader(kind) for kind in _KINDS
}


@dataclass(slots=True, frozen=True)
class Asked:
    """``options``: checked options of the native requests.

    ``answers``: whether new tokens are wanted. ``top``: the number of most likely tokens to show
    per token; None: no log-probabilities. ``shared``: sampling parameters without a seed; None:
    they have lists. ``defaults``: of the model.
    """

    options: RequestOptions
    answers: bool
    top: int | None
    shared: SamplingParams | None
    defaults: SamplingParamsGenerationConfigDefaults

    @classmethod
    def of(cls, body: GenerationBody, defaults: SamplingParamsGenerationConfigDefaults) -> Asked:
        """Return what a body asks for. Raises ParameterError."""
        kind = type(body)
        # The result refers to the defaults, so no other defaults get this id.
        key = (kind, id(defaults), _readers[kind](astuple(body)))
        try:
            known = _known.get(key)
        except TypeError:  # a list or a map has no hash
            return cls._made(body, defaults)
        if known is None:
            known = _known[key] = cls._made(body, defaults)
            if len(_known) > _MOST_KNOWN:
                del _known[next(iter(_known))]
        return known

    @classmethod
    def _made(cls, body: GenerationBody, defaults: SamplingParamsGenerationConfigDefaults) -> Asked:
        options = options_of(body)
        options["whole"] = not body.stream
        options["show_text"] = True
        if isinstance(body, CompletionBody):  # of a chat, they depend on the prompt
            options |= constraint_of(content_of(body), whitespace=whitespace_of(body))
        try:
            checked = check_options(options)
        except InputError as error:
            raise renamed(error, body.__struct_fields__) from None
        return cls(
            options=checked,
            answers=body.answers,
            top=body.shown_log_probs(),
            shared=shared_sampling(body, defaults),
            defaults=defaults,
        )

    def sampling(self, body: GenerationBody, index: int) -> SamplingParams:
        """Return the parameters of answer ``index`` of ``n``. Raises ParameterError."""
        if self.shared is None:
            return sampling_of(body, index, self.defaults)
        return self.shared.seeded(seed_of(body, index))
