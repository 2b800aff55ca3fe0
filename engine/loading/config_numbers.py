"""Types of the floating-point numbers in the configs of models: bounded, so never NaN or infinite.

msgspec names the key of a number outside its bounds. Python's JSON reader takes NaN, Infinity and
1e999, and float32 has no larger numbers than 3.4e38.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Epsilon = Annotated[float, Meta(ge=0, le=1)]
"""Added to a variance before its root is taken."""
Positive = Annotated[float, Meta(ge=1e-30, le=1e30)]
Finite = Annotated[float, Meta(ge=-1e30, le=1e30)]
