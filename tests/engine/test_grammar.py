"""Schemas as masks over the embedded model's tokenizer: allowed tokens, refusals and the cache."""

import copy
import json
import threading

import jsonschema
import numpy as np
import pytest

from baton.deploy.config import demo_model_folder
from baton.engine.grammar.compiler import compile_schema, load_tokenizer
from baton.engine.grammar.constraint import (
    COMPILE_LIMIT_S,
    NOT_COMPILED,
    GrammarCompiler,
    GrammarTask,
    as_result,
    grammar_task,
    write_words,
)
from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.sampling.sampler import sample
from baton.engine.scheduling.plan import SampleSpec
from baton.engine.scheduling.scheduler import SchedulerConfig
from baton.engine.scheduling.sequence import Sequence
from baton.proto.contexts.text import TextContext
from baton.proto.errors import (
    BatonError,
    CapacityError,
    InputError,
    InternalError,
    SchemaTooComplex,
)
from baton.proto.limits import MAX_JSON_SCHEMA_CHARS, MAX_JSON_SCHEMA_DEPTH
from baton.proto.sampling import SamplingParams
from baton.proto.wire.context_maps import context_to_run, request_map
from baton.text.tokenizer import Tokenizer

from .schemas import SCHEMAS, check_instance

DEMO_MODEL = demo_model_folder()
VOCABULARY = 1024
EOS = (0, 2)
START = 1
INTEGER = '{"type":"integer","minimum":0,"maximum":99}'


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(DEMO_MODEL, VOCABULARY, EOS)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(DEMO_MODEL)


def task(schema, *, eos=EOS, emitted=()) -> GrammarTask:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return GrammarTask(text, frozenset(eos), tuple(emitted))


def texts(tokenizer, mask) -> set[str]:
    return {tokenizer.token_bytes(int(i)).decode(errors="replace") for i in np.flatnonzero(mask)}


