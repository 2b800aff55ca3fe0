"""``baton status``: requests, throughput, latencies and workers of a running cluster.

With ``-v`` also recent handoffs and dropped messages; ``--watch`` repeats it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from baton.client import Client
from baton.deploy.controller.admin import Overview
from baton.deploy.controller.health import DEGRADED
from baton.deploy.local.banner import dashboard_of
from baton.deploy.messages import counted, duration
from baton.deploy.report import (
    DRAINED,
    ClusterReport,
    ExtensionReport,
    HandoffRecord,
    RouterReport,
    WorkerReport,
)
from baton.deploy.roles import GATEWAY, POOLS, ROUTER
from baton.deploy.supervise.core import Phase
from baton.proto.errors import BatonError, ConnectionLost, VersionMismatch
from baton.runtime.process.log import printable
from baton.runtime.process.memory import command_of, family_of, parent_of, share_of, size_text

from .cluster import addresses_of, keys_of, parsed
from .numbers import count, seconds
from .operator import add_operator, overview

HANDOFFS = 16
WATCH_S = 2.0
LEAST_WATCH_S = 0.1
_CLEAR = "\x1b[H\x1b[2J"
EXPECTED_DROPS = frozenset({"repeated_tokens", "late_attempt", "unknown_request", "stale_kv_frame"})
"""Drops of a healthy cluster, which ``--json`` and the metrics have, and ``-v`` does not show.

Both workers of a handoff send the first token. After a cancel, messages and KV frames of the
request are still on their way."""
READY = "ready"
"""State of a worker that receives requests, in reports of routers and controller."""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("status", help="show requests, latencies and workers of a cluster")
    add_operator(parser)
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also recent handoffs and dropped messages"
    )
    parser.add_argument(
        "--watch",
        type=seconds,
        nargs="?",
        const=WATCH_S,
        metavar="SECONDS",
        help=f"show it again every {WATCH_S:g} seconds, or as often as given, until Ctrl-C",
    )
    parser.add_argument(
        "--handoffs",
        type=count,
        metavar="N",
        help=f"recent handoffs to list [{HANDOFFS} with -v or --json, else 0]",
    )
    parser.add_argument(
        "--requests",
        type=count,
        default=100,
        metavar="N",
        help="with --json: recent requests to describe [100]; baton trace shows them as text",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report of each router, with ``--watch`` again and again until Ctrl-C.

    Raises BatonError if no router answers.
    """
    if arguments.watch is None:
        _show(arguments)
        return 0
    while True:
        if sys.stdout.isatty():
            print(_CLEAR, end="")
        try:
            _show(arguments)
        except ConnectionLost as problem:  # the cluster may come back
            print(printable(f"baton: {problem}"))
        print(flush=True)
        time.sleep(max(LEAST_WATCH_S, arguments.watch))


def _show(arguments: argparse.Namespace) -> None:
    addresses = addresses_of(arguments)
    controller = overview(arguments)  # before the routers, whose reports are then newer
    answers = {address: _ask(address, arguments) for address in addresses}
    if not any(isinstance(answer, dict) for answer in answers.values()):
        if controller is not None:
            print("\n".join(describe_controller(controller)), flush=True)
        raise next(answer for answer in answers.values() if isinstance(answer, BatonError))
    if arguments.json:
        shown = _as_json(answers)
        if controller is not None:
            shown["controller"] = msgspec.to_builtins(controller)
        print(json.dumps(shown, indent=2))
        return
    if controller is not None:
        reports = [parsed(answer) for answer in answers.values() if isinstance(answer, dict)]
        print("\n".join(describe_controller(controller, reports)), end="\n\n")
    for number, (address, answer) in enumerate(answers.items()):
        if len(answers) > 1:
            print("" if number == 0 else "\n", printable(_heading(address, answer)), sep="")
        if isinstance(answer, dict):
            report = parsed(answer)
            memory = memory_on_this_host(report)
            print("\n".join(describe(report, verbose=arguments.verbose, memory=memory)))


def describe_controller(found: Overview, reports: Sequence[ClusterReport] = ()) -> list[str]:
    """Lines with the target and actual size of each pool, and the progress of a rollout.

    The controller learns of a suspect worker last, and some of its stages are not router states.
    So a worker counts as ready only if the routers of ``reports`` also report the worker as ready.
    """
    states = {
        worker.id: worker.state
        for report in reports
        for worker in report.workers
        if worker.state != READY
    }
    lines = [f"{DEGRADED}: {problem}" for problem in found.problems]
    gateways = any(member.role == GATEWAY for member in found.members)
    fixed = [(ROUTER, 0), (GATEWAY, 0)] if gateways else [(ROUTER, 0)]
    for role, wanted in (*fixed, *found.targets.items()):
        stages = Counter(
            states.get(member.name, READY) if member.stage == READY else member.stage
            for member in found.members
            if member.role == role
        )
        others = [f"{count} {stage}" for stage, count in sorted(stages.items()) if stage != READY]
        wanted = wanted or (sum(stages.values()) if (role, 0) in fixed else 0)
        extra = f"  ({', '.join(others)})" if others else ""
        lines.append(f"{role:<12} {stages[READY]} of {wanted} ready{extra}")
    if found.http and gateways:
        lines.append(f"HTTP         {found.http}")
        lines.append(f"dashboard    {dashboard_of(found.http)}")
    if found.phase != Phase.SERVING.value:  # a serving cluster lists these among its problems
        lines += [f"{m.name}: waits for a host: {m.note}" for m in found.members if m.note]
    if found.rollout:
        lines.append(f"rollout      {found.rollout}")
    if found.role_change:
        lines.append(f"role change  {found.role_change}")
    return [*map(printable, lines)]


