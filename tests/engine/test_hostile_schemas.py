"""Hostile schemas: each is one typed error, and the process continues."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from baton.deploy.config import demo_model_folder
from baton.engine.grammar.constraint import GrammarCompiler, GrammarTask
from baton.engine.grammar.trial import SchemaTrial
from baton.proto.errors import CapacityError, InputError, SchemaTooComplex
from baton.text.tokenizer import Tokenizer

from ..processes import alive, wait_until

DEMO_MODEL = demo_model_folder()
VOCABULARY = 1024
EOS = (0, 2)
TOKENIZER = Tokenizer.from_folder(DEMO_MODEL)
(QUOTE,) = TOKENIZER.encode('"').tolist()
LETTERS = [int(TOKENIZER.encode(letter)[0]) for letter in "abcdefgh"]
INTEGER = '{"type":"integer","minimum":0,"maximum":99}'


def compiler_with(limit_s: float, **settings) -> GrammarCompiler:
    """``limit_s``: of a trial; where a schema is to pass, more than a busy machine needs."""
    one = GrammarCompiler(DEMO_MODEL, VOCABULARY, EOS, **settings)
    one._trial = trial(limit_s)
    return one


@pytest.fixture
def make():
    """Make compilers of the embedded model, closed after the test."""
    made = []

    def start(limit_s: float = 60.0, **settings) -> GrammarCompiler:
        made.append(compiler_with(limit_s, **settings))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def compiler():
    one = compiler_with(60.0)
    yield one
    one.close()


def task(schema, emitted=()) -> GrammarTask:
    text = schema if isinstance(schema, str) else json.dumps(schema, separators=(",", ":"))
    return GrammarTask(text, frozenset(EOS), tuple(emitted))


def chain(link, count: int) -> dict:
    """``count`` definitions, each referring to the next."""
    links = {f"{i}": link({"$ref": f"#/$defs/{i + 1}"}) for i in range(count)}
    return {"$defs": {**links, f"{count}": {"type": "null"}}, "$ref": "#/$defs/0"}


def nested(schema, depth: int) -> dict:
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


HARM = {
    # more stack than a thread has
    "chain of references": chain(lambda ref: ref, 4000),
    "chain of arrays": chain(lambda ref: {"items": ref}, 3000),
    "chain of objects": chain(lambda ref: {"properties": {"": ref}, "required": [""]}, 1500),
    "chain of nests": chain(lambda ref: nested(ref, 24), 380),
    # time and memory that double with every pattern
    "patterns at once": {
        "allOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in range(30)]
    },
    "patterns with gaps": {
        "type": "string",
        "allOf": [{"pattern": f".*{c}.{{{i}}}{c}"} for i, c in enumerate("abcdefghijklmnop")],
    },
    "product of choices": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(10)]} for i in range(10)
        ]
    },
}


@pytest.mark.parametrize("name", HARM)
def test_what_would_end_a_process_is_refused(name, make):
    compiler = make(limit_s=5.0)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(SchemaTooComplex, match="json_schema"):
            compiler.compile(task(HARM[name]))
    assert compiler.compile(task(INTEGER)).allowed().any()


def test_it_takes_little_memory_to_refuse(make):
    compiler = make(limit_s=5.0)
    compiler.compile(task(INTEGER))
    before = resident()
    with pytest.raises(SchemaTooComplex):
        compiler.compile(task(HARM["patterns at once"]))
    assert resident() - before < 16 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


ENDLESS = {
    "itself": {"$ref": "#"},
    "each other": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a",
    },
    "itself beside others": {"allOf": [{"$ref": "#"}, {"type": "object"}]},
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_what_no_text_can_meet_is_refused_before_the_answer(name, compiler):
    with pytest.raises(InputError, match="json_schema"):
        compiler.compile(task(ENDLESS[name]))


DOUBLING = {
    "anyOf": lambda ref: {"anyOf": [ref, ref]},
    "allOf": lambda ref: {"allOf": [ref, ref]},
    "pairs": lambda ref: {"prefixItems": [ref, ref], "items": False, "minItems": 2},
}


@pytest.mark.parametrize("name", DOUBLING)
def test_references_that_double_cost_nothing(name, compiler):
    assert compiler.compile(task(chain(DOUBLING[name], 40))).allowed().any()


NUMBERS = {
    "NaN": '{"const":NaN}',
    "infinity": '{"maximum":Infinity}',
    "out of range": '{"minimum":-1e400}',
    "long": json.dumps({"type": "integer", "minimum": 10**300, "maximum": 10**301}),
    "tiny steps": '{"type":"number","multipleOf":1e-300}',
    "no steps": '{"type":"integer","multipleOf":0}',
    "a lone surrogate": '{"const":"\\ud800"}',
    "bytes that are no text": '{"const":"\ud800"}',
}


@pytest.mark.parametrize("name", NUMBERS)
def test_strange_values_are_input_errors(name, compiler):
    with pytest.raises(InputError, match="json_schema"):
        compiler.compile(task(NUMBERS[name]))


@pytest.mark.parametrize(
    "options",
    [
        {"item_separator": ";"},
        {"key_separator": "="},
        {"json_allowed_escapes": "q"},
        {"lenient": True, "key_separator": "="},
        True,
        [],
    ],
)
def test_no_option_makes_an_answer_something_else_than_json(options, compiler):
    with pytest.raises(InputError, match="x-guidance"):
        compiler.compile(task({"x-guidance": options, "type": "array"}))


def test_options_that_keep_it_json_are_taken(compiler):
    lenient = {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}
    assert compiler.compile(task(lenient)).allowed().any()
    coerced = {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "integer"}, {}]}
    assert compiler.compile(task(coerced)).allowed().any()
    compact = {"x-guidance": {"whitespace_flexible": False}, "type": "array", "maxItems": 0}
    matcher = compiler.compile(task(compact))
    assert np.count_nonzero(matcher.allowed()) <= 2, "[ and []"


def test_a_key_of_that_name_is_a_key(compiler):
    schema = {"properties": {"x-guidance": {"whitespace_pattern": "x*"}}}
    assert compiler.compile(task(schema)).allowed().any()


# ------------------------------------------------------------------ in mid-answer

GAPS = {"type": "string", "pattern": "(.*a.{30}b.*c.{30}d.*)"}


def walk(matcher, seed: int, most: int = 3000) -> list[int]:
    """Generate random letters inside a string until an error."""
    rng, tokens = np.random.default_rng(seed), []
    while len(tokens) < most:
        allowed = np.flatnonzero(matcher.allowed())
        letters = np.intersect1d(allowed, LETTERS)
        token = int(rng.choice(letters if len(letters) else allowed))
        assert matcher.consume_token(token), "what is allowed is taken"
        tokens.append(token)
    return tokens


def test_too_complex_on_the_way_has_a_code_of_its_own(compiler):
    with pytest.raises(SchemaTooComplex, match="any further") as caught:
        walk(compiler.compile(task(GAPS)), seed=0)
    assert caught.value.code == "schema_too_complex"
    assert "\n" not in str(caught.value)


def test_a_strange_answer_costs_other_requests_nothing(make):
    """Requests of one schema share its lexer states: one request must not use up the limit."""
    compiler, alone = make(), make()
    victim, apart = compiler.compile(task(GAPS)), alone.compile(task(GAPS))
    begun = walk(victim, seed=1, most=50)
    for token in begun:
        assert apart.consume_token(token)
    for seed in range(2):
        with pytest.raises(SchemaTooComplex):
            walk(compiler.compile(task(GAPS)), seed)
    for matcher in (victim, compiler.compile(task(GAPS, begun))):
        np.testing.assert_array_equal(matcher.allowed(), apart.allowed())
    assert walk(victim, seed=2, most=50) == walk(apart, seed=2, most=50)


def test_how_far_an_answer_gets_does_not_depend_on_others(make):
    def length(compiler: GrammarCompiler) -> int:
        matcher, rng, count = compiler.compile(task(GAPS)), np.random.default_rng(7), 0
        assert matcher.consume_token(QUOTE)
        try:
            while matcher.allowed().any():
                assert matcher.consume_token(int(rng.choice(LETTERS)))
                count += 1
        except SchemaTooComplex:
            pass
        return count

    calm, busy = make(), make()
    with pytest.raises(SchemaTooComplex):
        walk(busy.compile(task(GAPS)), seed=0)
    assert length(calm) == length(busy) > 100


def test_a_row_too_wide_is_said(compiler):
    """An allowed token that makes the next row too large is not an internal error."""
    properties = {f"p{i}": {"type": "null"} for i in range(3000)}
    matcher = compiler.compile(
        task({"type": "object", "properties": properties, "minProperties": 0})
    )
    with pytest.raises(SchemaTooComplex, match="any further"):
        walk(matcher, seed=0, most=200)


# ------------------------------------------------------------------ memory of many schemas


def costly(number: int) -> str:
    """A short schema that needs about 50 MB."""
    return f'{{"type":"integer","multipleOf":{99_991 - number}}}'


def test_schemas_that_are_kept_take_bounded_memory(make):
    compiler = make(max_bytes=120 << 20)
    for number in range(4):  # more than fit at once: the oldest are evicted
        compiler.compile(task(costly(number)))
    assert compiler._taken() <= 120 << 20


def test_schemas_in_use_take_bounded_memory(make):
    compiler = make(max_bytes=120 << 20)
    held = []
    with pytest.raises(CapacityError, match="memory"):
        for number in range(6):
            held.append(compiler.compile(task(costly(number))))
    assert len(held) >= 2
    held.clear()
    assert compiler.compile(task(costly(9))).allowed().any(), "there is room again"


# ------------------------------------------------------------------ the helper


def trial(limit_s: float = 60.0) -> SchemaTrial:
    return SchemaTrial(DEMO_MODEL, VOCABULARY, EOS, limit_s)


def test_a_trial_says_what_a_schema_costs():
    one = trial()
    cost = one.cost(costly(0))
    assert cost.seconds > 0
    assert cost.nbytes > 20 << 20
    assert one.cost(INTEGER).nbytes < 8 << 20
    one.close()


def test_a_trial_ends_with_its_time():
    one = trial(limit_s=2.0)
    with pytest.raises(SchemaTooComplex, match=r"within 2 s of CPU time"):
        one.cost(json.dumps(HARM["patterns at once"]))
    assert one.cost(INTEGER).nbytes
    one.close()


def test_a_machine_without_a_free_processor_makes_no_schema_too_complex(monkeypatch, tmp_path):
    """The fork is paused before it compiles: it takes time, but no CPU time."""
    package = tmp_path / "sitecustomize.py"
    package.write_text(
        "import os, signal\n"
        "os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGSTOP))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    one = trial(limit_s=0.2)
    with pytest.raises(CapacityError, match=r"within 2\.4 s.*too busy") as caught:
        one.cost(INTEGER)
    assert caught.value.retry_after
    one.close()


def test_a_machine_without_a_free_thread_makes_no_schema_too_complex(monkeypatch, tmp_path):
    """The fork ended without a verdict, which counted as too complex for good."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, threading\n"
        "def full(thread):\n"
        '    raise RuntimeError("can\'t start new thread")\n'
        "os.register_at_fork(after_in_child=lambda: setattr(threading.Thread, 'start', full))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    one = trial()
    with pytest.raises(CapacityError, match="cannot be checked now: can't start new thread"):
        one.cost(INTEGER)
    one.close()