def draw(matcher, seed: int, most: int = 400) -> list[int]:
    """Random allowed tokens, as of an untrained model at temperature 1."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(seed=seed)
    tokens: list[int] = []
    while len(tokens) < most:
        logits = rng.standard_normal(VOCABULARY).astype(np.float32)
        spec = SampleSpec(params, len(tokens), np.empty(0, np.int32), 0, mask=matcher)
        token, _ = sample(logits, spec)
        assert matcher.consume_token(token)
        tokens.append(token)
        if token in EOS:
            return tokens
    return tokens


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_ends_is_an_instance(name, compiler, tokenizer):
    schema = SCHEMAS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    ended = 0
    for seed in range(3):
        tokens = draw(compiler.compile(task(schema)), seed)
        if tokens[-1] in EOS:
            check_instance(tokenizer.decode(tokens), schema)
            ended += 1
    assert ended, "no answer ever ends"


def test_there_are_fifty_of_them():
    assert len(SCHEMAS) == 50


# ------------------------------------------------------------------ masks


def test_only_what_continues_an_instance_is_allowed(compiler, tokenizer):
    matcher = compiler.compile(task({"enum": ["ab"]}))
    assert texts(tokenizer, matcher.allowed()) <= {'"', '"a', '"ab'}
    for token in tokenizer.encode('"a').tolist():
        assert matcher.consume_token(token)
    assert texts(tokenizer, matcher.allowed()) <= {"b", 'b"'}
    assert not matcher.allowed()[list(EOS)].any()


def test_the_end_is_allowed_where_the_text_is_whole(compiler, tokenizer):
    matcher = compiler.compile(task(INTEGER))
    assert not matcher.allowed()[list(EOS)].any()
    (one,) = tokenizer.encode("1").tolist()
    assert matcher.consume_token(one)
    mask = matcher.allowed()
    assert mask[list(EOS)].all()
    assert mask[one], "11 is an instance too"
    assert matcher.consume_token(one)
    assert set(np.flatnonzero(matcher.allowed())) == set(EOS), "nothing else may follow"
    assert matcher.consume_token(EOS[1])
    assert not matcher.allowed().any()
    assert not matcher.consume_token(EOS[1])


def test_any_value_is_an_instance_of_true(compiler, tokenizer):
    assert {"[", "{", '"', "1"} <= texts(tokenizer, compiler.compile(task("true")).allowed())


def test_the_end_is_refused_before(compiler):
    assert not compiler.compile(task(INTEGER)).consume_token(EOS[0])


def test_the_ids_that_end_are_the_requests(compiler, tokenizer):
    own = 700
    matcher = compiler.compile(task(INTEGER, eos=[own, 1 << 20]))
    (one,) = tokenizer.encode("1").tolist()
    assert not matcher.allowed()[own]
    assert matcher.consume_token(one)
    mask = matcher.allowed()
    assert mask[own]
    assert not mask[list(EOS)].any()
    assert not matcher.consume_token(EOS[0])


@pytest.mark.parametrize("token", [-1, VOCABULARY, 1 << 40, START])
def test_foreign_tokens_are_refused(token, compiler):
    assert not compiler.compile(task(INTEGER)).consume_token(token)


def test_a_mask_belongs_to_who_asked(compiler):
    matcher = compiler.compile(task(INTEGER))
    matcher.allowed()[:] = True
    assert not matcher.allowed().all()


def test_a_row_may_be_longer_than_the_vocabulary(tokenizer):
    wide = GrammarCompiler(DEMO_MODEL, VOCABULARY + 37, EOS).compile(task(INTEGER))
    mask = wide.allowed()
    assert mask.shape == (VOCABULARY + 37,)
    assert not mask[VOCABULARY:].any()


def bits(mask) -> np.ndarray:
    """A bit per allowed token, 32 per word, the lowest id in the lowest bit."""
    padded = np.zeros(-(-len(mask) // 32) * 32, np.uint64)
    padded[: len(mask)] = mask
    return (padded.reshape(-1, 32) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)


@pytest.mark.parametrize("extra", [0, 37])
def test_masks_written_as_words_are_the_same(extra):
    """Of many requests at once, in any rows, with other ends; but for those that may raise."""
    size = VOCABULARY + extra
    wide = GrammarCompiler(DEMO_MODEL, size, EOS)
    rng = np.random.default_rng(9)
    ends = [EOS, (), (2,), (700, 1 << 20), EOS]
    names = ["order", "digit", "date", "linked list", "array of arrays"]
    matchers = [
        wide.compile(task(SCHEMAS[name], eos=eos))
        for name, eos in zip(names * 5, ends * 2 + ends[1:] + ends[:1] + ends * 2, strict=True)
    ]
    written = ended = 0
    for _ in range(40):
        rows = rng.permutation(40)[: len(matchers)].tolist()
        words = rng.integers(0, 1 << 32, (40, -(-size // 32)), np.uint32)
        before = words.copy()
        left = write_words(matchers, rows, words)
        for index, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
            if index not in left:
                np.testing.assert_array_equal(words[row], bits(matcher.allowed()))
                written += 1
        others = sorted(set(range(40)) - set(rows))
        np.testing.assert_array_equal(words[others], before[others])
        for matcher in matchers:
            try:
                following = np.flatnonzero(matcher.allowed())
            except InputError:
                following = []
            if not len(following):
                ended += 1
                matcher.rollback(1)
            else:
                assert matcher.consume_token(int(rng.choice(following)))
    assert written > 600
    assert ended > 10


def test_a_mask_without_any_token_is_left_to_its_request():
    matcher = GrammarCompiler(DEMO_MODEL, VOCABULARY, EOS).compile(task(INTEGER, eos=()))
    words = np.full((1, VOCABULARY // 32), 7, np.uint32)
    matcher._bits = bytes(4 * words.shape[1])
    assert write_words([matcher], [0], words) == [0]
    with pytest.raises(InputError, match="no token can follow"):
        matcher.allowed()


@pytest.mark.parametrize("row", [-1, 3])
def test_no_mask_is_written_outside_the_array(row, compiler):
    matchers = [compiler.compile(task(INTEGER)) for _ in range(2)]
    memory = np.full((5, VOCABULARY // 32), 7, np.uint32)
    with pytest.raises(InternalError, match="outside"):
        write_words(matchers, [0, row], memory[1:4])
    assert (memory == 7).all()


def test_one_failing_mask_among_many_loses_only_its_request(tokenizer):
    """A state that even a schema of its own cannot continue, beside one that this saves."""
    compiler = GrammarCompiler(DEMO_MODEL, VOCABULARY, EOS)
    hard = {"type": "string", "pattern": "^(a|b)*a(a|b){60}c$"}
    failing, saved = (compiler.compile(task(hard)) for _ in range(2))
    for token in tokenizer.encode('"abab').tolist():
        assert failing.consume_token(token)
        assert saved.consume_token(token)
    others = [compiler.compile(task(SCHEMAS[name])) for name in ("order", "digit", "date")]
    expected = [bits(matcher.allowed()) for matcher in (copy.deepcopy(saved), *others)]
    for matcher in (failing, saved):
        break_state(matcher)
    failing._alone = True  # compiled for it alone before
    matchers = [others[0], failing, saved, *others[1:]]
    words = np.zeros((8, VOCABULARY // 32), np.uint32)
    assert write_words(matchers, [6, 1, 4, 3, 0], words) == [1]
    np.testing.assert_array_equal(words[[4, 6, 3, 0]], expected)
    with pytest.raises(SchemaTooComplex):
        failing.allowed()
    for matcher in (saved, *others):
        assert matcher.consume_token(int(np.flatnonzero(matcher.allowed())[0]))


def test_an_unexpected_error_of_one_mask_loses_only_its_request(compiler, monkeypatch):
    """The caller makes the mask again, alone, and so finds the error of this request."""
    failing, other = (compiler.compile(task(INTEGER)) for _ in range(2))
    expected = bits(copy.deepcopy(other).allowed())

    write = type(failing)._write_following

    def compute_mask(matcher, row, address):
        if matcher is failing:
            raise MemoryError
        return write(matcher, row, address)

    monkeypatch.setattr(type(failing), "_write_following", compute_mask)
    words = np.zeros((2, VOCABULARY // 32), np.uint32)
    assert write_words([failing, other], [0, 1], words) == [0]
    np.testing.assert_array_equal(words[1], expected)


def break_state(matcher) -> None:
    """Leave llguidance's state in an error, as after a limit."""
    refused = int(np.flatnonzero(~matcher.allowed())[-1])
    matcher._bits = None
    assert not matcher._matcher.consume_token(refused)
    assert matcher._matcher.is_error()


