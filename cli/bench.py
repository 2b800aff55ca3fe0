"""``baton bench``: put load on a running cluster, or on any OpenAI server, and show latencies."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from baton.client import AsyncClient
from baton.client.environment import KEYS_VARIABLE, find_cluster
from baton.loadgen.http import EMBEDDINGS, ENDPOINTS, HttpTarget, Server
from baton.loadgen.modes import Configuration, parse_configurations
from baton.loadgen.picture import picture
from baton.loadgen.plan import Lengths, Shape, random_jobs
from baton.loadgen.run import LIMIT_S, NativeEmbeddings, NativeTarget, Runner, Target
from baton.loadgen.statistics import (
    OK,
    Record,
    Summary,
    summarize,
    sweep,
    table,
    warning,
)
from baton.proto.errors import BatonError, ConfigError, InputError, RequestFailed

from .bench_load import (
    REQUESTS,
    ROUNDS,
    WARMUP,
    loads_of,
    lost,
    options_of,
    planned,
    sent,
    unit_of,
    warmup_of,
    workload,
    write,
)
from .numbers import at_least_one, count, limits, number, positive, seconds
from .parser import one_of, shown, warn

ARRIVALS = ("poisson", "constant")
KEY_VARIABLE = "BATON_API_KEY"
MAX_TEXTS = 2048
"""Of a request for embeddings: as many as OpenAI's route takes."""
EPILOG = """\
Without --rates and --trace, a closed loop: --concurrency requests at a time. With --rates, an open
loop: requests arrive at their times, however slow the answers are. docs/benchmarks.md defines the
latencies. With --compare, clusters with different modes and numbers of workers start on this
machine, one after the other, and get the same requests. Their answers must have equal tokens.
Examples: baton bench --rates 1,2,4 --slo-ttft 0.5 --slo-itl 0.05 --plot load.svg;
baton bench --compare colocated:2,1:1,adaptive:1:1 --rates 2 --slo ttft=1s,itl=50ms MODEL
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser(
        "bench", help="put load on a cluster and show its latencies", epilog=EPILOG
    )
    parser.add_argument(
        "address",
        metavar="ADDRESS",
        nargs="?",
        help="ipc:// or tcp:// address of a cluster, or http://HOST:PORT/v1 of any server with "
        "OpenAI's routes [this user's cluster]; with --compare the model to serve",
    )
    _add_comparison(parser.add_argument_group("comparison"))
    _add_load(parser.add_argument_group("load"))
    _add_requests(parser.add_argument_group("requests"))
    _add_results(parser.add_argument_group("results"))
    group = parser.add_argument_group("connection")
    group.add_argument("--keys", metavar="FOLDER", help=f"key folder [{KEYS_VARIABLE}]")
    group.add_argument("--api-key", metavar="KEY", help=f"API key for http:// [{KEY_VARIABLE}]")
    group.add_argument("--model", default="", metavar="NAME", help="model for http:// [the first]")
    group.add_argument(
        "--endpoint", type=one_of(ENDPOINTS), default="completions", metavar=shown(ENDPOINTS),
        help="route for http://; chat sends about as many words as tokens [completions]; with "
        "ipc:// and tcp:// the model decides",
    )  # fmt: skip
    parser.set_defaults(run=run)


def _add_comparison(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--compare", type=_configurations, metavar="SPEC,SPEC[,...]",
        help="configurations to compare: colocated:N, PREFILL:DECODE, adaptive:PREFILL:DECODE, "
        "NAME=one of these, or NAME=ADDRESS of a running cluster",
    )  # fmt: skip
    group.add_argument(
        "--rounds", type=at_least_one, metavar="N",
        help=f"runs of each configuration, in another order each time [{ROUNDS}]",
    )  # fmt: skip
    group.add_argument(
        "--forecast", action="store_true", default=None,
        help="calibrate between the runs, simulate the started clusters as baton plan does, and "
        "show the result beside the measured one; needs --rates or --trace",
    )  # fmt: skip
    group.add_argument(
        "--config", metavar="FILE",
        help="TOML file of settings of baton serve for the started clusters: model, threads, KV "
        "memory, routing and batching; BATON_ variables have them too",
    )  # fmt: skip


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency",
        type=_counts,
        metavar="N[,N...]",
        help="closed loop: requests at a time [8]",
    )
    group.add_argument(
        "--rates", type=_rates, metavar="R[,R...]", help="open loop: requests per second"
    )
    group.add_argument(
        "--arrivals", type=one_of(ARRIVALS), default="poisson", metavar=shown(ARRIVALS),
        help="arrivals of an open loop [poisson]",
    )  # fmt: skip
    group.add_argument(
        "--trace", metavar="FILE",
        help="open loop with the times and lengths of a trace: CSV or JSON lines of Mooncake, "
        "Azure or BurstGPT, or a file of benchmarks/traces",
    )  # fmt: skip
    group.add_argument(
        "--trace-speed", type=_rates, metavar="X[,X...]", help="divide the trace's times by X [1]"
    )
    group.add_argument(
        "--trace-scale", type=positive, default=1.0, metavar="X",
        help="multiply the trace's lengths by X [1]",
    )  # fmt: skip
    group.add_argument(
        "--requests", type=count, metavar="N", help=f"requests per run [{REQUESTS}; a trace: all]"
    )
    group.add_argument(
        "--duration", type=seconds, metavar="SECONDS", help="send for this long at most"
    )
    group.add_argument(
        "--warmup", type=count, metavar="N",
        help=f"requests before each run [{WARMUP}; with --compare {WARMUP} per worker]",
    )  # fmt: skip


def _add_requests(group: argparse._ArgumentGroup) -> None:
    for flag, default, what in (("--input", "64", "prompt"), ("--output", "32", "answer")):
        group.add_argument(
            flag, type=_lengths, default=Lengths.parse(default), metavar="N[-M]",
            help=f"tokens of the {what}, fixed or uniform between two numbers [{default}]",
        )  # fmt: skip
    group.add_argument(
        "--texts", type=count, default=1, metavar="N", help="texts of a request for embeddings [1]"
    )
    group.add_argument(
        "--temperature", type=number, default=0.0, metavar="T", help="sampling temperature [0]"
    )
    group.add_argument(
        "--stop-at-eos", action="store_true", help="let answers end before their length"
    )
    group.add_argument(
        "--cancel-share", type=_share, default=0.0, metavar="X", help="cancel this share [0]"
    )
    group.add_argument(
        "--cancel-delay", type=positive, default=0.2, metavar="SECONDS",
        help="seconds from sending to cancelling [0.2]",
    )  # fmt: skip
    group.add_argument(
        "--vocabulary", type=count, default=1000, metavar="N",
        help="token ids of prompts are below N; known for ipc:// and tcp:// [1000]",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=count, metavar="N",
        help="seed of the load; the same load again finds its prompts in the prefix cache [random]",
    )  # fmt: skip
    group.add_argument(
        "--limit", type=positive, default=LIMIT_S, metavar="SECONDS",
        help=f"seconds until a request counts as failed [{LIMIT_S:g}]",
    )  # fmt: skip


def _add_results(group: argparse._ArgumentGroup) -> None:
    for name, what in (
        ("ttft", "time to first token, or to embeddings"),
        ("itl", "mean time between tokens"),
    ):
        group.add_argument(
            f"--slo-{name}", type=positive, default=math.inf, metavar="SECONDS",
            help=f"limit of the {what}, for goodput",
        )  # fmt: skip
    group.add_argument(
        "--slo", type=limits, metavar="ttft=1s,itl=50ms",
        help="both limits; started clusters get them as settings too",
    )  # fmt: skip
    group.add_argument("--json", metavar="FILE", help="write all results as JSON")
    group.add_argument(
        "--plot", metavar="FILE.svg", help="draw latency over load; with --compare by percentile"
    )


# --------------------------------------------------------------------------- one measurement


def run(arguments: argparse.Namespace) -> int:
    """Measure, print tables, and write the files.

    Raises the error that ended the measurement early, and RequestFailed if no request ended well.
    """
    check(arguments)
    if arguments.slo is not None:
        arguments.slo_ttft, arguments.slo_itl = arguments.slo
    if arguments.seed is None:
        arguments.seed = secrets.randbits(32)
    if arguments.compare is not None:
        from .compare import compare  # with what starts clusters

        return compare(arguments)
    title, summaries, problem = uvloop.run(_measure(arguments))
    slo = arguments.slo_ttft, arguments.slo_itl
    if len(summaries) > 1:
        print("\n" + "\n".join(sweep(summaries, unit_of(arguments), *slo)))
    if arguments.json:
        write(arguments.json, report(arguments, title, summaries))
    if arguments.plot:
        text = picture(summaries, unit_of(arguments), *slo, title=title)
        write(arguments.plot, text.encode())
    if problem is not None:
        raise problem
    if not any(one.outcomes[OK] for one in summaries):
        raise RequestFailed("no request ended well")
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that contradict each other, and files that cannot be written.

    A measurement may take hours, so its files are checked before.
    """
    ways = {"--concurrency": arguments.concurrency, "--rates": arguments.rates}
    given = [name for name, value in {**ways, "--trace": arguments.trace}.items() if value]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} cannot be combined with {given[1]}")
    if arguments.trace_speed and not arguments.trace:
        raise ConfigError("--trace-speed needs --trace")
    if arguments.texts != 1 and arguments.trace:
        raise ConfigError("--texts cannot be combined with --trace")
    if not 1 <= arguments.texts <= MAX_TEXTS:
        raise ConfigError(f"--texts must be 1 to {MAX_TEXTS}")
    if arguments.requests == 0:
        raise ConfigError("--requests must be at least 1")
    if arguments.slo and math.isfinite(min(arguments.slo_ttft, arguments.slo_itl)):
        raise ConfigError("--slo cannot be combined with --slo-ttft and --slo-itl")
    for name in ("rounds", "config", "forecast"):
        if getattr(arguments, name) is not None and arguments.compare is None:
            raise ConfigError(f"--{name} needs --compare")
    for name in ("json", "plot"):
        file = getattr(arguments, name)
        if file and not Path(file).absolute().parent.is_dir():
            raise ConfigError(f"--{name} {file}: the folder does not exist")


