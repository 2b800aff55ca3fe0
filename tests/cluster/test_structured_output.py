"""Answers that are instances of a JSON schema, whatever happens to the workers meanwhile.

Temperature 1 on the embedded model, which knows nothing of JSON: what it does right, the
grammar made it do.
"""

import asyncio
import json
import os
import signal

import jsonschema
import pytest

from baton.client import AsyncClient
from baton.client.output import Output
from baton.proto.contexts.status import GenerationStatus
from baton.proto.contexts.text import TextContext
from baton.proto.errors import BatonError, DeadlineExceeded, InputError, SchemaTooComplex
from baton.proto.sampling import SamplingParams

from ..engine.schemas import BOOL, SCHEMAS, SMALL, array, check_instance, record, repeated
from ..engine.test_hostile_schemas import HARM
from ..processes import wait_until
from ..suite.short import some_long

pytestmark = pytest.mark.cluster

PROMPT = "Say it as JSON: "
MOST = 500
# Bounds that take so many tokens to reach that a worker dies in between.
LONG_SCHEMAS = {
    f"long {i}": record(rows=array(record(id=SMALL, on=BOOL), 16, 18)) for i in range(4)
}
WORK = {**SCHEMAS, **LONG_SCHEMAS}


@pytest.fixture(scope="module")
def pools(shared_cluster):
    """Small pools, so that requests are preempted as well."""
    return shared_cluster(prefill=1, decode=2, kv_memory="64MiB", decode_kv_blocks=256)


@pytest.fixture
def clean(pools):
    pools.wait_ready()
    yield pools
    pools.wait_idle()


@pytest.fixture
def client(clean):
    with clean.client() as client:
        yield client


def params(seed: int, **fields) -> SamplingParams:
    fields = {"max_new_tokens": MOST, "temperature": 1.0, **fields}
    return SamplingParams(seed=seed, **fields)


def run_all(
    address: str, work=WORK, disturb=None, at=None, pinned=LONG_SCHEMAS, seeds=0, most=MOST
) -> dict[str, list[Output]]:
    """One request per schema, all at once; ``disturb`` sees what came so far.

    ``at``: endpoint of the decode worker that the ``pinned`` ones begin on. ``seeds``: the first.
    """
    outputs: dict[str, list[Output]] = {name: [] for name in work}
    errors: dict[str, BatonError] = {}

    async def follow(client: AsyncClient, seed: int, name: str) -> None:
        options = {"json_schema": work[name], "log_probabilities": 1}
        if name in pinned:
            options["target_endpoint"] = at
        sampling = params(seed, max_new_tokens=most)
        try:
            async for output in client.generate(PROMPT, sampling, **options):
                outputs[name].append(output)
        except BatonError as error:
            errors[name] = error

    async def body() -> None:
        async with (
            asyncio.timeout(90),
            AsyncClient(address) as client,
            asyncio.TaskGroup() as group,
        ):
            for seed, name in enumerate(work, seeds):
                group.create_task(follow(client, seed, name))
            if disturb is not None:
                group.create_task(disturb(outputs))

    asyncio.run(body())
    assert errors == {}
    return outputs


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def text(outputs: list[Output]) -> str:
    return "".join(output.text or "" for output in outputs)


def log_probs(outputs: list[Output]) -> list[float]:
    return [
        value
        for output in outputs
        for entry in output.log_probabilities or ()
        for value in entry.token_log_probabilities
    ]


def ended(outputs: list[Output]) -> bool:
    return bool(outputs) and outputs[-1].final_status in (
        GenerationStatus.END_OF_SEQUENCE,
        GenerationStatus.MAXIMUM_LENGTH,
    )


def check(answers: dict[str, list[Output]], least: float, work=WORK) -> None:
    """Whatever ended by itself is an instance; ``least`` of all did."""
    finished = [
        name
        for name, outputs in answers.items()
        if outputs[-1].final_status is GenerationStatus.END_OF_SEQUENCE
    ]
    for name in finished:
        check_instance(text(answers[name]), work[name])
        assert len(log_probs(answers[name])) == len(tokens(answers[name]))
    assert len(finished) >= least * len(answers), set(answers) - set(finished)


@pytest.fixture(scope="module")
def undisturbed(pools):
    return run_all(pools.address)


def test_every_finished_answer_is_an_instance(undisturbed):
    assert len(SCHEMAS) == 50
    check(undisturbed, least=0.9)