def test_too_complex_on_the_way_is_said(compiler, tokenizer):
    """The work of one step is limited: beyond the limit, the request fails."""
    words = {"type": "string", "pattern": "^(a|b)*a(a|b){60}c$"}
    matcher = compiler.compile(task(words))
    (quote, a) = tokenizer.encode('"')[0], tokenizer.encode("a")[0]
    assert matcher.consume_token(int(quote))
    try:
        for _ in range(3000):
            matcher.allowed()
            if not matcher.consume_token(int(a)):
                break
    except InputError as error:
        assert "any further" in str(error)


# ------------------------------------------------------------------ replay


@pytest.mark.parametrize("name", ["order", "linked list", "unicode names", "array of arrays"])
def test_a_rebuilt_matcher_stands_where_the_first_one_stood(name, compiler):
    tokens = draw(compiler.compile(task(SCHEMAS[name])), seed=5, most=60)
    one = compiler.compile(task(SCHEMAS[name]))
    for count, token in enumerate(tokens):
        other = compiler.compile(task(SCHEMAS[name], emitted=tokens[:count]))
        np.testing.assert_array_equal(one.allowed(), other.allowed())
        assert one.consume_token(token)


def test_tokens_that_do_not_fit_are_refused(compiler):
    with pytest.raises(InputError, match="token 0 of the answer"):
        compiler.compile(task(INTEGER, emitted=[EOS[0]]))


# ------------------------------------------------------------------ rollback


@pytest.mark.parametrize("name", ["order", "linked list", "unicode names", "date", "digit"])
@pytest.mark.parametrize("asked", [False, True])
def test_a_matcher_that_went_back_stands_where_it_stood(name, asked, compiler):
    """Rollback from any position to any earlier one, also from the end, and onwards from there."""
    tokens = draw(compiler.compile(task(SCHEMAS[name])), seed=3, most=40)
    rng = np.random.default_rng(4)
    matcher, at = compiler.compile(task(SCHEMAS[name])), 0
    for _ in range(30):
        end = int(rng.integers(at, len(tokens) + 1))
        for token in tokens[at:end]:
            if asked:
                matcher.allowed()
            assert matcher.consume_token(token)
        at = int(rng.integers(0, end + 1))
        matcher.rollback(end - at)
        fresh = compiler.compile(task(SCHEMAS[name], emitted=tokens[:at]))
        np.testing.assert_array_equal(matcher.allowed(), fresh.allowed())


