import numpy as np
import pytest

from baton.proto import (
    AudioGenerationMetadata,
    AudioGenerationOutput,
    AudioGenerationResponse,
    GenerationStatus,
    RequestID,
    SchedulerResult,
    TextGenerationOutput,
)

EOS = GenerationStatus.END_OF_SEQUENCE


def test_output():
    output = AudioGenerationOutput(final_status=EOS, steps_executed=3)
    assert output.is_done
    assert (output.audio_data.dtype, output.audio_data.size) == (np.float32, 0)
    assert output.buffer_speech_tokens is None
    assert output == AudioGenerationOutput(final_status=EOS, steps_executed=3)
    assert output != AudioGenerationOutput(
        final_status=EOS, steps_executed=3, audio_data=np.ones(1, np.float32)
    )
    assert output != 3


def test_response():
    empty = AudioGenerationResponse(GenerationStatus.ACTIVE)
    assert (empty.is_done, empty.has_audio_data) == (False, False)
    with pytest.raises(ValueError, match="no audio"):
        _ = empty.audio_data
    full = AudioGenerationResponse(EOS, np.ones(2, np.float32), np.arange(2))
    assert (full.is_done, full.has_audio_data) == (True, True)
    assert full.audio_data.tolist() == [1, 1]
    assert full != empty


def test_metadata_names_what_is_known():
    assert AudioGenerationMetadata().to_dict() == {}
    known = AudioGenerationMetadata(request_id=RequestID("r"), echo="", duration=0.5)
    assert known.to_dict() == {"request_id": "r", "echo": "", "duration": 0.5}


def test_scheduler_results():
    done = TextGenerationOutput(request_id=RequestID("r"), final_status=EOS)
    more = TextGenerationOutput(request_id=RequestID("r"))
    assert (SchedulerResult.create(done).is_done, SchedulerResult.create(more).is_done) == (
        True,
        False,
    )
    assert SchedulerResult.create(done).result is done
    cancelled = SchedulerResult.cancelled()
    assert (cancelled.is_done, cancelled.result, cancelled.error) == (True, None, None)
    failed = SchedulerResult.failed("no room")
    assert (failed.is_done, failed.result, failed.error) == (True, None, "no room")