def test_a_killed_decode_worker_changes_no_token(clean, undisturbed):
    async def disturb(outputs: dict[str, list[Output]]) -> None:
        while sum(len(tokens(outputs[name])) >= 20 for name in LONG_SCHEMAS) < len(LONG_SCHEMAS):
            await asyncio.sleep(0.002)
        os.kill(pid, signal.SIGKILL)

    def replayed() -> int:
        with clean.client() as client:
            return client.status()["router"]["requests"]["replayed"]

    pid, before = clean.pids()["decode-0"], replayed()
    endpoint = clean.workers()["decode-0"]["endpoint"]
    answers = run_all(clean.address, disturb=disturb, at=endpoint)
    assert replayed() > before, "nothing ran on the lost worker"
    for name, outputs in answers.items():
        assert tokens(outputs) == tokens(undisturbed[name]), name
        assert log_probs(outputs) == log_probs(undisturbed[name]), name
    check(answers, least=0.9)
    clean.wait_replaced("decode-0", pid)


# ------------------------------------------------------------------ each of the fifty

MID_TOKENS = 3
"""The first comes from prefill; with so many an answer is under way in decode."""


@pytest.fixture(scope="module")
def wide(shared_cluster):
    """Decode workers that run all fifty at once."""
    return shared_cluster(prefill=1, decode=2, kv_memory="128MiB", max_num_seqs=64)