def test_a_helper_that_cannot_start_judges_no_schema(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(5)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = trial()
    with pytest.raises(CapacityError, match="cannot start: it ended with exit code 5"):
        one.cost(INTEGER)
    assert one._helper is None


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_helper_that_is_lost_is_replaced(blow):
    one = trial(limit_s=2.0)
    one.cost(INTEGER)
    pid = one._helper.pid
    os.kill(pid, blow)
    if blow == signal.SIGKILL:
        assert one._helper.exit_code(60) == -blow
    else:
        with pytest.raises(CapacityError) as caught:
            one.cost(INTEGER)
        assert caught.value.retry_after
    assert one.cost(INTEGER).nbytes
    assert one._helper.pid != pid
    one.close()


def test_closing_leaves_no_process():
    one = trial()
    one.cost(INTEGER)
    pid = one._helper.pid
    one.close()
    assert not Path(f"/proc/{pid}").exists()
    one.close()


def test_closing_waits_for_no_trial():
    one = trial(limit_s=60.0)
    one.cost(INTEGER)
    helper, errors = one._helper, []

    def ask() -> None:
        try:
            one.cost(json.dumps(HARM["patterns at once"]))
        except CapacityError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: children(helper.pid), what="the trial")
    one.close()
    asking.join(20)
    assert len(errors) == 1
    with pytest.raises(CapacityError):
        one.cost(INTEGER)


def test_a_helper_ends_with_its_worker():
    """Also during a trial that would never end."""
    program = f"""if True:
        import json, sys, threading
        from pathlib import Path
        from baton.engine.grammar.trial import SchemaTrial
        one = SchemaTrial(Path({str(DEMO_MODEL)!r}), {VOCABULARY}, {EOS}, 1.0)
        one.cost({INTEGER!r})
        print(one._helper.pid, flush=True)
        one.cost(sys.stdin.read())
    """
    worker = subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    pid = int(worker.stdout.readline())
    worker.stdin.write(json.dumps(HARM["patterns at once"]).encode())
    worker.stdin.close()
    wait_until(lambda: children(pid), what="the trial")
    worker.kill()
    worker.wait()
    worker.stdout.close()
    wait_until(lambda: not alive(pid), what="the helper's end")


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
