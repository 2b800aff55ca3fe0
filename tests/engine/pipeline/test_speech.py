"""Speech through ``next_chunk``: a text model whose tokens are audio tokens, and a codec."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from baton.deploy.config import demo_speech_folder
from baton.engine.audio.chunks import AudioDecoder, chunk_end
from baton.engine.audio.snac import SnacDecoder
from baton.engine.kernels.load import load_backend
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.pipeline import SpeechPipeline
from baton.proto.contexts.speech import TTSContext
from baton.proto.contexts.status import GenerationStatus
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.errors import CheckpointError, InputError
from baton.proto.sampling import SamplingParams

DATA = Path(__file__).resolve().parents[2] / "data"
CODEC = DATA / "codecs" / "snac"
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.2, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def runner():
    return load_runner(RunnerConfig(model=str(DATA / "checkpoints" / "llama"), num_blocks=256))


@pytest.fixture(scope="module")
def audio():
    return AudioDecoder(SnacDecoder(CODEC, load_backend()), 16)


@pytest.fixture
def speech(runner, audio):
    return SpeechPipeline(runner.pipeline, audio)


def context(prompt, new, params=SAMPLED, **more):
    tokens = np.asarray(prompt, np.int64)
    return TTSContext(
        max_length=len(tokens) + new,
        tokens=TokenBuffer(tokens),
        sampling_params=params,
        **more,
    )


def speak(speech, contexts):
    """Return the chunks of each context, from batches of all that have not ended."""
    chunks = [[] for _ in contexts]
    while batch := {c.request_id: c for c in contexts if not c.is_done}:
        outputs = speech.next_chunk(batch)
        for found, one in zip(chunks, contexts, strict=True):
            if one.request_id in batch:
                found.append(outputs[one.request_id])
    return chunks


def joined(outputs):
    return np.concatenate([output.audio_data for output in outputs])


def whole(audio, one):
    """Return the audio of all of a context's tokens, decoded at once."""
    entries = audio.layout.entries(one.tokens.all[one.prompt_length :])
    frames = len(entries) // 7
    return audio.codec.decode(audio.layout.by_codebook(entries[: frames * 7]))


def same(audio, ours, theirs):
    if audio.codec.backend.row_independent:
        assert np.array_equal(ours, theirs)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_the_chunks_are_the_audio_of_the_tokens(speech, audio):
    one = context(range(4, 20), 250)
    outputs = speak(speech, [one])[0]
    expected = whole(audio, one)
    assert len(expected) > 25 * 96
    same(audio, joined(outputs), expected)
    assert [o.final_status for o in outputs[:-1]] == [GenerationStatus.ACTIVE] * (len(outputs) - 1)
    assert outputs[-1].final_status == GenerationStatus.MAXIMUM_LENGTH
    assert [o.metadata.final_chunk for o in outputs].count(True) == 1
    starts = [o.metadata.chunk_id for o in outputs]
    assert starts[1:] == [chunk_end(start) for start in starts[:-1]]
    assert sum(o.steps_executed for o in outputs) == len(one.speech_tokens)
    assert speech.decoder_sample_rate == 8000
    speech.release(one)


def test_the_first_chunk_comes_after_a_frame_and_its_context(speech, audio):
    one = context(range(4, 20), 250)
    (output,) = speech.next_chunk({one.request_id: one}).values()
    wanted = (1 + audio.codec.context_frames) * 7
    assert len(one.speech_tokens) == wanted == output.steps_executed == speech.prev_num_steps
    assert len(output.audio_data) == 96
    assert one.decoded_index == 7
    speech.release(one)


def test_a_batch_gives_each_request_its_own_audio(runner, audio):
    asked = [(range(4, 20), 120, GREEDY), (range(30, 33), 77, SAMPLED), (range(9, 60), 31, SAMPLED)]
    alone = []
    for arguments in asked:
        one = context(*arguments)
        alone.append(joined(speak(SpeechPipeline(runner.pipeline, audio), [one])[0]))
    together = speak(SpeechPipeline(runner.pipeline, audio), [context(*a) for a in asked])
    for outputs, expected in zip(together, alone, strict=True):
        same(audio, joined(outputs), expected)
    assert len(alone[0]) > len(alone[2])


@pytest.mark.parametrize("kept", [1, 50, 110, 149])
@pytest.mark.parametrize("frames", [0, 3, 7])
def test_a_replay_continues_with_the_same_samples(runner, audio, kept, frames):
    """A context that has tokens and a ``decoded_index`` from elsewhere yields the rest alone."""
    first = context(range(4, 20), 150)
    samples = joined(speak(SpeechPipeline(runner.pipeline, audio), [first])[0])
    tokens = first.tokens.all
    again = context(range(4, 20), 150, decoded_index=min(frames, kept // 9) * 7)
    for token in tokens[16 : 16 + kept].tolist():
        again.update(token)
    rest = joined(speak(SpeechPipeline(runner.pipeline, audio), [again])[0])
    same(audio, rest, samples[min(frames, kept // 9) * 96 :])
    assert again.tokens.all.tolist() == tokens.tolist()


def test_too_few_tokens_for_a_frame_are_no_audio(speech):
    one = context(range(4, 20), 5)
    (output,) = speech.next_chunk({one.request_id: one}).values()
    assert output.is_done
    assert output.metadata.final_chunk
    assert len(output.audio_data) == 0


def test_a_decoded_index_inside_a_frame_is_refused(speech):
    one = context(range(4, 20), 50, decoded_index=3)
    with pytest.raises(InputError, match="multiple of 7"):
        speech.next_chunk({one.request_id: one})


def test_audio_tokens_outside_the_vocabulary_are_refused(runner):
    decoder = AudioDecoder(SnacDecoder(CODEC, load_backend()), 33)
    with pytest.raises(CheckpointError, match="257, after the model's vocabulary of 256"):
        SpeechPipeline(runner.pipeline, decoder)


def test_the_codec_is_part_of_the_fingerprint(tmp_path):
    """Workers with other codecs refuse each other's handoffs, so no stream changes its voice."""
    cards = [load_runner(RunnerConfig(model=str(demo_speech_folder()), num_blocks=4)).card]
    for name in ("weights", "config", "speech"):
        folder = shutil.copytree(demo_speech_folder(), tmp_path / name)
        weights, config = folder / "snac" / "model.safetensors", folder / "snac" / "config.json"
        if name == "weights":
            content = bytearray(weights.read_bytes())
            content[-1] ^= 1
            weights.write_bytes(content)
        elif name == "config":
            changed = json.loads(config.read_bytes()) | {"sampling_rate": 8000}
            config.write_text(json.dumps(changed))
        else:
            speech = json.loads((folder / "speech.json").read_bytes())
            speech["first_token"] -= 1
            (folder / "speech.json").write_text(json.dumps(speech))
        model = RunnerConfig(model=str(folder), num_blocks=4, name=cards[0].name)
        cards.append(load_runner(model).card)
    for number, card in enumerate(cards):
        assert card.mismatch(card) is None
        for other in cards[:number]:
            assert card.mismatch(other) == ("fingerprint", card.fingerprint, other.fingerprint)
    weights.unlink()
    with pytest.raises(CheckpointError, match="snac"):
        load_runner(RunnerConfig(model=str(folder), num_blocks=4))
