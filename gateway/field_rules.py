"""What the gateway does with the fields of a body that have no effect here.

A field that would change the answer is refused: see :data:`REFUSED`. A field that cannot change its
tokens is accepted, and named among the ``warnings`` of the response: :data:`IGNORED` and
:data:`RECORDS`. With ``--strict-parameters`` the fields of :data:`IGNORED` are refused too, like
names that are not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Rules = Mapping[str, tuple[tuple[Any, ...], str]]
"""By field: the values that mean what the gateway does anyway, besides None, and the reason."""

REFUSED: Rules = {
    "skip_special_tokens": ((True,), "special tokens are never part of the text"),
    "include_stop_str_in_output": ((False,), "stop strings are never part of the text"),
    "truncate_prompt_tokens": ((), "prompts are not truncated"),
    "use_beam_search": ((False,), "beam search is not offered"),
    "allowed_token_ids": (([],), "use response_format to constrain the answer"),
    "bad_words": (([],), "use response_format to constrain the answer"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "audio": ((), "the model answers with text"),
    "modalities": ((["text"],), "the model answers with text"),
    "web_search_options": ((), "the server has no access to the web"),
    "chat_template": ((), "only the model's own template is rendered"),
    "continue_final_message": ((False,), "the template starts a new message"),
    "documents": (([],), "give documents as messages"),
    "suffix": (("",), "text is not inserted before a suffix"),
    "best_of": ((1,), "use n"),
    "guided_json": ((), "use structured_outputs"),
    "guided_regex": ((), "use structured_outputs"),
    "guided_choice": ((), "use structured_outputs"),
    "guided_grammar": ((), "use structured_outputs"),
    "guided_whitespace_pattern": ((), "use structured_outputs.whitespace_pattern"),
    "structural_tag": ((), "use tools, or structured_outputs.grammar"),
    "logits_processors": (([],), "code is not accepted; use logit_bias"),
    "logprob_token_ids": (([],), "use top_logprobs"),
    "thinking_token_budget": ((), "use max_tokens"),
    "repetition_detection": ((), "use the penalties"),
    "return_tokens_as_token_ids": ((False,), "tokens are shown as text"),
    "return_token_ids": ((False,), "use /tokenize"),
    "vllm_xargs": (({},), "this server takes no extra arguments"),
    "include_reasoning": ((True,), "reasoning is always shown"),
    "mm_processor_kwargs": (({},), "images are prepared with the settings of the model's folder"),
    "media_io_kwargs": (({},), "images are prepared with the settings of the model's folder"),
    "prompt_embeds": ((), "prompts are texts or token ids"),
}
CHAT_REFUSED: Rules = {
    "echo": ((False,), "use /v1/completions for echo"),
    "add_special_tokens": ((False,), "the chat template writes them"),
}
EMBEDDINGS_REFUSED: Rules = {
    "add_special_tokens": ((True,), "the tokenizer adds what the model was trained with"),
    "embed_dtype": (("float32",), "base64 has float32 numbers"),
    "endianness": (("native", "little"), "base64 has the bytes of a number lowest first"),
    "messages": (([],), "give the texts as input"),
    "normalize": ((), "the model's folder decides it"),
    "use_activation": ((), "the model's folder decides it"),
}
EMBEDDINGS_IGNORED: Rules = {
    "cache_salt": ((), "texts to embed share no prefix cache"),
}

IGNORED: Rules = {
    "length_penalty": ((1, 1.0), "beam search is not offered"),
    "priority": ((0,), "requests have no priorities"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "nothing is stored"),
    "prediction": ((), "predicted outputs are not used"),
    "verbosity": (("medium",), "it is a property of OpenAI's models"),
    "request_id": ((), "give it as the header X-Request-Id"),
    "session_id": ((), "the prefix cache needs no session"),
    "guided_decoding_backend": ((), "there is only one"),
    "truncation_side": ((), "prompts are not truncated"),
    "stream_interval": ((1,), "each token is sent as it arrives"),
    "kv_transfer_params": ((), "the cluster transfers the KV itself"),
    "ec_transfer_params": ((), "prefill workers encode the images of their prompts"),
    "prompt_cache_retention": (("in_memory",), "the prefix cache is in memory"),
    "reasoning_effort": ((), "the model's chat template has none"),
}
RECORDS: Mapping[str, str] = {
    "user": "requests are not recorded by user",
    "metadata": "nothing is stored",
    "safety_identifier": "requests are not recorded by user",
    "prompt_cache_key": "the prefix cache finds common prefixes without it",
}
"""Fields for the sender's records, which are accepted with any value."""
