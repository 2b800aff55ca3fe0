"""``baton status``: workers, handoffs, waiting times and drops of a running cluster."""

from __future__ import annotations

import argparse
import json

from ..deploy.banner import mebibytes
from ..deploy.report import DRAINED, ClusterReport, HandoffRecord, WorkerReport
from .cluster import add_address, connect, parsed
from .numbers import count


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser("status", help="show workers and handoffs of a running cluster")
    add_address(parser)
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument(
        "--handoffs", type=count, default=16, metavar="N", help="recent handoffs listed [16]"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    with connect(arguments) as client:
        status = client.status(handoffs=arguments.handoffs)
    if arguments.json:
        print(json.dumps(status, indent=2))
    else:
        print("\n".join(describe(parsed(status))))
    return 0


def describe(report: ClusterReport) -> list[str]:
    """The report as a table for people."""
    head = f"{'worker':<12} {'state':<9} {'pid':>7} {'running':>7} {'waiting':>7} {'KV blocks':>12}"
    totals = report.handoffs
    return [
        f"{head}  endpoint",
        *(_worker_line(worker) for worker in report.workers),
        "",
        (
            f"handoffs: {totals.count}, {mebibytes(totals.bytes_sent)} sent, "
            f"{mebibytes(totals.bytes_received)} received"
        ),
        *(f"  {describe_handoff(record)}" for record in totals.last),
        *_latency(report),
        *_dropped(report),
    ]


def _latency(report: ClusterReport) -> list[str]:
    """Waiting times of the last minutes, of all and of each worker."""
    latency = report.router.latency
    kinds = [
        ("first token", [("all", latency.first_token_s)]),
        ("between tokens", [("all", latency.between_tokens_s)]),
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
    """Messages that were not used, by process and reason."""
    counts = [("router", report.router.dropped)]
    counts += [(worker.id, worker.dropped) for worker in report.workers]
    lines = [
        f"  {name}: " + ", ".join(f"{reason} {count}" for reason, count in sorted(found.items()))
        for name, found in counts
        if found
    ]
    return ["", "messages dropped or refused:", *lines] if lines else []


def _worker_line(worker: WorkerReport) -> str:
    blocks = f"{worker.kv_blocks_used}/{worker.kv_blocks_total}"
    left = not worker.alive and worker.reason == DRAINED
    state = "left" if left else worker.state
    return (
        f"{worker.id:<12} {state:<9} {worker.pid:>7} {worker.requests_running:>7} "
        f"{worker.requests_waiting:>7} {blocks:>12}  {worker.endpoint}"
    )


def describe_handoff(record: HandoffRecord) -> str:
    """One handoff in a line."""
    return (
        f"{record.prefill} to {record.decode}: {mebibytes(record.bytes_sent)} in "
        f"{record.blocks} blocks over {record.transport}, {record.cached_tokens} tokens cached, "
        f"{record.milliseconds:.1f} ms"
    )
