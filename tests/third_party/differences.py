"""Where cases of known files end otherwise than for their authors, and why that is right.

A case is excused by its name *and* by the error it ends with, both matched whole: the same case
with another error, and another case with the same error, count as failing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One documented deviation (``id`` as in docs/compatibility.md) as cases show it."""

    id: str
    case: str  # regular expression of the test's name
    error: str  # regular expression of "Type: first line of the message"

    def explains(self, case: str, error: str) -> bool:
        """Whether a case that ended with this error is this deviation."""
        return bool(re.fullmatch(self.case, case) and re.fullmatch(self.error, error))


DIFFERENCES = (
    Difference(
        "V20",
        r"test_output_image_from_numpy_(rgb_float32|grayscale|rgba|with_detail|different_formats)"
        r"|test_output_image_base64_decode"
        r"|test_generation_output_(with_numpy_images|not_done)"
        r"|test_generation_output_serialization(_with_multiple_images)?",
        r"ValueError: pixels must be uint8, not float(32|64)",
    ),
    Difference(
        "Y1",
        r"test_context__spec_decoding_state_(lazy_init|serializable)",
        r"AttributeError: 'TextContext' object has no attribute '_?spec_decoding_state'",
    ),
    Difference(
        "Y2",
        r"test_sampling_params_(eos_token_id_(single_int|list)"
        r"|user_stop_token_ids_override_eos_token_id)",
        r"TypeError: SamplingParamsGenerationConfigDefaults\.__init__\(\) got an unexpected "
        r"keyword argument 'eos_token_id'",
    ),
    Difference(
        "Y3",
        r"test_sampling_params_large_top_k_validation|test_sampling_top_k",
        r"InputError: top_k must be -1 \(all\) or 1 to 255, not (257|300)",
    ),
    Difference(
        "Y4",
        r"test_expand_capacity_with_min_capacity",
        r"AttributeError: TokenBuffer has no _expand_capacity",
    ),
    Difference(
        "Y5",
        r"test_text_and_vision_context_sad_case",
        r"InputError: It is invalid for the current_position \(7\) to bisect an image "
        r"\(ImageMetadata\(start_idx=5, end_idx=9, .*",
    ),
)


def explain(case: str, error: str) -> str | None:
    """Id of the deviation that a case's error is, or None."""
    for difference in DIFFERENCES:
        if difference.explains(case, error):
            return difference.id
    return None
