"""The defaults of transformers for keys missing in a config.json, by architecture.

tests/oracle/make_defaults.py writes family_defaults.json from transformers' own classes. The key ""
has the keys at the top level, the others those of nested objects (``text_config``,
``vision_config``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    transformers: str
    defaults: dict[str, dict[str, dict[str, Any]]]


_TABLE = msgspec.json.decode(
    Path(__file__).with_name("family_defaults.json").read_bytes(), type=_Table
)
FAMILY_DEFAULTS = _TABLE.defaults
TRANSFORMERS = _TABLE.transformers
"""The version of the classes."""
PHI3 = "Phi3ForCausalLM"
"""The architecture with other rope settings."""
