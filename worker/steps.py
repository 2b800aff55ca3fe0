"""An engine's steps: planned, timed, counted.

Invariant: the compute thread has one step, and a second one queued only if the scheduler could plan
it ahead. Pure.
"""

from __future__ import annotations

from baton.engine.scheduling.events import Event as EngineEvent
from baton.engine.scheduling.plan import StepResult
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.step_time import StepTime

from .events import AbandonStep, RunStep
from .membership import EngineState


class EngineSteps:
    """The steps of one scheduler; ``times`` predicts their durations."""

    def __init__(self, scheduler: Scheduler, times: StepTime | None = None) -> None:
        self._scheduler = scheduler
        self._times = times or StepTime()
        self._done = 0
        self._predicted_s = 0.0  # of the running step

    @property
    def running(self) -> bool:
        """Whether a step runs or is queued."""
        return self._scheduler.steps_out > 0

    def plan(self, now: float) -> list[AbandonStep | RunStep]:
        """Return the steps to run now, and those to end because all their sequences are aborted."""
        actions: list[AbandonStep | RunStep] = [
            AbandonStep(step) for step in self._scheduler.take_unwanted()
        ]
        if not self.running:
            plan = self._scheduler.plan(now)
            if plan is None:
                return actions
            self._predicted_s = self._times.predict(plan.num_tokens)
            actions.append(RunStep(plan))
        ahead = self._scheduler.plan_ahead()
        if ahead is not None:
            actions.append(RunStep(ahead))
        return actions

    def idle_events(self) -> list[EngineEvent]:
        """Return what happened outside of a step; a step's result includes such events."""
        return [] if self.running else self._scheduler.take_events()

    def finish(self, result: StepResult, now: float) -> list[EngineEvent]:
        """Apply a step's result."""
        self._done += 1
        if not result.abandoned:
            self._times.learn(result.num_tokens, result.seconds)
        return self._scheduler.apply(result, now)

    def state(self, layers: int) -> EngineState:
        """Return the progress that heartbeats report; ``layers``: computed since the start."""
        return EngineState(self._done + layers, self.running, self._predicted_s)