def test_going_back_too_far_changes_nothing(compiler, tokenizer):
    matcher = compiler.compile(task(INTEGER))
    (one,) = tokenizer.encode("1").tolist()
    assert matcher.consume_token(one) and matcher.consume_token(EOS[0])
    for count in (-1, 3):
        with pytest.raises(ValueError, match="take back"):
            matcher.rollback(count)
    assert not matcher.consume_token(one), "it has ended still"
    matcher.rollback(1)
    assert matcher.consume_token(one)


def test_a_matcher_goes_back_from_where_it_could_not_go_on(compiler, tokenizer):
    """An error destroys the library's state, so it is rebuilt from the tokens."""
    quote, *text = tokenizer.encode('"ab').tolist()
    matcher = compiler.compile(task({"type": "string"}))
    assert matcher.consume_token(quote)
    before = matcher.allowed()
    assert matcher.consume_token(text[0])
    matcher._matcher.consume_token(1 << 20)
    matcher.rollback(1)
    np.testing.assert_array_equal(matcher.allowed(), before)


def test_a_refused_token_changes_nothing(compiler, tokenizer):
    matcher = compiler.compile(task(INTEGER))
    (one, quote) = tokenizer.encode("1")[0], tokenizer.encode('"')[0]
    before = matcher.allowed()
    for asked in (True, False):
        matcher = compiler.compile(task(INTEGER))
        if asked:
            matcher.allowed()
        assert not matcher.consume_token(int(quote))
        np.testing.assert_array_equal(matcher.allowed(), before)
        assert matcher.consume_token(int(one))


def test_a_context_rolls_back_with_its_grammar(compiler, tokenizer):
    ctx = context(json_schema=INTEGER)
    ctx.set_matcher(compiler.compile(grammar_task(ctx)))
    (one,) = tokenizer.encode("1").tolist()
    ctx.update(one)
    mask = ctx.matcher.allowed()
    ctx.update(one)
    ctx.update(EOS[0])
    ctx.rollback(2)
    np.testing.assert_array_equal(ctx.matcher.allowed(), mask)
    ctx.update(one)
    ctx.update(EOS[1])
    assert ctx.is_done


def test_a_copied_context_has_a_grammar_of_its_own(compiler, tokenizer):
    ctx = context(json_schema=INTEGER)
    ctx.set_matcher(compiler.compile(grammar_task(ctx)))
    (one,) = tokenizer.encode("1").tolist()
    other = copy.deepcopy(ctx)
    ctx.update(one)
    ctx.update(EOS[0])
    with pytest.raises(ValueError, match="does not allow"):
        other.update(EOS[0])
    other.update(one)


# ------------------------------------------------------------------ schemas that are refused

BAD = {
    "no JSON": ("{", "not JSON"),
    "no object": ("3", "object or a boolean"),
    "two texts": ('{"type":"integer"}, "more": {}', "not JSON"),
    "false": ("false", "Unsatisfiable"),
    "unknown type": ('{"type":"foo"}', "foo"),
    "not": ('{"not":{"type":"integer"}}', "not"),
    "unique items": ('{"type":"array","uniqueItems":true}', "uniqueItems"),
    "overlapping one of": ('{"oneOf":[{"type":"integer"},{"type":"number"}]}', "oneOf"),
    "look-around": ('{"type":"string","pattern":"a(?=b)"}', "look-around"),
    "open group": ('{"type":"string","pattern":"(("}', "unclosed group"),
    "unknown format": ('{"type":"string","format":"colour"}', "colour"),
    "dangling reference": ('{"$ref":"#/nowhere"}', "nowhere"),
    "foreign reference": ('{"$ref":"http://example.com/schema"}', "example.com"),
    "empty enum": ('{"enum":[]}', "anyOf is empty"),
    "empty range": ('{"type":"integer","minimum":5,"maximum":2}', "minimum"),
    "empty lengths": ('{"type":"string","minLength":4,"maxLength":2}', "minLength"),
    "too deep": ('{"a":' * (MAX_JSON_SCHEMA_DEPTH + 1), "levels"),
    "too long": (json.dumps({"description": "x" * MAX_JSON_SCHEMA_CHARS}), "characters"),
    "too large inside": (
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {"const": j}},
                                "required": [f"p{i}{j}"]} for j in range(4)]}
                    for i in range(8)
                ]
            }
        ),
        "too large",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_schema_is_an_input_error_on_one_line(name, compiler):
    schema, message = BAD[name]
    for _ in range(2):  # the second time from the cache
        with pytest.raises(InputError, match=message) as caught:
            compiler.compile(task(schema))
        text = str(caught.value)
        assert "json_schema" in text
        assert "\n" not in text and len(text) < 400