def _ask(address: str, arguments: argparse.Namespace) -> dict[str, Any] | BatonError:
    """Return one router's report, or the error that prevented it."""
    try:
        keys = keys_of(arguments)
        with Client(address, keys=keys, connect_timeout=arguments.timeout) as client:
            requests = arguments.requests if arguments.json else 0
            handoffs = HANDOFFS if arguments.verbose or arguments.json else 0
            if arguments.handoffs is not None:
                handoffs = arguments.handoffs
            return client.status(handoffs=handoffs, requests=requests)
    except (ConnectionLost, VersionMismatch) as problem:
        return problem


def _as_json(answers: dict[str, dict[str, Any] | BatonError]) -> dict[str, Any]:
    """The report of one router, or the reports of several routers by address."""
    shown = {
        address: answer if isinstance(answer, dict) else {"error": str(answer)}
        for address, answer in answers.items()
    }
    return {"routers": shown} if len(shown) > 1 else next(iter(shown.values()))


def _heading(address: str, answer: dict[str, Any] | BatonError) -> str:
    if not isinstance(answer, dict):
        return f"router at {address}: {answer}"
    router = answer["router"]
    requests = router["requests"]
    return (
        f"{router['name']} at {address}: {counted(requests['in_flight'], 'request')} in flight,"
        f" {router['clients']} clients with requests"
    )


def memory_on_this_host(report: ClusterReport) -> str:
    """Return the memory of the cluster's processes that run here; empty if none of them does.

    Pages that several processes map, such as shared weights, are divided among them.
    """
    here = [
        worker
        for worker in report.workers
        if any(word.endswith(f"/{worker.id}.json") for word in command_of(worker.pid))
    ]
    supervisors = {parent_of(worker.pid) for worker in here} - {0}
    shares = {worker.id: share_of(worker.pid) for worker in here}
    total = sum(share_of(pid) for top in supervisors for pid in family_of(top))
    if not total:
        return ""
    parts = [f"{name} {size_text(share)}" for name, share in shares.items()]
    others = size_text(max(0, total - sum(shares.values())))
    return f"{size_text(total)} on this host: {', '.join(parts)}, others {others}"


def describe(report: ClusterReport, *, verbose: bool = False, memory: str = "") -> list[str]:
    """Lines of the report: requests, latencies, workers; ``verbose``: also dropped messages.

    ``memory``: of :func:`memory_on_this_host`. Handoffs are listed if the report has any.
    """
    head = f"{'worker':<12} {'state':<9} {'pid':>7} {'running':>7} {'waiting':>7} {'KV blocks':>12}"
    totals = report.handoffs
    lines = [
        *_requests(report.router),
        *_extensions(report),
        *([f"threads      {report.threads}"] if report.threads else []),
        *([f"weights      {report.shared_weights}"] if report.shared_weights else []),
        *([f"memory       {memory}"] if memory else []),
        *_latency(report),
        "",
        f"{head} {'restarts':>8}  {'device':<19}  endpoint",
        *(_worker_line(worker) for worker in report.workers),
        *(
            f"* {worker.id} is a {worker.role} worker"
            for worker in report.workers
            if _changed_role(worker)
        ),
        "",
        (
            f"handoffs: {totals.count}, {size_text(totals.bytes_sent)} sent, "
            f"{size_text(totals.bytes_received)} received"
        ),
        *(f"  {describe_handoff(record)}" for record in totals.last),
        *_failed_pairs(report),
        *(_dropped(report) if verbose else ()),
    ]
    return [*map(printable, lines)]


