"""A fluid model of a cluster for the tests of the policy: work flows in, workers process it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from baton.deploy.autoscale.metrics import Metrics, RouterSample, WorkerSample
from baton.deploy.autoscale.policy import ANY_ROOM, Autoscaler, Room

SPEED = 1000.0  # prompt tokens per second of a prefill worker
ENCODED = 200.0  # tokens of images that a prefill worker encodes per second
PROMPT = 200
BLOCKS = 1000  # of a decode worker
HELD = 20  # blocks of a running request
BASE_S, PER_BLOCK_S = 0.01, 5e-5


CLIP_TOKENS = 77
DRAWN_ROWS = 10_000.0  # rows of picture steps per second of a decode worker


@dataclass
class PictureFluid:
    """Decode workers that draw: each divides its speed among its pictures, and keeps them."""

    scaler: Autoscaler
    cold_s: float = 30.0
    now: float = 0.0
    came: int = 0
    rows: int = 0
    workers: list[list[list[float]]] = field(default_factory=lambda: [[]])  # rows left, arrival
    coming: list[float] = field(default_factory=list)
    busy: float = 0.0
    waits: list[tuple[float, float]] = field(default_factory=list)  # arrival, seconds to the end

    def second(self, pictures: list[int]) -> int:
        """Simulate a second in which pictures of these rows arrive; return the target."""
        self.now += 1
        while self.coming and self.coming[0] <= self.now:
            self.coming.pop(0)
            self.workers.append([])
        for rows in pictures:
            least = min(self.workers, key=lambda worker: sum(left for left, _ in worker))
            least.append([rows, self.now])
            self.came, self.rows = self.came + 1, self.rows + rows
        for worker in self.workers:
            left = DRAWN_ROWS
            while worker and left > 1e-6:
                part = min(min(rows for rows, _ in worker), left / len(worker))
                for picture in worker:
                    picture[0] -= part
                left -= part * len(worker)
                self.waits += [(at, self.now - at) for rows, at in worker if rows <= 1e-6]
                worker[:] = [picture for picture in worker if picture[0] > 1e-6]
            self.busy += 1 - left / DRAWN_ROWS
        target = self.scaler.observe(self.metrics(), self.now)["decode"]
        while len(self.workers) + len(self.coming) < target:
            self.coming.append(self.now + self.cold_s)
        while len(self.workers) > target and [] in self.workers:
            self.workers.remove([])
        return target

    def metrics(self) -> Metrics:
        left = sum(rows for worker in self.workers for rows, _ in worker)
        prefill = WorkerSample(name="prefill-0", role="prefill", incarnation=1, ready=True)
        decodes = [
            WorkerSample(
                name=f"decode-{n}", role="decode", incarnation=100 + n, ready=True,
                kv_used=33 * len(worker), kv_total=BLOCKS, running=len(worker),
                step_s=0.4 * len(worker),
                step_rows=int(self.busy * DRAWN_ROWS) if n == 0 else 0,
                compute_seconds=self.busy if n == 0 else 0.0,
            )
            for n, worker in enumerate(self.workers)
        ]  # fmt: skip
        router = RouterSample(
            name="router", life=1.0, submitted=self.came, picture_rows=self.rows,
            queued_rows=int(left),
        )  # fmt: skip
        return Metrics(workers=(prefill, *decodes), routers=(router,))


@dataclass
class Fluid:
    """``room``: of the hosts. A worker that changes its role is ready ``turn_s`` later."""

    scaler: Autoscaler
    cold_s: float = 30.0
    room: Room = ANY_ROOM
    turn_s: float = 4.0
    moves: list[tuple[float, str]] = field(default_factory=list)  # time, new role
    prompt: int = PROMPT
    now: float = 0.0
    ready: dict[str, int] = field(default_factory=dict)
    coming: dict[str, list[float]] = field(default_factory=dict)
    queue: float = 0.0
    images: float = 0.0  # the part of the queue that stands for images
    images_came: float = 0.0
    images_done: float = 0.0
    done: float = 0.0
    came: float = 0.0
    busy: float = 0.0
    log: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ready = dict(self.scaler.targets)
        self.coming = {role: [] for role in self.ready}

    def second(self, tokens: float, running: float = 0.0, images: float = 0.0) -> dict[str, int]:
        """Simulate a second with ``tokens`` new prompt tokens and ``running`` decoding requests.

        ``images``: number of these tokens that stand for images.
        """
        self.now += 1
        for role, coming in self.coming.items():
            while coming and coming[0] <= self.now:
                coming.pop(0)
                self.ready[role] += 1
        self.came += tokens
        self.queue += tokens
        self.images += images
        self.images_came += images
        work = self.queue / SPEED + self.images / ENCODED
        part = min(1.0, self.ready["prefill"] / work) if work else 0.0
        self.busy += part * work
        self.done += part * self.queue
        self.images_done += part * self.images
        self.queue *= 1 - part
        self.images *= 1 - part
        targets = self.scaler.observe(self.metrics(running), self.now, self.room)
        assert self.room.fits(targets)
        for role, target in targets.items():
            (other,) = set(targets) - {role}
            while self.ready[role] + len(self.coming[role]) < target:
                moves = self.room.turns and self.ready[other] > targets[other]
                if moves:
                    self.ready[other] -= 1
                    self.moves.append((self.now, role))
                    assert self.scaler.why
                self.coming[role].append(self.now + (self.turn_s if moves else self.cold_s))
                self.coming[role].sort()
        for role, target in targets.items():
            if self.ready[role] + len(self.coming[role]) > target:
                self.coming[role] = []
                self.ready[role] = min(self.ready[role], target)
        self.log.append((self.now, targets))
        return targets

    def metrics(self, running: float = 0.0) -> Metrics:
        prefills, decodes = self.ready["prefill"], self.ready["decode"]
        held = min(BLOCKS, running * HELD / decodes)
        workers = [
            WorkerSample(
                name=f"prefill-{n}",
                role="prefill",
                incarnation=n,
                ready=True,
                tokens_waiting=int(self.queue / prefills),
                # All workers share one counter, so that no work is lost with a removed worker.
                prompt_tokens=int(self.done) if n == 0 else 0,
                image_tokens=int(self.images_done) if n == 0 else 0,
                encode_seconds=self.images_done / ENCODED if n == 0 else 0.0,
                compute_seconds=self.busy if n == 0 else 0.0,
                kv_total=BLOCKS,
            )
            for n in range(prefills)
        ]
        workers += [
            WorkerSample(
                name=f"decode-{n}",
                role="decode",
                incarnation=100 + n,
                ready=True,
                kv_used=int(held),
                kv_total=BLOCKS,
                running=int(held / HELD),
                waiting=max(0, int(running / decodes - held / HELD)),
                step_s=BASE_S + PER_BLOCK_S * held if held else 0.0,
            )
            for n in range(decodes)
        ]
        router = RouterSample(
            name="router",
            life=1.0,
            submitted=int(self.came / self.prompt),
            started_tokens=int(self.came - self.queue),
            queued_tokens=int(self.queue),
            image_tokens=int(self.images_came),
            queued_image_tokens=int(self.images),
        )
        return Metrics(workers=tuple(workers), routers=(router,))

    def changes(self, role: str) -> list[tuple[float, int]]:
        """Return each change as ``(time, new target)``."""
        found = []
        for (_, before), (when, after) in pairwise(self.log):
            if before[role] != after[role]:
                found.append((when, after[role] - before[role]))
        return found

    def turns(self, role: str) -> int:
        """Count the changes of direction of the target."""
        signs = [delta > 0 for _, delta in self.changes(role)]
        return sum(a != b for a, b in pairwise(signs))


@dataclass
class EncoderFluid(Fluid):
    """Prefill workers that encode the prompts of pictures: tokens are those of the second encoder.

    A request's own tokens are those of the first one, the same number for every prompt.
    """

    prompt: int = 512

    def metrics(self, running: float = 0.0) -> Metrics:
        found = super().metrics(running)
        workers = [
            replace(
                one,
                prompt_tokens=one.prompt_tokens * 545 // 512,  # positions of the row
                encoder_tokens=one.prompt_tokens,
            )
            for one in found.workers
        ]
        (router,) = found.routers
        router = replace(
            router,
            started_tokens=router.started_tokens * CLIP_TOKENS // self.prompt,
            queued_tokens=router.queued_tokens * CLIP_TOKENS // self.prompt,
            encoder_tokens=int(self.came),
            queued_encoder_tokens=int(self.queue),
            picture_rows=1,
        )
        return Metrics(workers=tuple(workers), routers=(router,))