async def _measure(
    arguments: argparse.Namespace,
) -> tuple[str, list[Summary], BatonError | None]:
    """Return the title, a summary per run, and the error that ended the measurement early."""
    target, name, shape = await _target(arguments)
    runner = Runner(target, limit=arguments.limit)
    title = f"{name}: {workload(arguments, embeds=shape.texts > 0)}"
    print(title, flush=True)
    summaries: list[Summary] = []
    try:
        for at, load in enumerate(loads_of(arguments)):
            await _one_run(arguments, runner, shape, (load, arguments.seed + 1000 * at), summaries)
    except BatonError as problem:
        if not summaries:
            raise
        return title, summaries, problem
    finally:
        await target.close()
    return title, summaries, None


async def _one_run(
    arguments: argparse.Namespace,
    runner: Runner,
    shape: Shape,
    load_and_seed: tuple[float, int],
    summaries: list[Summary],
) -> None:
    """Measure at one load, print its table and add its summary.

    Raises RequestFailed for a failed request of the warm-up, and ConnectionLost, after the table,
    if the server was lost.
    """
    load, seed = load_and_seed
    warmup = random_jobs(replace(shape, cancel_share=0.0), [None] * warmup_of(arguments), seed + 1)
    for record in await runner.closed_loop(warmup, 1):
        if record.outcome != OK:
            raise RequestFailed(f"the first request failed: {record.error}")
    jobs = await asyncio.to_thread(planned, arguments, shape, load, seed)
    records = await _watched(runner, sent(arguments, runner, jobs, load))
    slo = arguments.slo_ttft, arguments.slo_itl
    summaries.append(summarize(records, load, *slo))
    print(f"\n{unit_of(arguments)}: {load:g}\n" + "\n".join(table(summaries[-1], *slo)))
    if late := warning(summaries[-1]):
        warn(late)
    if runner.is_lost:
        raise lost(arguments, jobs, records)