def _requests(router: RouterReport) -> list[str]:
    """Lines with the requests by outcome, the throughput and the uptime."""
    counts, rates = router.requests, router.rates
    reasons = ", ".join(f"{name} {n}" for name, n in sorted(counts.refused_by_reason.items()))
    refused = f"{counts.refused} refused" + (f" ({reasons})" if reasons else "")
    cached = 100 * router.cached_tokens / max(1, router.prompt_tokens)
    restarts = f"{router.restarts} restart{'' if router.restarts == 1 else 's'} of workers"
    gone = f", {counts.disconnected} disconnected" if counts.disconnected else ""
    requests = (
        f"{counts.finished} ok, {counts.failed} failed, {refused}, {counts.cancelled} cancelled"
        f"{gone}, {counts.replayed} replayed, {counts.in_flight} in flight, {counts.queued} queued"
    )
    if router.mode != "disaggregated" or counts.local:
        requests += f", {counts.local} local (mode {router.mode})"
    throughput = (
        f"{rates.requests_per_s:.1f} requests/s, prompt {rates.prompt_tokens_per_s:.1f} tok/s "
        f"({cached:.0f} % cached), generation {rates.generated_tokens_per_s:.1f} tok/s"
    )
    return [
        f"requests     {requests}",
        f"throughput   {throughput}",
        f"uptime       {duration(router.uptime_s)}, {restarts}",
    ]


def _extensions(report: ClusterReport) -> list[str]:
    """Lines about the calls of users' classes in the router and in the workers."""
    found = [("", one) for one in report.router.extensions]
    found += [(f" at {worker.id}", one) for worker in report.workers for one in worker.extensions]
    return [f"{one.point:<12} {one.name}{where}: {_calls(one)}" for where, one in found]


def _calls(one: ExtensionReport) -> str:
    failed = f", {one.failures} failed, the last by {one.error}" if one.failures else ""
    return counted(one.calls, "call") + failed + (f", {one.skipped} skipped" * bool(one.skipped))


def _failed_pairs(report: ClusterReport) -> list[str]:
    """Lines about live workers that cannot reach each other."""
    lines = [
        f"  {pair.prefill} -> {pair.decode}: unreachable, {pair.failing_s:.0f} s, "
        f"{counted(pair.failures, 'request')} moved, next try in {pair.next_try_s:.0f} s "
        f"({pair.reason})"
        for pair in report.failed_pairs
    ]
    return ["", "pairs of workers that cannot reach each other:", *lines] if lines else []


def _latency(report: ClusterReport) -> list[str]:
    """Lines with the latencies of the last minutes: of the cluster, then of each worker."""
    latency = report.router.latency
    kinds = [
        ("TTFT", [("all", latency.first_token_s)]),
        ("ITL", [("all", latency.between_tokens_s)]),
    ]
    for worker in report.workers:
        if worker.first_token_s is not None:
            kinds[0][1].append((worker.id, worker.first_token_s))
        if worker.between_tokens_s is not None:
            kinds[1][1].append((worker.id, worker.between_tokens_s))
    lines = [
        f"{kind:<15} {name:<12} {_milliseconds(found.p50)} {_milliseconds(found.p90)} "
        f"{_milliseconds(found.p99)} {found.count:>9}"
        for kind, rows in kinds
        for name, found in rows
        if found.p50 is not None
    ]
    if not lines:
        return []
    head = f"{'latency in ms':<15} {'':<12} {'p50':>9} {'p90':>9} {'p99':>9} {'count':>9}"
    return ["", head, *lines]


def _milliseconds(seconds: float | None) -> str:
    return f"{'-':>9}" if seconds is None else f"{seconds * 1000:>9.2f}"


def _dropped(report: ClusterReport) -> list[str]:
    """Lines with dropped messages by process and reason, without those of a healthy cluster."""
    counts = [("router", report.router.dropped)]
    counts += [(worker.id, worker.dropped) for worker in report.workers]
    shown = [
        (name, [f"{r} {count}" for r, count in sorted(found.items()) if r not in EXPECTED_DROPS])
        for name, found in counts
    ]
    lines = [f"  {name}: {', '.join(found)}" for name, found in shown if found]
    return ["", "messages dropped or refused:", *lines] if lines else []


def _worker_line(worker: WorkerReport) -> str:
    blocks = f"{worker.kv_blocks_used}/{worker.kv_blocks_total}"
    left = not worker.alive and worker.reason == DRAINED
    state = "left" if left else worker.state
    return (
        f"{_name(worker):<12} {state:<9} {worker.pid:>7} {worker.requests_running:>7} "
        f"{worker.requests_waiting:>7} {blocks:>12} {worker.restarts:>8}  "
        f"{worker.device_title:<19}  {worker.endpoint}"
    )


def _name(worker: WorkerReport) -> str:
    """Return the worker's id, with a star if its role is another one than the id says."""
    return f"{worker.id} *" if _changed_role(worker) else worker.id


def _changed_role(worker: WorkerReport) -> bool:
    began = worker.id.partition("-")[0]
    return began in POOLS and began != worker.role


def describe_handoff(record: HandoffRecord) -> str:
    """One line about one handoff."""
    return (
        f"{record.prefill} to {record.decode}: {size_text(record.bytes_sent)} in "
        f"{counted(record.blocks, 'block')} over {record.transport}, "
        f"{counted(record.cached_tokens, 'token')} cached, "
        f"{record.milliseconds:.1f} ms"
    )
