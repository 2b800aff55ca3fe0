"""A real router and two scripted workers, each on its own loop and thread.

The workers speak the worker protocol; instead of computing, the prefill worker plays back an
answer, one token per millisecond.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.layout import ModelCard
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.envelope import EnvelopeDecoder
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Adopt,
    Assign,
    Drain,
    Drained,
    Heartbeat,
    Hello,
    RequestState,
    RouterToWorker,
    Terminal,
    TerminalAck,
    TokenRun,
    Tokens,
    WorkerLoad,
)
from baton.router.config import RouterConfig
from baton.router.describe import read_text_files
from baton.router.shell import RouterShell
from baton.runtime.net.loop import Loop
from baton.runtime.net.outbox import Outbox
from baton.runtime.net.sockets import DealerChannel
from baton.text.tokenizer import Tokenizer

from ..model_cards import model_card

DEMO = Path(__file__).parents[2] / "deploy" / "demo_model"
EOS = 2

CARD = model_card(
    name="demo", vocab_size=1024, max_length=2048, eos_token_ids=[EOS], features=["logit_bias"]
)


def count_up(position: int) -> int:
    """The default answer: tokens that depend only on their position."""
    return 10 + position % 1000


class OnThread:
    """A loop on a separate thread; ``setup`` runs there first."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.thread = threading.Thread(target=self.loop.run, daemon=True)

    def start(self) -> None:
        self.call(self.setup, begin=True)

    def setup(self) -> None: ...

    def teardown(self) -> None: ...

    def call(self, function: Callable[[], object], *, begin: bool = False) -> None:
        """Run ``function`` on the loop's thread and wait for it."""
        done = threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                function()
            except BaseException as error:
                failed.append(error)
            done.set()

        self.loop.post(run)
        if begin:
            self.thread.start()
        assert done.wait(30)
        if failed:
            raise failed[0]

    def end(self) -> None:
        if self.thread.is_alive():
            self.call(self.teardown)
            self.loop.post(self.loop.stop)
            self.thread.join(30)
            self.context.destroy(linger=0)


