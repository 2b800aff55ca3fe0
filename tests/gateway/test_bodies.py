"""Bodies: each field is used, or refused with its name; wrong values name the field."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.client.options import check_options
from baton.gateway import bodies, images_route, responses_route, routes, speech_route, text_routes
from baton.gateway.bodies import (
    TEMPLATE_FIELDS,
    BodyReader,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    GenerationBody,
    TokenizeBody,
)
from baton.gateway.errors import ParameterError, error_json, status_of
from baton.gateway.field_rules import (
    CHAT_REFUSED,
    EMBEDDINGS_IGNORED,
    EMBEDDINGS_REFUSED,
    IGNORED,
    RECORDS,
    REFUSED,
)
from baton.gateway.grammars import Content, constraint_of
from baton.gateway.images_route import IMAGES_IGNORED, IMAGES_REFUSED
from baton.gateway.messages import messages_of
from baton.gateway.parameters import (
    content_of,
    list_of,
    named,
    options_of,
    sampling_of,
    whitespace_of,
)
from baton.gateway.responses_bodies import RESPONSES_IGNORED, RESPONSES_REFUSED, ResponsesBody
from baton.gateway.tools import tools_of
from baton.proto.errors import DuplicateRequest, InputError, PromptTooLong, SchemaTooComplex
from baton.proto.sampling import SamplingParams, SamplingParamsGenerationConfigDefaults

MESSAGES = [{"role": "user", "content": "hello"}]
READERS = {kind: BodyReader(kind) for kind in (CompletionBody, EmbeddingBody)}
READERS[ChatBody] = BodyReader(ChatBody, CHAT_REFUSED)
DEFAULTS = SamplingParamsGenerationConfigDefaults()


def read(kind, fields, *, strict=False):
    own = {"messages": MESSAGES} if kind is ChatBody else {"prompt": "hello"}
    return READERS[kind].read(json.dumps({**own, **fields}).encode(), strict=strict)


def chat(**fields) -> ChatBody:
    return read(ChatBody, fields)[0]


def completion(**fields) -> CompletionBody:
    return read(CompletionBody, fields)[0]


@pytest.mark.parametrize(
    ("fields", "parameter", "said"),
    [
        ({"foo": 1}, "foo", "foo is not a known parameter"),
        ({"temperature": "hot"}, "temperature", "expected number or null, got string"),
        ({"temperature": True}, "temperature", "got boolean"),
        ({"max_tokens": 0}, "max_tokens", "expected integer >= 1, not 0$"),
        ({"max_tokens": -(1 << 62)}, "max_tokens", ">= 1, not -4611686018427387904$"),
        ({"max_tokens": 2.5}, "max_tokens", "expected integer or null, got number"),
        ({"n": 17}, "n", "<= 16, not 17$"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "<= 20, not 21$"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids[1]", ">= 0, not -1$"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": "hello"}, "messages", "got str"),
        ({"stream_options": {"foo": 1}}, "stream_options.foo", "not a known parameter"),
        ({"response_format": {}}, "response_format.type", "is missing"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "must be one of json_object, json_schema, text, not 'xml'",
        ),
        ({"stop": [1]}, "stop[0]", "got int"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(fields, parameter, said):
    with pytest.raises(ParameterError, match=said.replace("[", r"\[")) as raised:
        read(ChatBody, fields, strict=True)
    assert raised.value.parameter.startswith(parameter.split("[", maxsplit=1)[0])
    if "not a known" not in said:
        with pytest.raises(ParameterError):
            read(ChatBody, fields)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"1", b"\xff", b'{"a":' * 5000, b"null"])
def test_what_is_no_body_is_an_input_error(content):
    with pytest.raises(InputError):
        READERS[ChatBody].read(content)


def test_a_missing_field_is_named():
    with pytest.raises(ParameterError, match="messages is missing"):
        READERS[ChatBody].read(b"{}")


def kind_of(name):
    kinds = [kind for kind in (ChatBody, CompletionBody) if name in kind.__struct_fields__]
    assert kinds, f"{name} is in no body"
    return kinds[0]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_field_that_would_change_the_answer_is_refused_unless_it_is_neutral(name):
    for value in (None, *REFUSED[name][0]):
        assert read(kind_of(name), {name: value})[1] == []
    for value in ("something", 0.5):
        with pytest.raises(ParameterError, match=f"{name} is not supported: ") as raised:
            read(kind_of(name), {name: value})
        assert raised.value.parameter == name


@pytest.mark.parametrize("name", sorted(IGNORED))
@pytest.mark.parametrize("value", ["something", 0.5, {"a": [1]}, [{}]], ids=str)
def test_a_field_that_changes_no_token_is_named_among_the_warnings(name, value):
    neutral, reason = IGNORED[name]
    for one in (None, *neutral):
        for strict in (True, False):
            assert read(kind_of(name), {name: one}, strict=strict)[1] == []
    found = read(kind_of(name), {name: value})[1]
    assert found == ([] if name in TEMPLATE_FIELDS else [f"{name} is ignored: {reason}"])
    with pytest.raises(ParameterError, match=f"{name} is not supported: {reason}"):
        read(kind_of(name), {name: value}, strict=True)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_a_field_for_records_is_accepted_with_any_value(name):
    for value in ("x", 5, {"a": 1}):
        for kind in (ChatBody, CompletionBody):
            assert read(kind, {name: value})[1] == [f"{name} is ignored: {RECORDS[name]}"]
            assert read(kind, {name: value}, strict=True)[1] == []


def test_unknown_fields_are_named_among_the_warnings():
    fields = {"foo": 1, "bar": None, "stream_options": {"include_usage": True, "pad": 1},
              "temperature": 0.5, "x" * 500: 1}  # fmt: skip
    body, warnings = read(ChatBody, fields)
    assert (body.temperature, body.stream_options.include_usage) == (0.5, True)
    known = " is ignored: it is not a known parameter"
    names = ["foo", "bar", "stream_options.pad", "x" * 80]
    assert sorted(warnings) == sorted(name + known for name in names)
    with pytest.raises(ParameterError, match="temperature"):
        read(ChatBody, {**fields, "temperature": "hot"})
    for fields in ({f"x{at}": 1 for at in range(65)},
                   {"stream_options": {f"x{at}": 1 for at in range(17)}}):  # fmt: skip
        with pytest.raises(ParameterError, match="not a known parameter"):
            read(ChatBody, fields)
    body, _ = read(ChatBody, {"foo": 1, "temperature": 1, "logit_bias": {"5": 1}, "top_p": 0.5})
    assert (body.temperature, body.logit_bias) == (1.0, {"5": 1.0})


def test_what_the_58_fields_of_clients_get():
    """Of these fields 21 were refused, which ended every request of some clients."""
    sent = {
        "store": True, "reasoning_effort": "low", "verbosity": "low", "priority": 5,
        "metadata": {"a": "b"}, "service_tier": "flex", "user": "u", "safety_identifier": "s",
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "prediction": {"type": "content"},
        "include": ["reasoning.encrypted_content"], "extra_body": {}, "drop_params": True,
    }  # fmt: skip
    warned = {one.split(" ")[0] for one in read(ChatBody, sent)[1]}
    assert warned == sent.keys() - {"reasoning_effort"}


def test_every_field_of_a_generation_is_used_or_refused():
    """A field that is neither in the code that uses fields nor in the table does nothing."""
    used = {
        "model", "user", "metadata", "stream", "stream_options", "n", "temperature", "top_p",
        "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
        "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed", "logit_bias",
        "response_format", "structured_outputs", "cache_salt", "slo_ttft", "slo_itl", "messages",
        "max_completion_tokens", "logprobs",
        "top_logprobs", "chat_template_kwargs", "add_generation_prompt", "prompt", "echo",
        "add_special_tokens", "tools", "tool_choice", "parallel_tool_calls",
        "prompt_cache_key", "prompt_logprobs", "safety_identifier", "spaces_between_special_tokens",
    }  # fmt: skip
    for kind in (GenerationBody, ChatBody, CompletionBody):
        assert set(kind.__struct_fields__) <= used | {*REFUSED, *CHAT_REFUSED, *IGNORED, *RECORDS}


OPENAI = """model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop
    stream stream_options temperature top_p user"""
OPENAI_CHAT = """messages audio function_call functions max_completion_tokens metadata modalities
    parallel_tool_calls prediction prompt_cache_key prompt_cache_retention reasoning_effort
    response_format safety_identifier service_tier store tool_choice tools top_logprobs verbosity
    web_search_options"""
VLLM = """top_k min_p repetition_penalty length_penalty use_beam_search stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    allowed_token_ids bad_words logprob_token_ids add_special_tokens response_format
    structured_outputs guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
    guided_whitespace_pattern structural_tag priority request_id cache_salt kv_transfer_params
    return_tokens_as_token_ids return_token_ids logits_processors vllm_xargs repetition_detection
    stream_interval session_id ec_transfer_params thinking_token_budget"""
VLLM_CHAT = """echo add_generation_prompt continue_final_message documents chat_template
    chat_template_kwargs mm_processor_kwargs media_io_kwargs include_reasoning"""
OPENAI_EMBEDDINGS = "input model dimensions encoding_format user"
VLLM_EMBEDDINGS = """truncate_prompt_tokens truncation_side add_special_tokens embed_dtype
    endianness normalize use_activation messages mm_processor_kwargs cache_salt priority
    request_id"""
DOCUMENTED = {
    ChatBody: f"{OPENAI} {OPENAI_CHAT} {VLLM} {VLLM_CHAT}",
    CompletionBody: f"{OPENAI} {VLLM} prompt best_of echo suffix prompt_embeds",
    EmbeddingBody: f"{OPENAI_EMBEDDINGS} {VLLM_EMBEDDINGS}",
}


@pytest.mark.parametrize("kind", DOCUMENTED, ids=lambda kind: kind.__name__)
def test_every_documented_parameter_is_known(kind):
    """So each is used, or refused with the reason: see the test before."""
    assert set(DOCUMENTED[kind].split()) <= set(kind.__struct_fields__)


OF_ROUTES = [
    reader
    for module in (routes, text_routes, responses_route, images_route, speech_route)
    for reader in vars(module).values()
    if isinstance(reader, BodyReader)
]


@pytest.mark.parametrize("reader", OF_ROUTES, ids=lambda reader: reader._kind.__name__)
def test_a_field_that_takes_any_value_has_a_rule_of_its_route(reader):
    """Else it would be ignored without a word."""
    fields = msgspec.structs.fields(reader._kind)
    free = {field.name for field in fields if field.type is Any} - {"tool_choice"}
    assert free <= set(reader._names)


@pytest.mark.parametrize("name", sorted({*EMBEDDINGS_REFUSED, "truncate_prompt_tokens"}))
def test_fields_that_would_change_a_vector_are_refused(name):
    reader = BodyReader(EmbeddingBody, EMBEDDINGS_REFUSED, EMBEDDINGS_IGNORED)
    neutral, _ = (REFUSED | EMBEDDINGS_REFUSED)[name]  # type: ignore[operator]
    for value in (None, *neutral):
        body = json.dumps({"input": "x", name: value}).encode()
        assert reader.read(body, strict=True)[1] == []
    with pytest.raises(ParameterError, match=f"{name} is not supported: "):
        reader.read(json.dumps({"input": "x", name: "something"}).encode())


@pytest.mark.parametrize("name", sorted(CHAT_REFUSED))
def test_fields_that_chats_refuse(name):
    neutral, _ = CHAT_REFUSED[name]
    for value in (None, *neutral):
        chat(**{name: value})
    with pytest.raises(ParameterError, match=f"{name} is not supported: "):
        chat(**{name: "something"})


def test_parameters_are_those_of_the_native_client():
    body = chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, frequency_penalty=0.2, presence_penalty=0.3,
        repetition_penalty=1.1, max_completion_tokens=9, min_tokens=2, stop="x", seed=5,
        stop_token_ids=[3], ignore_eos=True, logit_bias={"7": -100, "3": 1.5},
    )  # fmt: skip
    assert sampling_of(body, 0, DEFAULTS) == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, frequency_penalty=0.2, presence_penalty=0.3,
        repetition_penalty=1.1, max_new_tokens=9, min_new_tokens=2, stop=["x"], seed=5,
        stop_token_ids=[3], ignore_eos=True, logit_bias={7: -100, 3: 1.5},
    )  # fmt: skip
    assert sampling_of(body, 2, DEFAULTS).seed == 7
    assert sampling_of(chat(seed=-1), 0, DEFAULTS).seed == 2**64 - 1


def test_requests_with_equal_fields_have_equal_parameters_and_their_own_seeds():
    bodies_of_one_kind = [completion(temperature=0.25, top_k=3, n=2, seed=s) for s in (1, 1, None)]
    first, again, unseeded = (sampling_of(body, 1, DEFAULTS) for body in bodies_of_one_kind)
    assert first == again == SamplingParams(temperature=0.25, top_k=3, max_new_tokens=16, seed=2)
    assert "seed" not in unseeded._given
    drawn = {sampling_of(bodies_of_one_kind[2], 0, DEFAULTS).seed for _ in range(4)}
    assert len(drawn) > 1
    assert sampling_of(completion(temperature=0.25, top_k=4), 0, DEFAULTS).top_k == 4
    cooler = SamplingParamsGenerationConfigDefaults(top_p=0.5)
    for defaults, top_p in ((cooler, 0.5), (DEFAULTS, 1.0), (cooler, 0.5)):
        params = sampling_of(bodies_of_one_kind[0], 1, defaults)
        assert params.top_p == top_p
        assert params.merged(defaults) is params
        assert params.merged(SamplingParamsGenerationConfigDefaults(top_k=9)).top_k == 3
    for _ in range(2):
        with pytest.raises(ParameterError, match="min_tokens 4"):
            sampling_of(completion(max_tokens=3, min_tokens=4), 0, DEFAULTS)


def test_what_is_not_given_is_left_to_the_model():
    assert sampling_of(chat(), 0, DEFAULTS)._given in (None, ())
    assert sampling_of(completion(), 0, DEFAULTS).max_new_tokens == bodies.DEFAULT_COMPLETION_TOKENS
    assert options_of(chat()) == {}


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens 9 is more than max_tokens 4"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5000000000": 1}}, "logit_bias"),
        ({"logit_bias": {str(at): 1 for at in range(1025)}}, "logit_bias"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ],
    ids=str,
)
def test_an_impossible_value_is_named_as_in_the_body(fields, parameter):
    with pytest.raises(ParameterError) as raised:
        sampling_of(chat(**fields), 0, DEFAULTS)
    assert raised.value.parameter == parameter.split(" ")[0]
    assert parameter in str(raised.value)


def test_options_come_from_the_body():
    body = chat(cache_salt="s", logprobs=True, top_logprobs=3)
    assert options_of(body) == {"cache_salt": "s", "log_probabilities": 3}
    assert options_of(chat(logprobs=True)) == {"log_probabilities": 1}
    limits = {"slo_ttft": 0.5, "slo_itl": 0.05}
    assert options_of(chat(**limits)) == limits
    with pytest.raises(ParameterError, match="top_logprobs needs"):
        options_of(chat(top_logprobs=2))


SCHEMA = {"type": "object", "properties": {}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": FORM}, Content(SCHEMA)),
        ({"response_format": {"type": "json_object"}}, Content({"type": "object"})),
        ({"structured_outputs": {"json": SCHEMA}}, Content(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Content(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, Content({"type": "object"})),
        ({"structured_outputs": {"regex": "a/b\n"}}, Content(rule="/a\\/b\\n/")),
        ({"structured_outputs": {"choice": ["a", '"']}}, Content(rule='"a" | "\\""')),
        ({"structured_outputs": {"grammar": "start: X"}}, Content(grammar="start: X")),
    ],
    ids=str,
)
def test_the_content_asked_for(fields, content):
    assert content_of(chat(**fields)) == content_of(completion(**fields)) == content


def test_a_schema_alone_is_sent_as_a_schema():
    assert constraint_of(Content(SCHEMA)) == {"json_schema": SCHEMA}
    assert constraint_of(Content(rule="/a/")) == {"grammar": "start: /a/"}
    assert constraint_of(None) == {}


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": FORM | {"type": "json_object"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"shape": SCHEMA}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{", "json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORM}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
    ],
    ids=str,
)
def test_impossible_contents_are_refused(fields, parameter):
    # The time of a nested repetition is limited before it is compiled.
    with pytest.raises(SchemaTooComplex, match="use smaller repetitions"):
        content_of(chat(structured_outputs={"regex": "(a{1000}){1000}"}))
    with pytest.raises(ParameterError) as raised:
        content_of(chat(**fields))
    assert raised.value.parameter.startswith(parameter)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
    ids=str,
)
def test_prompts_of_every_form(given, wanted):
    assert list_of(given, "prompt", 2) == wanted


@pytest.mark.parametrize("given", [[], "", [""], [[]], [1, "a"], ["a", [1]], [[1], [2], [3]]])
def test_wrong_prompts_are_refused(given):
    with pytest.raises(ParameterError, match="prompt"):
        list_of(given, "prompt", 2)


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({}, {}),
        ({"disable_any_whitespace": True}, {}),
        ({"disable_any_whitespace": False}, {"whitespace_flexible": True}),
        ({"whitespace_pattern": " ?"}, {"whitespace_pattern": " ?"}),
    ],
    ids=str,
)
def test_whitespace_is_asked_for_by_vllms_names(asked, options):
    """Beside the schema, a response format, or tools."""
    body = chat(structured_outputs={"json": SCHEMA, **asked})
    assert whitespace_of(body) == options
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    others = [{"response_format": FORM}, {"tools": tools}] if asked else []
    for other in others:
        assert whitespace_of(chat(structured_outputs=asked, **other)) == options
        content_of(chat(structured_outputs=asked, **other))
    constraint = constraint_of(content_of(body), whitespace=whitespace_of(body))
    wanted = SCHEMA | ({"x-guidance": options} if options else {})
    assert constraint == {"json_schema": wanted}
    forced = tools_of(tools, "required", False)
    text = constraint_of(None, tools=forced, form="hermes", whitespace=options)["grammar"]
    assert ("x-guidance" in text) == bool(options)
    native = check_options({"json_schema": SCHEMA, **asked})["json_schema"]
    assert json.loads(native) == wanted


@pytest.mark.parametrize(
    "asked",
    [
        {"whitespace_pattern": "x"},
        {"whitespace_pattern": " ", "disable_any_whitespace": True},
        {"whitespace_pattern": "( {1000}){1000}{1000}"},
    ],
    ids=str,
)
def test_impossible_whitespace_is_refused(asked):
    with pytest.raises(ParameterError, match=r"structured_outputs\."):
        whitespace_of(chat(structured_outputs={"json": SCHEMA, **asked}))
    with pytest.raises(InputError):
        check_options({"json_schema": SCHEMA, **asked})
    with pytest.raises(InputError, match="needs a json_schema"):
        check_options({"grammar": "start: A", "whitespace_pattern": " "})


ECHOED = {
    "refusal": None, "audio": None, "annotations": [], "function_call": None, "name": None,
    "reasoning_content": None,
}  # fmt: skip


@pytest.mark.parametrize("calls", [{}, {"tool_calls": None}, {"tool_calls": []}], ids=str)
def test_members_that_clients_echo_are_absent(calls):
    answer = {"role": "assistant", "content": "Hello"}
    assert messages_of([{**answer, **ECHOED, **calls}]) == [answer]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [{**call, "index": None}]}
    (found,) = messages_of([{**called, **ECHOED}])
    call["function"]["arguments"] = {}
    assert found == {"role": "assistant", "content": "", "tool_calls": [call]}


def test_parts_of_text_become_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages_of([{"role": "user", "content": parts}]) == [
        {"role": "user", "content": "a\nb"}
    ]
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(ParameterError, match=r"messages\[0\].*'image_url'"):
        messages_of([{"role": "user", "content": image}])
    for wrong in (5, {}, True, None):
        with pytest.raises(ParameterError, match=r"messages\[0\]\.content must be text"):
            messages_of([{"role": "user", "content": wrong}])
    with pytest.raises(ParameterError, match=r"messages\[1\]\.content must be text"):
        messages_of([*MESSAGES, {"role": "user"}])
    said_nothing = {"role": "assistant", "content": None}
    assert messages_of([said_nothing]) == [{"role": "assistant", "content": ""}]
    with pytest.raises(ParameterError, match=r"messages\[1\]\.role"):
        messages_of([*MESSAGES, {"content": "x"}])


def test_tokenize_bodies():
    reader = BodyReader(TokenizeBody)
    assert reader.read(b'{"prompt": "x"}')[0].prompt == "x"
    with pytest.raises(ParameterError, match="foo"):
        reader.read(b'{"foo": 1}', strict=True)


def test_the_page_has_every_field():
    page = (Path(__file__).resolve().parents[2] / "docs" / "http.md").read_text()
    for kind in (ChatBody, CompletionBody, ResponsesBody, EmbeddingBody):
        for name in kind.__struct_fields__:
            assert f"`{name}`" in page, name
    rules = [REFUSED, IGNORED, RESPONSES_REFUSED, RESPONSES_IGNORED, IMAGES_REFUSED]
    rules += [EMBEDDINGS_REFUSED, EMBEDDINGS_IGNORED]
    for name, (neutral, reason) in (
        pair for one in (*rules, IMAGES_IGNORED) for pair in one.items()
    ):
        shown = ", ".join(f"`{json.dumps(value)}`" for value in neutral) or "null"
        assert f"| `{name}` | {reason} | {shown} |" in page, name
    for name, reason in RECORDS.items():
        assert f"| `{name}` | {reason} |" in page, name


FORMAT = {"response_format": FORM}
OUTPUTS = {"structured_outputs": {"regex": "a+"}}


@pytest.mark.parametrize(
    ("fields", "error", "parameter"),
    [
        (FORMAT, SchemaTooComplex("too many states"), "response_format"),
        (FORMAT, InputError("json_schema: no token can follow"), "response_format"),
        (OUTPUTS, InputError("grammar: unknown rule"), "structured_outputs"),
        ({}, InputError("grammar is too long"), "tools"),
        ({}, PromptTooLong("prompt too long: 9 tokens, limit 8"), "messages"),
        ({}, InputError("images[1]: this is no image"), "messages"),
        ({}, InputError("max_new_tokens must be smaller"), "max_tokens"),
        ({}, InputError("something else"), None),
        ({}, DuplicateRequest("json_schema of another request"), None),
    ],
    ids=str,
)
def test_an_error_of_the_cluster_names_its_field(fields, error, parameter):
    found = named(error, chat(**fields))
    assert json.loads(error_json(found))["error"]["param"] == parameter
    assert (found.code, status_of(found)) == (error.code, status_of(error))


def test_the_field_of_a_late_error_depends_on_the_body():
    too_long = PromptTooLong("prompt too long")
    assert named(too_long, completion()).parameter == "prompt"
    reader = BodyReader(ResponsesBody, RESPONSES_REFUSED)
    body, _ = reader.read(b'{"input": "hello"}')
    assert named(too_long, body).parameter == "input"
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    content = json.dumps({"input": "hello", "text": {"format": form}}).encode()
    body, _ = reader.read(content)
    assert named(SchemaTooComplex("x"), body).parameter == "text.format"
