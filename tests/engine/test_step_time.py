from baton.engine.scheduling.step_time import UNKNOWN_S, StepTime


def test_nothing_measured_means_patience():
    assert StepTime().predict(100) == UNKNOWN_S


def test_larger_steps_are_predicted_in_proportion():
    times = StepTime()
    times.learn(1, 0.004)
    assert times.predict(1) == 0.004
    assert times.predict(512) == 512 * 0.004


def test_smaller_steps_never_get_less_than_a_measured_larger_one():
    times = StepTime()
    times.learn(512, 2.0)
    assert times.predict(8) == 2.0


def test_a_slow_step_counts_at_once_and_a_quick_one_slowly():
    times = StepTime()
    times.learn(16, 0.1)
    times.learn(17, 1.0)
    assert times.predict(16) == 1.0
    times.learn(16, 0.1)
    assert 0.9 < times.predict(16) < 1.0


def test_a_closer_measurement_replaces_the_proportion():
    times = StepTime()
    times.learn(1, 0.01)
    times.learn(300, 0.2)
    assert times.predict(300) == 0.2
    assert times.predict(600) == 0.4


def test_one_stall_in_a_small_step_does_not_multiply():
    times = StepTime()
    times.learn(64, 0.02)
    times.learn(1, 2.5)
    assert times.predict(1) == times.predict(20) == 2.5
    assert times.predict(64) == 0.02


def test_the_first_step_of_a_size_may_take_long_without_meaning_much():
    times = StepTime()
    times.learn(1, 0.005)
    times.learn(8, 22.0)  # a graph was captured
    assert times.predict(8) == 8 * 0.005
    assert times.predict(512) == 512 * 0.005
    times.learn(8, 1.0)  # no step is the first of its size twice
    assert times.predict(8) == 1.0
