"""Calls written for the pages work with the pages' keyword names."""

import inspect
from pathlib import Path

import pytest

import baton.engine.pipeline
from baton.engine.models.bert import BertModel
from baton.engine.models.decoder import Decoder

from .names import reference_names

NAMES = reference_names() | {
    name: getattr(baton.engine.pipeline, name) for name in baton.engine.pipeline.__all__
}
NAMES |= {"Decoder": Decoder, "BertModel": BertModel}

PIPELINE_MODEL = """
    execute: model_inputs
    prepare_initial_token_inputs: context_batch
    prepare_next_token_inputs: next_tokens prev_model_inputs
    compute_log_probabilities: model_inputs model_outputs next_tokens batch_top_n batch_echo
    estimate_memory_footprint:
"""
KV_CACHE = """
    estimate_kv_cache_size: available_cache_memory
    load_kv_manager: session available_cache_memory
"""
TEXT = """
    apply_processing_offset: offset
    assign_to_cache: cache_seq_id
    bump_token_indices: start_idx active_idx end_idx committed_idx
    compute_num_available_steps: max_seq_len
    get_min_token_logit_mask: num_steps
    jump_ahead: new_token
    outstanding_completion_tokens:
    realize_future_token: new_token log_probabilities
    reset:
    rollback: idx
    set_draft_offset: idx
    set_matcher: matcher
    set_token_indices: start_idx active_idx end_idx committed_idx
    to_generation_output:
    unassign_from_cache:
    update: new_token log_probabilities
    update_status: status
    update_with_future_token:
"""
TEXT_FIELDS = """max_length tokens request_id eos_token_ids eos_sequences log_probabilities
    log_probabilities_echo ignore_eos json_schema sampling_params model_name _matcher status
    _log_probabilities_data _is_initial_prompt _draft_offset target_endpoint"""
FILTERS = "temperature top_k top_p repetition_penalty max_new_tokens min_new_tokens"
SAMPLING = f"""{FILTERS} min_p frequency_penalty presence_penalty ignore_eos stop stop_token_ids
    detokenize seed logits_processors"""

