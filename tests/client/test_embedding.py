"""A call of ``embed`` without a connection: the window, the order, the first failure."""

import msgspec
import numpy as np
import pytest

from baton.client.description import Description
from baton.client.embedding import WINDOW, Embedding, embed_specs
from baton.client.events import Ended
from baton.client.model import ServedModel
from baton.proto.errors import (
    CapacityError,
    DeadlineExceeded,
    InputError,
    InternalError,
    TaskMismatch,
)


@pytest.fixture
def model(card):
    served = msgspec.structs.replace(card, task="embed", embedding_size=2)
    return ServedModel(Description(served, "", {}))


def ids(count):
    return [[5, 6, 7]] * count


def end(spec, value, **fields):
    vector = np.full(2, value, np.float32)
    return Ended(
        request_id=spec.request_id, position=3, status="end_of_sequence", embedding=vector, **fields
    )


def test_vectors_are_in_the_texts_order_however_they_come(model):
    specs = embed_specs(ids(5), {}, model)
    assert len({spec.request_id for spec in specs}) == 5
    assert {spec.context.task for spec in specs} == {"embed"}
    job = Embedding(specs, 2)
    assert job.start() == specs
    for index in (3, 0, 4, 2, 1):
        assert not job.done
        job.take(end(specs[index], index))
    assert job.done
    assert job.vectors.tolist() == [[i, i] for i in range(5)]


def test_only_a_window_is_in_flight(model):
    specs = embed_specs(ids(WINDOW + 3), {}, model)
    job = Embedding(specs, 2)
    first = job.start()
    assert len(first) == len(job.running) == WINDOW
    assert job.start() == []
    job.take(end(first[7], 1))
    job.take(end(first[9], 1))
    assert job.start() == specs[WINDOW : WINDOW + 2]


def test_a_deadline_is_the_calls(model):
    specs = embed_specs(ids(WINDOW + 2), {"deadline": 3.0}, model)
    job = Embedding(specs, 2, began=100.0)
    assert {spec.deadline for spec in job.start(100.5)} == {2.5}
    job.take(end(specs[0], 1))
    (later,) = job.start(102.0)
    assert (later.deadline, later.request_id) == (1.0, specs[WINDOW].request_id)
    job.take(end(specs[1], 1))
    with pytest.raises(DeadlineExceeded, match=rf"3 s passed after 2 of {WINDOW + 2} texts"):
        job.start(103.0)
    assert len(job.running) == WINDOW - 1, "who is to be cancelled"


def test_the_first_failure_ends_the_call_and_names_who_still_runs(model):
    specs = embed_specs(ids(3), {}, model)
    job = Embedding(specs, 2)
    job.start()
    error = CapacityError("full", retry_after=0.5)
    with pytest.raises(CapacityError, match="full"):
        job.take(Ended(request_id=specs[1].request_id, position=3, error=error))
    assert job.running == {specs[0].request_id, specs[2].request_id}


@pytest.mark.parametrize("vector", [None, np.zeros(3, np.float32)])
def test_an_end_without_the_vector_is_an_error(model, vector):
    (spec,) = embed_specs(ids(1), {}, model)
    job = Embedding([spec], 2)
    job.start()
    ended = Ended(request_id=spec.request_id, position=3, status="cancelled", embedding=vector)
    with pytest.raises(InternalError, match="no embedding"):
        job.take(ended)


def test_no_texts_are_no_requests(model):
    job = Embedding(embed_specs([], {}, model), 2)
    assert job.done
    assert job.vectors.shape == (0, 2)


def test_wrong_calls_are_refused_before_anything_is_sent(model, card):
    for nothing in ("text", None, 5):
        with pytest.raises(InputError, match="list of texts"):
            embed_specs(nothing, {}, model)
    with pytest.raises(InputError, match="cache_salt"):
        embed_specs(ids(1), {"cache_salt": "x"}, model)
    with pytest.raises(InputError, match="outside the vocabulary"):
        embed_specs([[5], [1 << 20]], {}, model)
    with pytest.raises(TaskMismatch, match="generation model"):
        embed_specs(ids(1), {}, ServedModel(Description(card, "", {})))


def test_options_travel_with_every_text(model):
    options = {"deadline": 3.0, "pool": "big", "pin": "strict", "target_endpoint": "ipc:///p"}
    for spec in embed_specs(ids(2), options, model):
        assert (spec.deadline, spec.pool, spec.pin) == (3.0, "big", "strict")
        assert spec.context.target_endpoint == "ipc:///p"


def test_request_ids_are_the_given_one_with_a_number(model):
    options = {"request_id": "mine", "gateway": "gateway-1"}
    assert [one.request_id for one in embed_specs(ids(1), options, model)] == ["mine"]
    several = embed_specs(ids(2), options, model)
    assert [one.request_id for one in several] == ["mine-0", "mine-1"]
    assert {one.gateway for one in several} == {"gateway-1"}
