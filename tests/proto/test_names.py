"""All names of the reference pages can be imported from one place and are documented."""

import dataclasses
from pathlib import Path

import pytest

import baton.proto as proto

ROOT = Path(__file__).parents[2]
NAMES = [
    "TextContext",
    "TextAndVisionContext",
    "TTSContext",
    "PixelContext",
    "TokenBuffer",
    "Range",
    "ImageMetadata",
    "FUTURE_TOKEN",
    "GenerationStatus",
    "RequestID",
    "SamplingParams",
    "SamplingParamsInput",
    "SamplingParamsGenerationConfigDefaults",
    "LogProbabilities",
    "TextGenerationOutput",
    "GenerationOutput",
    "OutputImageContent",
    "AudioGenerationOutput",
    "AudioGenerationResponse",
    "AudioGenerationMetadata",
    "InputError",
    "reserve_token_space_for_batch",
    "validate_requires_vision_context",
    "validate_only_one_image",
    "validate_initial_prompt_has_image",
    "validate_aspect_ratio_args",
    "validate_image_shape_5d",
    "validate_image_grid_thw_args",
    "validate_vision_position_ids",
    "msgpack_numpy_encoder",
    "msgpack_numpy_decoder",
    "SchedulerResult",
    "TextGenerationInputs",
    "BatchType",
    "AudioGenerator",
    "EmbeddingsGenerator",
]
EARLIER = {
    "TextContext": """start_idx active_idx end_idx current_length active_length all_tokens
        next_tokens prompt_tokens generated_tokens committed_idx is_ce set_token_indices
        bump_token_indices rollback jump_ahead assign_to_cache unassign_from_cache
        is_assigned_to_cache cache_seq_id outstanding_completion_tokens set_draft_offset
        update_status lora_name""",
    "TTSContext": """speech_token_status update_speech_token_status
        update_audio_generation_status set_decoded_index has_undecoded_speech_tokens
        speech_tokens block_counter next_speech_tokens update_speech_tokens""",
    "TextAndVisionContext": "pixel_values needs_vision_encoding",
    "AudioGenerationResponse": "is_done has_audio_data audio_data buffer_speech_tokens",
}


@pytest.mark.parametrize("name", NAMES)
def test_is_exported(name):
    assert name in proto.__all__
    assert hasattr(proto, name)


@pytest.mark.parametrize("name", EARLIER)
def test_has_its_earlier_names(name):
    for attribute in EARLIER[name].split():
        assert hasattr(getattr(proto, name), attribute), attribute


@pytest.mark.parametrize(
    "name",
    ["TextContext", "TextAndVisionContext", "TTSContext", "PixelContext", "TokenBuffer",
     "ImageMetadata"],
)  # fmt: skip
def test_is_a_dataclass_with_value_equality_and_no_hash(name):
    cls = getattr(proto, name)
    assert dataclasses.is_dataclass(cls)
    assert cls.__eq__ is not object.__eq__
    assert cls.__hash__ is None


def test_the_page_names_every_deviation_and_its_test():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    tests = "".join(file.read_text() for file in sorted((ROOT / "tests").rglob("test_*.py")))
    for number in range(1, 22):
        assert f"| V{number} |" in page
        assert (f"def test_v{number}_" in tests) == (f"`test_v{number}_" in page), number
    for name in NAMES:
        assert name in page or name.startswith("validate_"), name