class Router(OnThread):
    """One run of the real router; :meth:`end` stops it abruptly, like a kill."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config

    def setup(self) -> None:
        files = read_text_files(self.config.model_folder, 1 << 24)
        incarnation = secrets.randbits(60)
        self.shell = RouterShell(self.config, files, incarnation, self.loop, self.context)
        self.shell.start()

    def teardown(self) -> None:
        self.shell.close()


class Playback:
    """One request on the scripted worker."""

    def __init__(self, assign: Assign) -> None:
        self.assign = assign
        self.prompt = len(assign.context.tokens)
        self.position = self.prompt + len(assign.emitted)
        self.limit = assign.context.end_length
        if assign.context.sampling.max_new_tokens is not None:
            self.limit = min(self.limit, self.prompt + assign.context.sampling.max_new_tokens)
        self.generated = list(assign.emitted)
        self.status: str | None = None


class Worker(OnThread):
    """Answers the router as a worker does; the prefill worker plays requests to their end."""

    def __init__(self, role: str, address: str, folder: Path, card: ModelCard) -> None:
        super().__init__()
        self.card = card
        self.media: Callable[[Playback], bytes | None] = lambda _: None
        self.preview: Callable[[Playback], bytes | None] = lambda _: None
        self.role = role
        self.address = address
        self.endpoint = f"ipc://{folder}/{role}"
        self.incarnation = secrets.randbits(60)
        self.answer: Callable[[int], int] = count_up
        self.running: dict[bytes, Playback] = {}
        self.assigned: list[Assign] = []
        self.aborted: list[bytes] = []
        self.paused = False
        self.refusal: Terminal | None = None
        self.swallow: set[int] = set()  # positions whose run is lost once

    def setup(self) -> None:
        identity = b"worker-%d" % self.incarnation
        self.channel = DealerChannel(self.context, self.address, identity)
        self.decoder = EnvelopeDecoder(RouterToWorker)
        self.outbox: Outbox[None] = Outbox(lambda _, frames: self.channel.send(frames))
        self.channel.attach(self.loop, self.hear, self.hello)
        self.loop.on_turn_end(self.outbox.flush)
        self.beat()
        self.step()

    def teardown(self) -> None:
        self.channel.close()

    def say(self, message) -> None:
        self.outbox.put(None, message)

    def hello(self) -> None:
        held = [
            RequestState(
                key,
                p.assign.attempt,
                p.position,
                p.prompt,
                p.status is not None,
                proof=p.assign.proof,
            )
            for key, p in self.running.items()
        ]
        self.say(
            Hello(
                version=PROTOCOL_VERSION,
                worker=f"{self.role}-0",
                role=self.role,
                incarnation=self.incarnation,
                pid=1,
                endpoint=self.endpoint,
                model=self.card,
                max_batch=64,
                load=WorkerLoad(kv_blocks_total=100),
                requests=held,
            )
        )

    def beat(self) -> None:
        if self.channel.connected:
            self.say(Heartbeat(incarnation=self.incarnation, progress=1))
        self.loop.call_later(0.1, self.beat)

    def hear(self, frames) -> None:
        for message in self.decoder.decode(frames):
            match message:
                case Assign():
                    self.assign(message)
                case Abort():
                    self.aborted.append(message.request)
                    self.running.pop(message.request, None)
                    self.say(Aborted(request=message.request, attempt=message.attempt))
                case Adopt():
                    self.adopt(message)
                case TerminalAck():
                    for key, _ in message.requests:
                        self.running.pop(key, None)
                case Drain():
                    self.say(Drained(worker=f"{self.role}-0"))

    def assign(self, message: Assign) -> None:
        if message.request not in self.running:
            self.assigned.append(message)
            self.running[message.request] = Playback(message)
        self.say(Accepted(request=message.request, attempt=message.attempt))

    def adopt(self, message: Adopt) -> None:
        playback = self.running.get(message.request)
        if playback is None:
            self.say(Aborted(request=message.request, attempt=0))
            return
        assign = playback.assign
        self.say(Accepted(request=assign.request, attempt=assign.attempt, proof=assign.proof))
        skip = message.position - playback.prompt
        assign = playback.assign
        key, attempt, proof = message.request, assign.attempt, assign.proof
        self.say(Accepted(request=key, attempt=attempt, proof=proof))
        self.run(message.request, playback, message.position, playback.generated[skip:])
        if playback.status is not None:
            self.finish(message.request, playback)

    def step(self) -> None:
        if not self.paused:
            for key, playback in list(self.running.items()):
                if playback.status is None:
                    self.advance(key, playback)
        self.loop.call_later(0.001, self.step)

    def advance(self, key: bytes, playback: Playback) -> None:
        if self.refusal is not None:
            playback.status = "failed"
            self.say(
                Terminal(
                    request=key,
                    attempt=playback.assign.attempt,
                    code=self.refusal.code,
                    message=self.refusal.message,
                )
            )
            return
        token = self.answer(playback.position)
        playback.generated.append(token)
        playback.position += 1
        context = playback.assign.context
        ends = [[token] for token in context.eos_token_ids] + context.eos_sequences
        if any(playback.generated[-len(end) :] == end for end in ends):
            playback.status = "end_of_sequence"
        elif playback.position >= playback.limit:
            playback.status = "maximum_length"
        if playback.position - 1 in self.swallow:
            self.swallow.discard(playback.position - 1)
        else:
            self.run(key, playback, playback.position - 1, [token])
        if playback.status is not None:
            self.finish(key, playback)

    def run(self, key: bytes, playback: Playback, position: int, tokens: list[int]) -> None:
        logprobs = None
        if playback.assign.context.log_probabilities:
            logprobs = [TokenLogProbs.of(-0.5, {token: -0.5}) for token in tokens]
        attempt, preview = playback.assign.attempt, self.preview(playback)
        self.say(Tokens(runs=[TokenRun(key, attempt, position, tokens, logprobs, preview)]))

    def finish(self, key: bytes, playback: Playback) -> None:
        self.say(
            Terminal(
                request=key,
                attempt=playback.assign.attempt,
                position=playback.position,
                status=playback.status,
                prefill="prefill-0",
                decode="decode-0",
                cached_tokens=3,
                media=self.media(playback),
            )
        )


class Cluster:
    """Router and workers; the router can be killed and restarted."""

    def __init__(self, folder: Path, model: Path = DEMO, card: ModelCard = CARD) -> None:
        self.address = f"ipc://{folder}/clients"
        self.config = RouterConfig(
            client_address=self.address,
            worker_address=f"ipc://{folder}/workers",
            cluster_key="00" * 16,
            model_folder=str(model),
            recovery_s=2.5,
            resume_window_s=0.0,
        )
        self.router = Router(self.config)
        self.prefill = Worker("prefill", self.config.worker_address, folder, card)
        self.decode = Worker("decode", self.config.worker_address, folder, card)

    def start(self) -> None:
        self.router.start()
        self.prefill.start()
        self.decode.start()
        deadline = time.monotonic() + 60
        while len(list(self.router.shell.core.registry.live())) < 2:
            assert time.monotonic() < deadline, "the workers did not join"
            time.sleep(0.001)

    def kill_router(self) -> None:
        self.router.end()

    def restart_router(self) -> None:
        self.router = Router(self.config)
        self.router.start()

    def end(self) -> None:
        for part in (self.prefill, self.decode, self.router):
            part.end()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    cluster.start()
    yield cluster
    cluster.end()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(DEMO)


@pytest.fixture
def card() -> ModelCard:
    return CARD


@pytest.fixture
def say(tokenizer: Tokenizer) -> Callable[[str, int], Callable[[int], int]]:
    """``say(text, prompt)`` answers a prompt of ``prompt`` tokens with ``text`` and EOS."""

    def answer(text: str, prompt: int) -> Callable[[int], int]:
        tokens = [*tokenizer.encode(text, add_special_tokens=False).tolist(), EOS]
        return lambda position: tokens[min(position - prompt, len(tokens) - 1)]

    return answer


@pytest.fixture
def on_thread() -> Iterator[OnThread]:
    part = OnThread()
    part.start()
    yield part
    part.end()