@pytest.fixture(scope="module")
def longer(undisturbed):
    """Every schema, as often in an array as makes an answer of some hundred tokens."""
    return {
        name: repeated(schema, -(-240 // len(tokens(undisturbed[name]))))
        for name, schema in SCHEMAS.items()
    }


@pytest.fixture(scope="module")
def calm(wide, longer):
    return run_all(wide.address, longer, most=1500)


@pytest.mark.long
def test_each_of_fifty_answers_is_drawn_at_temperature_1_and_an_instance(wide, longer, calm):
    assert len({json.dumps(schema) for schema in longer.values()}) == 50
    check(calm, least=0.96, work=longer)
    others = run_all(wide.address, longer, most=1500, seeds=1000)
    check(others, least=0.96, work=longer)
    drawn = [name for name in longer if tokens(calm[name]) != tokens(others[name])]
    assert len(drawn) >= 49, "another seed draws another answer, but for the one constant"


@pytest.mark.long
def test_each_of_fifty_answers_loses_its_decode_worker_on_the_way(wide, longer, calm):
    """Killed again until it has been in the middle of every one of them."""
    lost: set[str] = set()
    for _ in range(4):  # more deaths in a minute would end the cluster
        if lost == set(longer):
            break
        endpoint = wide.workers()["decode-0"]["endpoint"]
        run_all(wide.address, longer, at=endpoint, pinned=longer, most=2)  # compiles them all
        lost |= lose_worker(wide, longer, calm, set(longer) - lost)
    assert lost == set(longer), set(longer) - lost


def lose_worker(wide, longer, calm, wanted: set[str]) -> set[str]:
    """All on one worker, killed in the middle of the ``wanted`` answers; returns the unfinished."""
    struck: set[str] = set()

    async def disturb(outputs: dict[str, list[Output]]) -> None:
        while not all(len(tokens(outputs[n])) >= MID_TOKENS or ended(outputs[n]) for n in wanted):
            await asyncio.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        struck.update(
            n for n, got in outputs.items() if len(tokens(got)) >= MID_TOKENS and not ended(got)
        )

    def replayed() -> int:
        with wide.client() as client:
            return client.status()["router"]["requests"]["replayed"]

    pid, before = wide.pids()["decode-0"], replayed()
    endpoint = wide.workers()["decode-0"]["endpoint"]
    answers = run_all(wide.address, longer, disturb, endpoint, pinned=longer, most=1500)
    assert replayed() - before >= 0.9 * len(struck), "they went on elsewhere"
    for name, outputs in answers.items():
        assert tokens(outputs) == tokens(calm[name]), name
        assert log_probs(outputs) == log_probs(calm[name]), name
        assert outputs[-1].final_status is calm[name][-1].final_status, name
    check(answers, least=0.96, work=longer)
    wide.wait_replaced("decode-0", pid)
    return struck


@pytest.mark.long
def test_preempted_answers_change_no_token(cluster, undisturbed):
    small = cluster(prefill=1, decode=1, decode_kv_blocks=64, max_num_seqs=16)
    answers = run_all(small.address)
    wait_until(lambda: small.workers()["decode-0"]["preemptions"], what="a report of preemptions")
    for name, outputs in answers.items():
        assert tokens(outputs) == tokens(undisturbed[name]), name


# ------------------------------------------------------------------ beside other options

SCHEMA = record(
    word={"enum": ["left", "right"]}, n={"type": "integer", "maximum": 99, "minimum": 1}
)


def test_text_mappings_and_contexts_say_the_same(client):
    def answer(prompt, sampling, **options):
        return tokens(list(client.generate(prompt, sampling, **options)))

    # A context is complete; beside a text, what is not set is the model's default.
    complete = params(1, temperature=0.8, top_p=0.95, top_k=-1)
    expected = answer(PROMPT, complete, json_schema=SCHEMA)
    assert answer(PROMPT, complete, json_schema=json.dumps(SCHEMA)) == expected
    model = client.describe().card
    ids = client._model().tokenizer.encode(PROMPT)
    context = TextContext(
        max_length=model.max_length,
        tokens=ids,
        eos_token_ids=set(model.eos_token_ids),
        json_schema=json.dumps(SCHEMA),
        sampling_params=complete,
    )
    assert answer(context, None) == expected


def test_greedy_chat_answers(client):
    messages = [{"role": "user", "content": "left or right?"}]
    for _ in range(2):
        outputs = list(client.chat(messages, params(0, temperature=0), json_schema=SCHEMA))
        jsonschema.validate(json.loads(text(outputs)), SCHEMA)


def test_a_minimum_length_does_not_break_an_instance(client):
    outputs = list(client.generate(PROMPT, params(2, min_new_tokens=200), json_schema=SCHEMA))
    assert outputs[-1].final_status is GenerationStatus.END_OF_SEQUENCE
    jsonschema.validate(json.loads(text(outputs)), SCHEMA)


@pytest.mark.parametrize(
    "name", some_long("order", "tool call", "unicode names", "one of", "linked list")
)
def test_everything_else_one_may_ask_for_leaves_it_an_instance(client, name):
    """Penalties, filters, a minimum, stops that never come, log-probabilities: all at once."""
    sampling = params(
        6, min_new_tokens=60, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5,
        top_k=50, top_p=0.95, min_p=0.001, stop=["never this", "\x07"], stop_token_ids=[1],
        max_new_tokens=1500,
    )  # fmt: skip
    runs = [
        list(client.generate(PROMPT, sampling, json_schema=SCHEMAS[name], log_probabilities=5))
        for _ in range(2)
    ]
    for outputs in runs:
        assert outputs[-1].final_status is GenerationStatus.END_OF_SEQUENCE
        check_instance(text(outputs), SCHEMAS[name])
        assert len(log_probs(outputs)) == len(tokens(outputs))
    assert tokens(runs[0]) == tokens(runs[1])


def in_flight(client) -> int:
    return client.status()["router"]["requests"]["in_flight"]


@pytest.mark.parametrize("victim", some_long("decode-0", "prefill-0", "router"))
def test_who_dies_while_a_grammar_compiles_costs_nothing(clean, client, victim):
    """A quarter of a second to compile, in prefill and again in decode; the schema is new."""
    at = clean.workers()["decode-0"]["endpoint"]
    pid = clean.pids()[victim]
    primes = {"decode-0": 49_999, "prefill-0": 49_993, "router": 49_991}
    schema = {"type": "integer", "multipleOf": primes[victim]}
    sampling = params(3, max_new_tokens=60)
    with clean.client() as one:
        running = one.generate(PROMPT, sampling, json_schema=schema, target_endpoint=at)
        first = [next(running)] if victim == "decode-0" else []  # compiled in prefill by then
        wait_until(lambda: in_flight(one), what="a request")
        os.kill(pid, signal.SIGKILL)
        outputs = [*first, *running]
    wait_until(lambda: clean.pids().get(victim) not in (None, pid), what=f"another {victim}")
    clean.wait_ready()
    if outputs[-1].final_status is GenerationStatus.END_OF_SEQUENCE:
        check_instance(text(outputs), schema)
    again = list(client.generate(PROMPT, sampling, json_schema=schema))
    assert tokens(outputs) == tokens(again)


def test_a_stop_string_ends_inside_an_instance(client):
    outputs = list(client.generate(PROMPT, params(3, stop=['"n"']), json_schema=SCHEMA))
    assert outputs[-1].final_status is GenerationStatus.END_OF_SEQUENCE
    assert text(outputs).lstrip().startswith("{")
    assert '"n"' not in text(outputs)
    assert '"word"' in text(outputs)


def test_the_longest_answer_is_cut(client):
    outputs = list(client.generate(PROMPT, params(4, max_new_tokens=5), json_schema=SCHEMA))
    assert outputs[-1].final_status is GenerationStatus.MAXIMUM_LENGTH
    assert len(tokens(outputs)) == 5


def test_cancelled_answers_leave_nothing(client):
    for count in range(6):
        generation = client.generate(PROMPT, params(count), json_schema=WORK["long 0"])
        for _ in range(count % 3):  # the first ones while the grammar is compiled
            next(generation)
        generation.close()
    outputs = list(client.generate(PROMPT, params(1), json_schema=SCHEMA))
    jsonschema.validate(json.loads(text(outputs)), SCHEMA)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"type":"array","uniqueItems":true}', "uniqueItems"),
        ('{"type":"string","pattern":"(("}', "unclosed group"),
        ('{"$ref":"#/nowhere"}', "nowhere"),
        ("{", "not JSON"),
        ('{"a":' * 65, "levels"),
        ({"description": "x" * (128 << 10)}, "characters"),
    ],
)
def test_a_bad_schema_is_one_input_error(client, schema, message):
    running = client.generate(PROMPT, params(5), json_schema=WORK["long 1"])
    first = next(running)
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            list(client.generate(PROMPT, params(1), json_schema=schema))
    outputs = [first, *running]
    if outputs[-1].final_status is GenerationStatus.END_OF_SEQUENCE:
        jsonschema.validate(json.loads(text(outputs)), WORK["long 1"])


