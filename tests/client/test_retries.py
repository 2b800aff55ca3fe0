"""Requests that the cluster refuses for lack of room are submitted again, as often as asked."""

import sys
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from baton.client.events import Ended, Start, Stop
from baton.proto.errors import CapacityError, EndpointDead
from baton.proto.ids import request_key
from baton.proto.wire.messages import FinalAck, Submit, Submitted, Terminal, TokenRun, Tokens

from .bench import ME, SECRET, Bench, messages, spec

sys.path.insert(0, str(Path(__file__).parents[1]))
from work_counter import opcodes


def start(bench, name="r", max_retries=2, **fields):
    bench.do(Start(replace(spec(name, **fields), max_retries=max_retries)))
    (submit,) = messages(bench.actions, Submit)
    return submit


def refuse(bench, submit, retry_after=1.0, code="overloaded"):
    key = request_key(ME, submit.request_id, submit.serial)
    return bench.hear(Terminal(request=key, code=code, message="full", retry_after=retry_after))


def admit(bench, submit):
    key = request_key(ME, submit.request_id, submit.serial)
    bench.hear(Submitted(request_id=submit.request_id, request=key, secret=SECRET))
    return key


def end(bench, key):
    bench.hear(Tokens(runs=[TokenRun(key, 1, 3, [7])]))
    bench.hear(Terminal(request=key, status="maximum_length", position=4))


def test_a_refused_request_is_submitted_again_after_the_delay_under_another_key():
    bench = Bench()
    first = start(bench)
    refuse(bench, first)
    assert [type(message) for message in bench.sent] == [FinalAck] and not bench.ended
    assert not messages(bench.later(0.9), Submit)
    (again,) = messages(bench.later(1.0), Submit)
    assert (again.request_id, again.context) == ("r", first.context)
    assert again.serial != first.serial
    end(bench, admit(bench, again))
    assert [one.status for one in bench.ended] == ["maximum_length"]


def test_after_the_last_retry_the_refusal_is_the_users():
    bench = Bench()
    submit = start(bench, max_retries=2)
    assert submit.refusals == 0
    for refusals in (1, 2):
        refuse(bench, submit)
        (submit,) = messages(bench.later(2.5), Submit)[:1]
        assert submit.refusals == refusals
    refuse(bench, submit, retry_after=3.0)
    (ended,) = bench.ended
    assert isinstance(ended.error, CapacityError) and ended.error.retry_after == 3.0


@pytest.mark.parametrize("code", ["endpoint_dead", "invalid_input"])
def test_only_a_lack_of_room_is_a_reason(code):
    bench = Bench()
    refuse(bench, start(bench), code=code)
    assert len(bench.ended) == 1


def test_without_retries_the_first_refusal_counts():
    bench = Bench()
    refuse(bench, start(bench, max_retries=0))
    assert isinstance(bench.ended[0].error, CapacityError)
    assert not isinstance(bench.ended[0].error, EndpointDead)


def test_the_end_of_another_request_makes_room_for_the_oldest():
    bench = Bench()
    keys = [admit(bench, start(bench, name)) for name in "ab"]
    for name in "cde":
        refuse(bench, start(bench, name), retry_after=20.0)
    for key, name in zip(keys, "cd", strict=True):
        end(bench, key)
        (submit,) = messages(bench.later(0.1), Submit)
        assert submit.request_id == name


def test_the_deadline_counts_while_a_request_waits():
    bench = Bench()
    refuse(bench, start(bench, deadline=3.0), retry_after=60.0)
    ended = [action for action in bench.later(6.0) if isinstance(action, Ended)]
    assert [one.error.code for one in ended] == ["deadline_exceeded"]


def test_a_waiting_request_is_cancelled_at_once():
    bench = Bench()
    refuse(bench, start(bench), retry_after=60.0)
    bench.do(Stop("r", report=True))
    assert [one.status for one in bench.ended] == ["cancelled"]
    assert not messages(bench.later(70.0), Submit)


def test_the_end_of_a_request_costs_the_same_among_many_that_wait():
    bench = Bench()
    keys = [admit(bench, start(bench, f"a{n}")) for n in range(60)]
    for n in range(100):
        refuse(bench, start(bench, f"b{n}"), retry_after=20.0)
    costs = [opcodes(partial(end, bench, key)) for key in keys]  # each wakes a waiting request
    assert costs[-1] <= costs[0] + 10
