"""A decider by prompt length, as other clusters have: long prompts go to prefill workers.

baton serve --mode adaptive --decider length_decider:LengthDecider
python -m baton.simulator --decider length_decider:LengthDecider
"""

import os

from baton.extend import Ways


class LengthDecider:
    """Uses a prefill worker if more tokens than THRESHOLD are not cached at the decode worker."""

    def __init__(self) -> None:
        self._threshold = int(os.environ.get("THRESHOLD", "512"))

    def local(self, ways: Ways) -> bool:
        """Return True if the decode worker computes the prompt."""
        return ways.local_uncached_tokens <= self._threshold