def test_a_bad_schema_inside_a_context_is_refused_by_the_cluster(client):
    for schema in ("{", '{"a":' * 65, '{"type":"colour"}'):
        context = TextContext(max_length=64, tokens=[5, 6], eos_token_ids={2}, json_schema=schema)
        with pytest.raises(InputError, match="json_schema"):
            list(client.generate(context))


@pytest.mark.parametrize("name", ["chain of nests", "patterns at once"])
def test_a_schema_that_would_end_a_worker_is_one_error(clean, client, name):
    """Its stack, or its memory: no process is restarted, and others never notice."""
    before = clean.pids()
    running = client.generate(PROMPT, params(5), json_schema=WORK["long 1"])
    first = next(running)
    for _ in range(2):
        with pytest.raises(SchemaTooComplex, match="too complex"):
            list(client.generate(PROMPT, params(1), json_schema=HARM[name]))
    outputs = [first, *running]
    if outputs[-1].final_status is GenerationStatus.END_OF_SEQUENCE:
        jsonschema.validate(json.loads(text(outputs)), WORK["long 1"])
    assert clean.pids() == before


def test_a_schema_too_complex_in_mid_answer_is_one_error_behind_its_tokens(client):
    """Too many optional properties, but only after some others: decode meets them."""
    wide = {"type": "object", "properties": {f"p{i}": BOOL for i in range(3000)}}
    received = []
    with pytest.raises(SchemaTooComplex, match="any further"):
        for output in client.generate(PROMPT, params(1), json_schema=record(a=SMALL, b=wide)):
            received += output.tokens
    assert len(received) > 3
    with pytest.raises(SchemaTooComplex, match="any further"):
        list(client.generate(PROMPT, params(1), json_schema=wide))  # prefill meets it


def test_ignore_eos_is_refused(client):
    with pytest.raises(InputError, match="ignore_eos"):
        client.generate(PROMPT, params(1, ignore_eos=True), json_schema=SCHEMA)


def test_a_deadline_holds(client):
    endless = {"type": "array", "items": {"type": "integer"}, "minItems": 5000}
    with pytest.raises(DeadlineExceeded):
        list(client.generate(PROMPT, params(1, max_new_tokens=1900), json_schema=endless,
                             deadline=0.2))  # fmt: skip


def test_the_command_line(clean, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    words = ["generate", PROMPT, f"--json-schema={file}", "--seed=3", "--temperature=1"]
    done = clean.command(*words)
    assert done.returncode == 0, done.stderr
    jsonschema.validate(json.loads(done.stdout), SCHEMA)