async def _target(arguments: argparse.Namespace) -> tuple[Target, str, Shape]:
    """Connect. Return the target, the model's name, and what requests look like."""
    shape = Shape(
        arguments.input,
        arguments.output,
        arguments.cancel_share,
        arguments.cancel_delay,
        max(2, arguments.vocabulary),
    )
    address: str | None = arguments.address
    if address and address.startswith(("http://", "https://")):
        key = arguments.api_key or os.environ.get(KEY_VARIABLE, "")
        target = HttpTarget(
            Server.parse(address, key),
            endpoint=arguments.endpoint,
            model=arguments.model,
            ignore_eos=not arguments.stop_at_eos,
            temperature=arguments.temperature,
        )
        await target.find_model()
        texts = _texts(arguments, embeds=arguments.endpoint == EMBEDDINGS)
        return target, target.model, replace(shape, longest=target.longest, texts=texts)
    addresses, keys = find_cluster(address, arguments.keys)
    client = AsyncClient(addresses, keys=keys or os.environ.get(KEYS_VARIABLE))
    try:
        model = await client.model()
        model.check_text()
        card = model.card
        texts = _texts(arguments, embeds=card.task == "embed")
    except BaseException:
        await client.close()
        raise
    shape = replace(shape, vocabulary=card.vocab_size, longest=card.max_length, texts=texts)
    if texts:
        return NativeEmbeddings(client), card.name, shape
    native = NativeTarget(
        client, ignore_eos=not arguments.stop_at_eos, temperature=arguments.temperature
    )
    return native, card.name, shape