def test_bad_schemas_leave_good_ones_alone(compiler):
    with pytest.raises(InputError):
        compiler.compile(task("{"))
    assert compiler.compile(task(INTEGER)).allowed().any()


def test_the_largest_schemas_compile():
    properties = {f"property_{i}": {"enum": [f"v{i}", i]} for i in range(1500)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    text = json.dumps(schema)
    assert len(text) < MAX_JSON_SCHEMA_CHARS
    compiler = GrammarCompiler(DEMO_MODEL, VOCABULARY, EOS)
    assert compiler.compile(task(text)).allowed().any()


def test_a_large_tokenizer_is_read_before_the_first_schema(tmp_path):
    large, small = (GrammarCompiler(DEMO_MODEL, size, EOS) for size in (1 << 14, VOCABULARY))
    without = GrammarCompiler(tmp_path, 1 << 14, EOS)
    for compiler in (large, small, without):
        compiler.prepare()
    assert large.time_limit() < small.time_limit() == without.time_limit()
    assert large.compile(task(INTEGER)).allowed().any()
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        without.compile(task(INTEGER))


# ------------------------------------------------------------------ the cache


def test_a_schema_is_compiled_once():
    compiler = GrammarCompiler(DEMO_MODEL, VOCABULARY, EOS)
    one, two = compiler.compile(task(INTEGER)), compiler.compile(task(INTEGER))
    assert compiler.compiled == 1
    (digit,) = np.flatnonzero(one.allowed())[:1].tolist()
    before = two.allowed()
    one.consume_token(digit)
    np.testing.assert_array_equal(two.allowed(), before)


def test_only_the_latest_are_kept():
    compiler = GrammarCompiler(DEMO_MODEL, VOCABULARY, EOS, cached=2)
    for text in ('{"const":1}', '{"const":2}', '{"const":1}', '{"const":3}', '{"const":1}'):
        compiler.compile(task(text))
    assert compiler.compiled == 3
    compiler.compile(task('{"const":2}'))
    assert compiler.compiled == 4


def test_many_threads_may_compile():
    compiler = GrammarCompiler(DEMO_MODEL, VOCABULARY, EOS)
    masks = []

    def work(index: int) -> None:
        for count in range(10):
            masks.append(compiler.compile(task({"const": (index + count) % 7})).allowed().any())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert masks == [True] * 40


def test_the_first_schema_has_time_for_the_tokenizer():
    compiler = GrammarCompiler(DEMO_MODEL, VOCABULARY, EOS)
    assert compiler.time_limit() > COMPILE_LIMIT_S
    compiler.compile(task(INTEGER))
    assert compiler.time_limit() == COMPILE_LIMIT_S


@pytest.mark.parametrize("content", [None, "{}", "no JSON"])
def test_a_model_without_a_tokenizer_is_said(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=r"needs a tokenizer\.json"):
        GrammarCompiler(tmp_path, VOCABULARY, EOS).compile(task(INTEGER))


def test_an_added_token_that_is_text_may_stand_for_its_text(tmp_path):
    """As Qwen's ``<tool_call>``, which begins a forced call."""
    file = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    vocabulary = file["model"]["vocab"]
    call = VOCABULARY - 1
    file["model"]["merges"] = [
        pair
        for pair in file["model"]["merges"]
        if vocabulary["".join(pair).replace(" ", "")] != call
    ]
    file["model"]["vocab"] = {k: v for k, v in vocabulary.items() if v != call}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    file["added_tokens"].append({"id": call, "content": "<call>", **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    matcher = compile_schema(load_tokenizer(tmp_path, VOCABULARY, EOS), '{"const": "<call>"}')
    quote = file["model"]["vocab"]['"']
    assert [matcher.consume_token(token) for token in (quote, call, quote)] == [True] * 3
    assert matcher.is_accepting()
    spelled = compile_schema(load_tokenizer(tmp_path, VOCABULARY, EOS), '{"const": "<call>"}')
    steps = 0
    while not spelled.is_accepting() and steps < 20:
        allowed = np.frombuffer(spelled.compute_bitmask(), np.uint8)
        assert spelled.consume_token(int(np.unpackbits(allowed, bitorder="little").argmax()))
        steps += 1
    assert spelled.is_accepting()


def test_a_tokenizer_larger_than_the_model_is_said():
    with pytest.raises(InputError, match="fits the model"):
        GrammarCompiler(DEMO_MODEL, 1000, EOS).compile(task(INTEGER))


def test_a_model_without_an_end_is_said():
    with pytest.raises(InputError, match="end-of-sequence"):
        GrammarCompiler(DEMO_MODEL, VOCABULARY, [1 << 20]).compile(task(INTEGER))


# ------------------------------------------------------------------ requests


def context(**fields) -> TextContext:
    fields = {"max_length": 64, "tokens": [5, 6, 7], "eos_token_ids": set(EOS), **fields}
    return TextContext(**fields)


def test_a_context_without_a_schema_needs_nothing():
    assert grammar_task(context()) is None


def test_what_a_context_needs():
    ctx = context(json_schema=INTEGER)
    assert grammar_task(ctx) == task(INTEGER)
    wire = request_map(ctx)
    again = context_to_run(wire, emitted=[9, 10])
    assert grammar_task(again) == task(INTEGER, emitted=[9, 10])


def test_a_sequence_draws_from_its_grammar(compiler):
    ctx = context(json_schema=INTEGER)
    sequence = Sequence(b"r", ctx, block_size=4)
    assert sequence.mask is None
    matcher = compiler.compile(grammar_task(ctx))
    sequence.constrain(matcher)
    assert sequence.mask is matcher
    assert ctx.matcher is matcher
    assert grammar_task(ctx) is None
    (digit,) = np.flatnonzero(matcher.allowed())[:1].tolist()
    sequence.accept(digit, None)
    with pytest.raises(ValueError, match="does not allow"):
        sequence.accept(START, None)
    assert ctx.tokens.all.tolist() == [5, 6, 7, digit]


def test_a_future_token_is_refused_beside_a_grammar(compiler):
    ctx = context(json_schema=INTEGER)
    ctx.set_matcher(compiler.compile(task(INTEGER)))
    with pytest.raises(ValueError, match="matcher is present"):
        ctx.update_with_future_token()


def test_answers_of_the_compile_thread(compiler):
    matcher = compiler.compile(task(INTEGER))
    assert as_result(matcher) is matcher
    error = InputError("why")
    assert as_result(error) is error
    late = as_result(TimeoutError())
    assert isinstance(late, CapacityError)
    assert "90 s" in str(late)
    other = as_result(KeyError("k"))
    assert isinstance(other, InternalError) and isinstance(other, BatonError)
    assert str(other) == NOT_COMPILED and isinstance(other.__cause__, KeyError)


# ------------------------------------------------------------------ the engine alone


def structured(schema, seed: int) -> TextContext:
    params = SamplingParams(seed=seed, max_new_tokens=120)
    return context(
        max_length=200, sampling_params=params, json_schema=json.dumps(schema), log_probabilities=1
    )


def test_an_engine_without_a_compiler_says_so():
    runner = load_runner(RunnerConfig(model=str(DEMO_MODEL), num_blocks=16, backend="numpy"))
    with pytest.raises(InputError, match="no matcher"):
        LLMEngine(runner).add(structured(SCHEMAS["order"], 1))


def run_engine(compiler, contexts, num_blocks: int) -> int:
    """Run all requests together, and return the number of preemptions."""
    runner = load_runner(RunnerConfig(model=str(DEMO_MODEL), num_blocks=num_blocks, block_size=16))
    engine = LLMEngine(runner, SchedulerConfig(growth=0))
    for ctx in contexts:
        ctx.set_matcher(compiler.compile(grammar_task(ctx)))
        engine.add(ctx)
    while engine.has_work:
        engine.step()
    return engine.scheduler.load().preemptions


def test_preemption_loses_nothing_of_a_grammar(compiler):
    schemas = [SCHEMAS[n] for n in ("order", "tool call", "many properties", "date")] * 2
    calm = [structured(schema, seed) for seed, schema in enumerate(schemas)]
    assert run_engine(compiler, calm, 200) == 0
    crowded = [structured(schema, seed) for seed, schema in enumerate(schemas)]
    assert run_engine(compiler, crowded, 16) > 0
    for one, other in zip(calm, crowded, strict=True):
        assert one.tokens.generated.tolist() == other.tokens.generated.tolist()
