"""An order of waiting prompts: shortest work first, but a prompt ages while it waits.

baton serve --prefill-order short_first:ShortFirst
python -m baton.simulator --prefill-order short_first:ShortFirst
"""

from baton.extend import Prompt

AGING = 2.0
"""A prompt passes one that came a second later if it takes at most this many seconds more."""


class ShortFirst:
    """Ranks prompts by the seconds that they will take."""

    def rank(self, prompt: Prompt) -> float:
        """Return seconds of work, and of the time of arrival."""
        work = (prompt.prompt_tokens - prompt.cached_tokens) * prompt.seconds_per_token
        return work + AGING * prompt.asked_s