def _texts(arguments: argparse.Namespace, *, embeds: bool) -> int:
    """Return the texts of a request, 0 for generation. Raises ConfigError for senseless options."""
    if embeds:
        wrong = {
            "--stop-at-eos": arguments.stop_at_eos,
            "--slo-itl": math.isfinite(arguments.slo_itl),
            "--temperature": arguments.temperature,
        }
        given = [name for name, value in wrong.items() if value]
        if given:
            raise ConfigError(f"{given[0]} has no meaning for embeddings")
        return int(arguments.texts)
    if arguments.texts != 1:
        raise ConfigError("--texts needs embeddings: an embedding model, or --endpoint embeddings")
    return 0


async def _watched(runner: Runner, measuring: Awaitable[list[Record]]) -> list[Record]:
    """Show on a terminal how many requests have ended."""
    if not sys.stderr.isatty():
        return await measuring
    before, task = runner.finished, asyncio.ensure_future(measuring)
    while not task.done():
        await asyncio.wait([task], timeout=0.2)
        sys.stderr.write(f"\r\x1b[K{runner.finished - before} requests ended")
        sys.stderr.flush()
    sys.stderr.write("\r\x1b[K")
    return task.result()


# --------------------------------------------------------------------------- files and options


def report(arguments: argparse.Namespace, title: str, summaries: list[Summary]) -> bytes:
    """Return the JSON file: the options, and a summary per run, in seconds."""
    options = options_of(arguments)
    content = {"title": title, "unit": unit_of(arguments), "options": options, "runs": summaries}
    return msgspec.json.format(msgspec.json.encode(content), indent=2)


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except InputError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def _list(text: str, kind: Callable[[str], float]) -> list[float]:
    return [kind(part.strip()) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    return _list(text, positive)


def _counts(text: str) -> list[float]:
    found = _list(text, count)
    if 0 in found:
        raise argparse.ArgumentTypeError("a concurrency must be at least 1")
    return found


def _configurations(text: str) -> list[Configuration]:
    try:
        return parse_configurations(text)
    except InputError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def _share(text: str) -> float:
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a share from 0 to 1")
    return value
