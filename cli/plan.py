"""``baton plan``: which mode and split serve a recorded load best, on a simulated clock."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.deploy.config import ServeSettings
from baton.deploy.plan.hub import with_local_model
from baton.forecast.calibration import Adapted
from baton.forecast.cluster import Slo
from baton.forecast.goodput import EDF, FCFS, Cluster
from baton.forecast.moves import Moves
from baton.forecast.plan import Plan, make_plan, shortened
from baton.forecast.service import ServiceModel, read_service
from baton.loadgen.modes import ADAPTIVE, parse_configuration
from baton.loadgen.traces import Arrival, read_trace
from baton.proto.errors import ConfigError, InputError

from .numbers import at_least_one, limits
from .parser import warn

MAX_WORKERS = 16
REQUESTS = 2000
SHOWN = 12
_DEFAULT = "h100x2-70b"
EPILOG = """\
Every mode and split plays the trace on modelled workers, with the router's own policy and decider.
Goodput is the highest rate, in multiples of the trace's, at which 95 % of the requests keep both
limits. Example: baton plan m/ --trace load.csv --workers 4 --slo ttft=2s,itl=50ms
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser(
        "plan", help="find the mode and split for a recorded load", epilog=EPILOG
    )
    parser.add_argument(
        "model", metavar="MODEL", help="model to serve; its steps are measured here"
    )
    parser.add_argument(
        "--trace", required=True, metavar="FILE",
        help="CSV or JSON lines of Mooncake, Azure or BurstGPT, or a file of benchmarks/traces",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=_workers, required=True, metavar="N",
        help=f"number of workers to use, 2 to {MAX_WORKERS}",
    )  # fmt: skip
    parser.add_argument(
        "--slo", type=limits, required=True, metavar="ttft=1s,itl=50ms",
        help="limits of the time to first token and of the mean time between tokens",
    )  # fmt: skip
    parser.add_argument(
        "--step-times", metavar="FILE",
        help="times of steps as JSON (baton plan --json has them) instead of a measurement; "
        f"{_DEFAULT}: a 70B model with FP8 weights on two H100",
    )  # fmt: skip
    parser.add_argument(
        "--requests", type=at_least_one, default=REQUESTS, metavar="N",
        help=f"play the first N requests [{REQUESTS}]",
    )  # fmt: skip
    parser.add_argument(
        "--now", type=_running, metavar="[adaptive:]PREFILL:DECODE",
        help="a running cluster: print also which workers should change their role, and when",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    now: Cluster | None = arguments.now
    if now is not None and now.prefill + now.decode != arguments.workers:
        raise ConfigError(f"--now has another number of workers than {arguments.workers}")
    whole = read_trace(Path(arguments.trace), arguments.requests)
    service, learned = _service(arguments)
    trace = shortened(whole, service.max_length)
    long = [one for one in whole if 0 < service.max_length < one.prompt + one.output]
    if long:
        warn(_shortened(long, len(whole), service.max_length))
    plan = make_plan(trace, service, arguments.workers, Slo(*arguments.slo), now)
    if arguments.json:
        content = {
            "command": plan.command(arguments.model),
            "step_times": service,
            "step_error": None if learned is None else learned.error,
            "calibration": None
            if learned is None
            else {"prefill": learned.prefill, "decode": learned.decode},
            "shortened": len(long),
            **msgspec.structs.asdict(plan),
        }
        print(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
    else:
        if learned is not None:
            error = learned.error
            print(f"steps measured on this machine; mean error of the fit {error:.0%}")
            print("\n".join(learned.lines()))
            print(f"differences (worse) below {error:.0%} mean nothing; to repeat a plan with the")
            print("same times, keep the output of --json as FILE and give --step-times FILE")
        print("\n".join(lines(plan, arguments.model)))
    return 0


def _shortened(long: Sequence[Arrival], requests: int, longest: int) -> str:
    refused = sum(one.prompt >= longest for one in long)
    return (
        f"{len(long)} of {requests} requests exceed the model's context of {longest} tokens "
        "and are shortened here; a cluster refuses "
        f"{refused} of them, whose prompts alone are too long"
    )


def _service(arguments: argparse.Namespace) -> tuple[ServiceModel, Adapted | None]:
    """Return the times of steps, and what was learned if they were measured."""
    if arguments.step_times == _DEFAULT:
        return ServiceModel(), None
    if arguments.step_times is not None:
        return read_service(Path(arguments.step_times)), None
    from baton.deploy.plan.plan import runner_of  # all of them load the engine
    from baton.forecast.learn import calibrated
    from baton.forecast.observe import calibrate

    settings = ServeSettings(model=arguments.model, prefill=1, decode=arguments.workers - 1)
    settings = with_local_model(settings, warn)
    runner = runner_of(settings, "decode")
    seen = calibrate({"model": settings.model}, runner)
    learned = calibrated(runner, seen, settings.step_time, settings.max_num_batched_tokens)
    return learned.service, learned


def lines(plan: Plan, model: str) -> list[str]:
    """Return the plan as text."""
    best = plan.best
    tails = f"{'TTFT p99':>11}{'ITL p99':>12}"
    limits = f"first token {plan.slo_ttft:g} s, {plan.slo_itl * 1e3:g} ms between tokens"
    found = [
        f"{plan.requests} requests, {plan.rate:.2f} per second; limits: {limits}",
        "",
        f"{'mode':15}{'prefill':>8}{'decode':>8}{'order':>7}{'kept':>8}{'goodput':>9}{'worse':>8}"
        + tails,
    ]
    for one in plan.choices[:SHOWN]:
        worse = f"{one.worse:.0%}" if one is not best else "-"
        found.append(
            f"{one.mode:15}{one.prefill:8}{one.decode:8}{one.order:>7}{one.kept:8.1%}"
            f"{one.goodput:9.2f}{worse:>8}{one.ttft_p99:9.2f} s{one.itl_p99 * 1e3:9.1f} ms"
        )
    if not best.goodput:
        return [*found, "", "no mode keeps these limits at any rate: workers are too slow for them"]
    return [*found, *_moves(plan.moves), "", plan.command(model)]


def _moves(found: Moves | None) -> list[str]:
    """Return the lines of the changes of role."""
    if found is None:
        return []
    gain = f"{found.gain:+.0%}" if math.isfinite(found.gain) else "from nothing"
    head = (
        f"{found.mode} with changes of role: goodput {found.goodput:.2f} instead of "
        f"{found.goodput_now:.2f} ({gain}), kept {found.kept:.1%} instead of {found.kept_now:.1%}"
    )
    steps = [
        f"{'now' if not one.at else f'after {one.at:.0f} s of the trace'}: {one.command}"
        for one in found.moves
    ]
    return ["", head, *steps]


def _running(text: str) -> Cluster:
    try:
        found = parse_configuration(text)
    except InputError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
    if not found.prefill or not found.decode:
        raise argparse.ArgumentTypeError("only a cluster of both pools has workers to change")
    return Cluster(found.mode, found.prefill, found.decode, EDF if found.mode == ADAPTIVE else FCFS)


def _workers(text: str) -> int:
    value = at_least_one(text)
    if not 2 <= value <= MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"workers must be 2 to {MAX_WORKERS}, not {value}")
    return value