PAGES = {
    "TextContext": f"__init__: {' '.join(TEXT_FIELDS.split())}\n{TEXT}",
    "TextAndVisionContext": f"""
        __init__: {" ".join(TEXT_FIELDS.split())} vision_token_ids images extra_model_args
        __init__: pixel_values
        compute_image_aligned_idx: idx
        {TEXT}""",
    "TTSContext": f"""
        __init__: {" ".join(TEXT_FIELDS.split())} audio_prompt_tokens buffer_speech_tokens
        __init__: audio_buffer prev_samples_beyond_offset streaming _speech_token_size
        __init__: _speech_token_end_idx _speech_tokens decoded_index _block_counter _arrival_time
        __init__: audio_generation_status
        has_undecoded_speech_tokens: exclude_last_n
        next_speech_tokens: audio_chunk_size buffer
        set_decoded_index: idx
        update_audio_generation_status: status
        update_speech_token_status: status
        update_speech_tokens: new_tokens
        {TEXT}""",
    "PixelContext": """
        __init__: tokens request_id model_name mask tokens_2 negative_tokens negative_tokens_2
        __init__: extra_params timesteps sigmas latents latent_image_ids height width guidance
        __init__: num_inference_steps guidance_scale true_cfg_scale num_warmup_steps
        __init__: num_images_per_prompt status
        compute_num_available_steps: max_seq_len
        reset:
        to_generation_output:
        update: latents""",
    "TokenBuffer": """
        __init__: array
        advance_chunk:
        advance_with_token: token mark_previous_as_processed
        apply_processing_offset: value
        chunk: chunk_size
        consume_recently_generated_tokens:
        overwrite_last_token: token
        reset_as_new_prompt: delete_last_generated_token
        rewind_processing: n
        skip_processing: n""",
    "Range": """
        __init__: start end
        advance:
        bump_end: amount
        bump_start: amount""",
    "ImageMetadata": "__init__: start_idx end_idx pixel_values image_hash",
    "RequestID": "__init__: value",
    "SamplingParams": f"""
        __init__: {" ".join(SAMPLING.split())}
        from_input_and_generation_config: input_params sampling_params_defaults""",
    "SamplingParamsInput": f"__init__: {' '.join(SAMPLING.split())}",
    "SamplingParamsGenerationConfigDefaults": f"__init__: {FILTERS} do_sample",
    "LogProbabilities": "__init__: token_log_probabilities top_log_probabilities",
    "TextGenerationOutput": """
        __init__: request_id tokens final_status log_probabilities
        merge: outputs""",
    "GenerationOutput": "__init__: request_id final_status output",
    "OutputImageContent": """
        __init__: type image_url image_data format detail
        from_numpy: array format detail""",
    "AudioGenerationResponse": "__init__: final_status audio buffer_speech_tokens",
    "AudioGenerationOutput": """
        __init__: final_status steps_executed audio_data buffer_speech_tokens metadata""",
    "AudioGenerationMetadata": """
        __init__: sample_rate duration chunk_id timestamp final_chunk model_name request_id
        __init__: tokens_generated processing_time echo
        to_dict:""",
    "SchedulerResult": """
        __init__: is_done result
        cancelled:
        create: result""",
    "TextGenerationInputs": "__init__: batches num_steps",
    "reserve_token_space_for_batch": ": batch num_tokens",
    "msgpack_numpy_encoder": ": use_shared_memory shared_memory_threshold",
    "msgpack_numpy_decoder": ": type_ copy",
    "validate_requires_vision_context": ": context",
    "validate_only_one_image": ": context",
    "validate_initial_prompt_has_image": ": context",
    "validate_aspect_ratio_args": ": context",
    "validate_image_shape_5d": ": context",
    "validate_image_grid_thw_args": ": context",
    "validate_vision_position_ids": ": context",
    "AudioGenerator": "next_chunk: batch\nrelease: context",
    "EmbeddingsGenerator": "encode: batch",
    "ModelOutputs": "__init__: next_token_logits logits",
    "PipelineModel": PIPELINE_MODEL,
    "KVCacheMixin": KV_CACHE,
    "TextGenerationPipeline": "next_token: batch num_steps\nrelease: context",
    "Decoder": PIPELINE_MODEL + KV_CACHE,
    "BertModel": PIPELINE_MODEL + KV_CACHE,
}
"""Per name of the pages its callables, each with the keywords the pages give it."""

REFUSED = {
    "PipelineModel": ("pipeline_config", "session"),
    "TextGenerationPipeline": ("pipeline_config", "pipeline_model", "eos_token_id"),
}
"""Constructors that have another form here, listed in docs/compatibility.md."""


@pytest.mark.parametrize("name", PAGES)
def test_callables_of_the_pages_take_the_keywords_of_the_pages(name):
    missing = {}
    for line in filter(str.strip, PAGES[name].splitlines()):
        method, _, keywords = line.partition(":")
        method = method.strip()
        called = getattr(NAMES[name], method) if method else NAMES[name]
        refused = [word for word in keywords.split() if word not in keywords_of(called)]
        if refused:
            missing[method] = refused
    assert not missing


def keywords_of(called):
    parameters = inspect.signature(called).parameters.values()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


@pytest.mark.parametrize("name", REFUSED)
def test_a_constructor_of_another_form_is_refused_and_documented(name):
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
    keywords = REFUSED[name]
    assert f"`{name}({', '.join(f'{word}=' for word in keywords)})`" in page
    with pytest.raises(
        TypeError, match=keywords[0] if name == "TextGenerationPipeline" else "arguments"
    ):
        NAMES[name](**dict.fromkeys(keywords))
