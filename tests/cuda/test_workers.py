"""A prefill and a decode worker with a GPU each, in one process: blocks go by their streams."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from baton.decode_worker.config import DecodeWorkerConfig
from baton.decode_worker.shell import DecodeShell
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.loading.loader import Runner, load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.scheduling.plan import Chunk, SampleSpec
from baton.prefill_worker.config import PrefillWorkerConfig
from baton.prefill_worker.shell import PrefillShell
from baton.proto.ids import new_incarnation
from baton.proto.limits import MAX_KV_FRAME_BYTES
from baton.proto.sampling import SamplingParams
from baton.proto.wire.messages import Assign, Message, PoolTicket, Terminal, Tokens, Welcome
from baton.proto.wire.proofs import Holder, Terms, reserve_ticket
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens
from baton.runtime.net.channel import ChannelOptions
from baton.runtime.net.loop import Loop
from baton.runtime.net.sockets import RouterChannel
from baton.runtime.net.wiring import Wiring
from baton.worker.events import FromRouter
from baton.worker.membership import Membership, WorkerIdentity

from .host_device import HostDevice
from .small_model import SHAPE

KEY = b"k" * 16
"""The key by which a decode worker checks tickets, as a router would send it."""
DATA_OPTIONS = ChannelOptions(max_frame_bytes=MAX_KV_FRAME_BYTES, max_frames=2)
GREEDY = SamplingParams(temperature=0, max_new_tokens=5, ignore_eos=True)


def config_of(folder: Path) -> RunnerConfig:
    return RunnerConfig(
        model=str(folder), backend="numpy", block_size=8, num_blocks=48, layer_group=1
    )


class Workers:
    """Both shells on one loop; their messages to the router are kept."""

    def __init__(
        self,
        folder: Path,
        place: Path,
        devices: tuple[Any, Any],
        *,
        in_place: bool,
    ) -> None:
        self.loop = Loop()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        wiring = Wiring(self.loop, self.context)
        self.said: list[Message] = []
        runners = [load_runner(config_of(folder), backend=CudaBackend(d)) for d in devices]
        address = {role: f"ipc://{place}/{role}" for role in ("prefill", "decode", "data")}
        fields: dict[str, Any] = {"routers": {}, "runner": config_of(folder)}
        control = RouterChannel(self.context, address["decode"])
        data = RouterChannel(self.context, address["data"], options=DATA_OPTIONS)
        self.decode = DecodeShell(
            DecodeWorkerConfig(worker_id="d", endpoint=address["decode"], **fields),
            runners[1], self.member("decode", control, runners[1]), control, data, wiring
        )  # fmt: skip
        control = RouterChannel(self.context, address["prefill"])
        ticket = runners[0].backend.pool_ticket(runners[0].pool) if in_place else None
        assert not isinstance(ticket, PoolTicket)
        self.prefill = PrefillShell(
            PrefillWorkerConfig(
                worker_id="p", endpoint=address["prefill"], stream_tokens=8, token_budget=16,
                frame_bytes=4096, **fields,
            ),
            runners[0], self.member("prefill", control, runners[0]), control, wiring,
            ticket,
        )  # fmt: skip
        welcome = Welcome(router="router", incarnation=1, key=KEY)
        self.decode.feed(FromRouter("router", welcome))
        for shell in (self.prefill, self.decode):
            shell._links.send = lambda _router, message: self.hear(message)  # type: ignore[method-assign]
            shell.start()
        self.ended = 0
        self.wanted = 0

    @staticmethod
    def member(role: str, control: RouterChannel, runner: Runner) -> Membership:
        identity = WorkerIdentity(
            worker=role[0], role=role, incarnation=new_incarnation(), pid=os.getpid(),
            endpoint=control.endpoint, pool="default", model=runner.card, max_batch=8,
        )  # fmt: skip
        return Membership(identity, ())

    def hear(self, message: Message) -> None:
        self.said.append(message)
        if isinstance(message, Terminal):
            self.ended += 1
            if self.ended == self.wanted:
                self.loop.stop()

    def serve(self, prompts: list[list[int]]) -> dict[bytes, list[int]]:
        """Tokens of each prompt."""
        self.wanted = len(prompts)
        for number, prompt in enumerate(prompts):
            context = WireContext(
                tokens=WireTokens(np.array(prompt, np.int32)),
                max_length=len(prompt) + GREEDY.max_new_tokens,
                sampling=WireSampling(temperature=0.0),
                ignore_eos=True,
            )
            request = bytes([number]) * 16
            incarnation = self.prefill.core._member.identity.incarnation
            assign = Assign(
                request=request, attempt=1, request_id=f"r{number}", context=context,
                decode=self.decode._control.endpoint, deadline=60.0,
                ticket=reserve_ticket(KEY, request, 1, Holder(incarnation), Terms(4096, 0, 600)),
            )  # fmt: skip
            self.prefill.feed(FromRouter("router", assign))
        self.loop.call_later(60.0, self.loop.stop)
        self.loop.run()
        tokens: dict[bytes, dict[int, int]] = {}
        for message in self.said:
            for run in message.runs if isinstance(message, Tokens) else ():
                places = range(run.position, run.position + len(run.tokens))
                tokens.setdefault(run.request, {}).update(zip(places, run.tokens, strict=True))
        return {request: [t for _, t in sorted(run.items())] for request, run in tokens.items()}

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        self.context.destroy(linger=0)


def shortfall(runner: Runner, prompt: list[int], generated: list[int]) -> float:
    """How far below the likeliest token the generated ones are at most, one engine computing."""
    chunks, block = [], 0
    for count in range(len(generated)):
        tokens = np.array(prompt + generated[:count], np.int32)
        need = -(-len(tokens) // 8)
        table, block = np.arange(block, block + need, dtype=np.int32), block + need
        spec = SampleSpec(GREEDY, len(tokens), np.empty(0, np.int32), 0)
        chunks.append(Chunk(bytes([count]), 0, tokens, table, spec))
    model = runner.pipeline.model
    outputs = model.execute(model.prepare_initial_token_inputs(chunks)).next_token_logits
    assert isinstance(runner.backend, CudaBackend)
    logits = runner.backend.device.download(outputs)[:, : SHAPE.vocab]  # type: ignore[arg-type]
    chosen = logits[np.arange(len(generated)), generated]
    return float((logits.max(axis=1) - chosen).max())


@pytest.mark.parametrize("in_place", [False, True], ids=["zmq", "cuda_ipc"])
@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_are_those_of_one_engine(
    folder: Path,
    host_device: HostDevice,
    tmp_path: Path,
    rng: np.random.Generator,
    seed: int,
    in_place: bool,
) -> None:
    """Each is the likeliest after the tokens before, but for near-ties: logits are about 1."""
    prompts = [rng.integers(0, SHAPE.vocab, n).tolist() for n in (45, 9, 23)]
    devices = host_device.late(seed), host_device.late(seed + 10)
    workers = Workers(folder, tmp_path, devices, in_place=in_place)
    try:
        found = workers.serve(prompts)
    finally:
        workers.close()
    ends = [message for message in workers.said if isinstance(message, Terminal)]
    assert [(end.status, end.code) for end in ends] == [("maximum_length", None)] * 3
    alone = load_runner(config_of(folder), backend=CudaBackend(host_device))
    for number, prompt in enumerate(prompts):
        generated = found[bytes([number]) * 16]
        assert len(generated) == GREEDY.max_new_tokens
        assert shortfall(alone, prompt, generated) < 0.1
    reports = Counter(getattr(message, "transport", None) for message in workers.said)
    assert reports["cuda_ipc" if in_place else "zmq"] == 3
    assert not workers.decode._dropped
    assert workers.decode._moves is not None
    assert not len(workers.decode._moves.moves)
    assert workers.decode._moves.moves.failures == 0
