"""Named scenarios: the load, the cluster and the faults of each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from .network import Faults
from .shape import Shape, Sizes

WORKERS = ("prefill", "decode")
EVERYONE = ("router", "prefill", "decode", "client")
NOISE = Faults(loss=0.02, duplication=0.02, reordering=0.05, damage=0.03)
SCARCE = Sizes(decode_blocks=26, prefill_blocks=48, growth=4, slo_ttft=0.05)
"""So few blocks that requests wait for them and are preempted; most requests are late."""
NARROW = Sizes(frame_bytes=64, window=128, budget=256, stream_tokens=8, token_budget=32)
"""Long prompts are sent layer by layer through small windows."""

DRAW = Shape(sizes=Sizes(block_size=8), draws=True)
EMBED = Shape(prefill=0, decode=0, embed=3)

COLOCATED = Shape(prefill=0, decode=3, mode="colocated", local=True)
MIXED = Shape(prefill=1, local=True)
"""While the prefill worker is away, decode workers compute prompts too."""

ADAPTIVE = Shape(prefill=2, decode=2, mode="adaptive", local=True, sizes=Sizes(slo_ttft=0.05))

PATIENT_S = 6.0
"""Longer than the loss of a router may delay a token, shorter than a client's own timeout."""
TRIED_S = PATIENT_S + 3.0
"""The same if several faults may hit the attempts of one request in turn, each for up to 3 s."""
TWO = Shape(routers=2, clients=4)
"""Clients use both routers and start with different ones."""

DEVICE = replace(NARROW, device=True)
MOVES = replace(NARROW, move_s=0.02, decode_blocks=48)
"""Frames are packed and written after a delay, as by a transfer stream."""

IN_PLACE = replace(MOVES, in_place=True)
"""Decode workers read the prefill workers' pools themselves, after a delay."""


@dataclass(slots=True, frozen=True)
class Scenario:
    """The load and the faults of a run.

    ``load_s``: seconds during which requests arrive and faults strike. ``settle_s``: seconds after
    that in which everything must end. Counts of faults: ``crashes``, ``stops`` (SIGSTOP of up to
    3 s), ``pauses`` (0.3 to 2 s), ``absences`` (longer than the worker timeout), ``slow_steps``
    (one step of up to 3 s), ``twins`` (a second process with a worker's name), ``hangs`` (the
    engine never finishes a step), ``flaps`` (a connection breaks), ``partitions`` (one direction is
    blocked for a while), ``isolations`` (a router is cut off from all workers, all
    clients or both), ``cuts`` (a prefill and a decode worker cannot reach each other, in one
    direction or both; ``cut_kinds`` as in :mod:`.faults`), ``drains``, ``turns`` (a worker changes
    its role), ``jumps`` (a clock jumps forward), ``slow`` (a client reads nothing for a while),
    ``misfits`` (a worker restarts with another model), ``forgeries`` (certificates of all workers'
    deaths without the secrets), ``raises`` (a core's own code raises an exception; ``raise_in``:
    only in events or messages with these names). ``certificate_faults``: probability that a
    certificate is lost, late, repeated, or joined by forged ones. ``victims``: kinds of nodes that
    faults strike.
    Probabilities per request: ``cancels``, ``pins``, ``deadlines``, ``names`` (an id used before),
    ``structured`` (answers follow a grammar, which takes a while to compile).
    ``harmless``: no worker may be declared dead or exit while the faults last.
    ``wait_s``: limit of the time a user waits for a token.
    ``poison``: number of requests that crash the worker that runs them. ``allowed``: error codes
    that users may get.
    """

    requests: int = 30
    load_s: float = 1.0
    settle_s: float = 40.0
    shape: Shape = field(default_factory=Shape)
    faults: Faults = field(default_factory=Faults)
    victims: tuple[str, ...] = WORKERS
    crashes: int = 0
    stops: int = 0
    pauses: int = 0
    absences: int = 0
    slow_steps: int = 0
    twins: int = 0
    hangs: int = 0
    flaps: int = 0
    partitions: int = 0
    isolations: int = 0
    cuts: int = 0
    cut_kinds: tuple[str, ...] = ("both", "there", "back", "data", "control")
    drains: int = 0
    turns: int = 0
    jumps: int = 0
    slow: int = 0
    misfits: int = 0
    forgeries: int = 0
    certificate_faults: float = 0.0
    raises: int = 0
    raise_in: frozenset[str] = frozenset()
    poison: int = 0
    cancels: float = 0.0
    pins: float = 0.0
    deadlines: float = 0.0
    names: float = 0.0
    structured: float = 0.0
    prompt: int = 60
    answer: int = 24
    harmless: bool = False
    wait_s: float = float("inf")
    allowed: frozenset[str] = frozenset()


CUT_WAIT_S = 5.0
"""Limit of a user's wait while one pair of workers is cut off: the handoff timeout, the pause
between two pings, and the time of a replay."""
CUT_ROOM = replace(TWO, routers=1, sizes=Sizes(decode_blocks=400, prefill_blocks=400))

UNLUCKY = frozenset({"poisoned", "worker_lost"})
"""A request that ran alone on several workers that died looks as if it had crashed them."""
_PINNED = UNLUCKY | frozenset({"endpoint_dead", "endpoint_unknown", "endpoint_draining"})
_ALL = Scenario(
    crashes=3,
    stops=2,
    hangs=1,
    flaps=2,
    partitions=1,
    drains=1,
    jumps=1,
    slow=1,
    cancels=0.2,
    pins=0.1,
    deadlines=0.2,
    faults=NOISE,
    victims=EVERYONE,
    allowed=_PINNED | {"deadline_exceeded"},
)
"""All kinds of faults together."""
_FAILOVER = Scenario(wait_s=PATIENT_S, shape=TWO, victims=("router",), cancels=0.1)
_RAISES = Scenario(
    raises=4,
    cancels=0.2,
    deadlines=0.1,
    pins=0.1,
    allowed=_PINNED | {"internal"},
)
"""Exceptions of our own code: each may end one request, and no other one suffers."""
LINK_EVENTS = frozenset({"PeerUp", "PeerDown", "DataUp", "Opened", "Pong"})
"""What happens to a prefill worker's link to a decode worker, and is not repeated by itself."""
_MOVES = Scenario(prompt=120, shape=Shape(sizes=MOVES), cancels=0.6, crashes=1, allowed=UNLUCKY)
_CUT = Scenario(requests=30, load_s=8.0, wait_s=CUT_WAIT_S, shape=CUT_ROOM, cuts=1, cancels=0.1)

ROGUES = replace(TWO, routers=1, rogues=True)
_ROGUE = Scenario(load_s=2.0, shape=ROGUES, cancels=0.1, answer=40)
"""Holders of one valid key of each role send whatever they can."""

# fmt: off
SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(),
    "noise": Scenario(faults=NOISE, cancels=0.1),
    "damage": Scenario(faults=Faults(damage=0.3), requests=60),
    "crash": Scenario(crashes=3, allowed=UNLUCKY),
    "crash-noise": Scenario(crashes=3, faults=NOISE, cancels=0.1, allowed=UNLUCKY),
    "router": Scenario(crashes=2, victims=("router",), cancels=0.1, deadlines=0.1),
    "router-noise": Scenario(crashes=2, victims=("router",), cancels=0.2, faults=NOISE),
    "stop": Scenario(stops=3, cancels=0.1, allowed=UNLUCKY),
    # A short pause must restart no process.
    "pauses": Scenario(
        load_s=4.0, pauses=8, slow_steps=4, harmless=True, answer=200, wait_s=TRIED_S,
        requests=40, cancels=0.1, shape=Shape(sizes=Sizes(decode_blocks=200)),
    ),
    "pauses-all": replace(_ALL, load_s=4.0, pauses=6, slow_steps=3, flaps=4, answer=100),
    "absent": Scenario(load_s=3.0, absences=3, cancels=0.1, answer=60, allowed=UNLUCKY),
    "absent-all": replace(_ALL, absences=2, shape=TWO, isolations=1),
    "twins": Scenario(load_s=2.0, twins=3, harmless=True, cancels=0.1, answer=100),
    "twins-pauses": Scenario(load_s=4.0, twins=2, pauses=4, cancels=0.1, answer=100),
    # Small, so that very many seeds can run: two incarnations of one name, with every fault.
    "lives": Scenario(
        requests=3, load_s=0.6, twins=1, harmless=True, answer=12, prompt=20,
        shape=Shape(prefill=1, decode=1, clients=1),
    ),
    "lives-all": replace(
        _ALL, requests=3, load_s=0.6, crashes=1, stops=1, hangs=0, flaps=2, twins=1, pauses=1,
        absences=1, answer=12, prompt=20, shape=Shape(prefill=1, decode=1, clients=1),
    ),
    "twins-all": replace(
        _ALL, load_s=2.0, twins=2, pauses=2, absences=1, flaps=4, shape=TWO, answer=60,
    ),
    "certificates": Scenario(
        load_s=3.0, crashes=5, stops=2, flaps=3, certificate_faults=0.6, faults=NOISE, cancels=0.1,
        answer=60, shape=Shape(prefill=2, decode=3, clients=2, routers=2), allowed=UNLUCKY,
    ),
    "certificates-all": replace(_ALL, certificate_faults=0.6, crashes=6, absences=1, shape=TWO),
    # Nobody dies, so nobody may be declared dead.
    "certificates-forged": Scenario(
        load_s=2.0, forgeries=5, flaps=3, harmless=True, cancels=0.1, answer=60,
    ),
    "hang": Scenario(hangs=2, cancels=0.1, allowed=UNLUCKY),
    "scarce": Scenario(shape=Shape(sizes=SCARCE), cancels=0.1, answer=40, requests=40, load_s=0.3),
    "scarce-crash": Scenario(
        shape=Shape(sizes=SCARCE), cancels=0.1, answer=40, crashes=2, faults=NOISE, load_s=0.3,
        allowed=UNLUCKY,
    ),
    "narrow": Scenario(shape=Shape(sizes=NARROW), prompt=150, cancels=0.1, load_s=0.2),
    "narrow-noise": Scenario(
        shape=Shape(sizes=NARROW), prompt=150, cancels=0.1, faults=NOISE, crashes=1, load_s=0.3,
    ),
    "device": replace(_MOVES, shape=Shape(sizes=DEVICE), cancels=0.7, crashes=2),
    "moves": _MOVES,
    "moves-noise": replace(_MOVES, cancels=0.3, faults=NOISE, deadlines=0.2, crashes=2),
    "in-place": replace(_MOVES, shape=Shape(sizes=IN_PLACE), deadlines=0.1, flaps=2),
    "deadline": Scenario(deadlines=0.8, stops=1, crashes=1, faults=NOISE, victims=EVERYONE),
    "pins": Scenario(pins=0.7, crashes=2, drains=1, stops=1, allowed=_PINNED),
    "drain": Scenario(drains=4, crashes=1, victims=("router",), cancels=0.1, answer=60),
    "roles": Scenario(turns=5, cancels=0.1, answer=60, load_s=1.5),
    "roles-crash": Scenario(
        turns=5, crashes=3, victims=EVERYONE, cancels=0.1, answer=60, load_s=1.5, allowed=UNLUCKY,
    ),
    "roles-noise": Scenario(
        turns=5, stops=2, cancels=0.1, answer=60, load_s=1.5, faults=NOISE, allowed=UNLUCKY,
    ),
    "rolling": Scenario(drains=6, cancels=0.1, answer=60, load_s=0.6),
    "rolling-pauses": Scenario(
        drains=6, pauses=10, cancels=0.1, answer=200, load_s=2.0,
        shape=Shape(sizes=Sizes(decode_blocks=200)), allowed=UNLUCKY,
    ),
    "rolling-noise": Scenario(
        drains=6, cancels=0.1, answer=60, load_s=0.6, faults=Faults(loss=0.15),
    ),
    "drains": Scenario(
        drains=6, crashes=3, victims=("router",), cancels=0.1, answer=60, requests=60, load_s=0.5,
    ),
    "orphans": Scenario(
        crashes=4, victims=("router", "client"), cancels=0.2, answer=40, faults=NOISE, load_s=0.5,
    ),
    "misfit": Scenario(misfits=2, cancels=0.1, allowed=UNLUCKY),
    "flaps": Scenario(flaps=6, victims=EVERYONE, cancels=0.1, allowed=UNLUCKY),
    "partition": Scenario(partitions=3, cancels=0.1, deadlines=0.1, allowed=UNLUCKY),
    "slow": Scenario(slow=3, crashes=1, cancels=0.1, answer=40),
    "jumps": Scenario(
        jumps=3, victims=EVERYONE, cancels=0.1, deadlines=0.1,
        allowed=frozenset({"deadline_exceeded"}),
    ),
    "poison": Scenario(poison=1, load_s=0.5),
    "poisons": Scenario(poison=3, load_s=0.5, allowed=UNLUCKY),
    # A request id stays in use until its cancelled request has ended.
    "names": Scenario(names=0.7, crashes=1, cancels=0.1, allowed=frozenset({"duplicate_request"})),
    "names-noise": Scenario(
        requests=50, names=0.8, cancels=0.5, faults=NOISE, allowed=frozenset({"duplicate_request"}),
    ),
    "structured": Scenario(
        structured=0.7, shape=Shape(sizes=SCARCE), cancels=0.3, deadlines=0.1, crashes=2,
        faults=NOISE, load_s=0.5, allowed=UNLUCKY,
    ),
    "embed": Scenario(shape=EMBED, requests=60, load_s=0.3, cancels=0.2, deadlines=0.1),
    "embed-noise": Scenario(
        shape=EMBED, requests=60, load_s=0.5, cancels=0.2, deadlines=0.2, crashes=3, stops=1,
        poison=1, faults=NOISE, allowed=UNLUCKY,
    ),
    "embed-all": replace(
        _ALL, shape=replace(EMBED, routers=2, clients=4), requests=60, flaps=3, partitions=2,
        drains=2, pins=0.2,
    ),
    "embed-misfit": Scenario(
        shape=EMBED, requests=60, load_s=0.5, misfits=2, cancels=0.1, allowed=UNLUCKY,
    ),
    "pictures": Scenario(shape=DRAW, prompt=24, answer=12, requests=40, cancels=0.3),
    "pictures-crash": Scenario(
        shape=DRAW, prompt=24, answer=12, requests=40, crashes=4, cancels=0.2, allowed=UNLUCKY,
    ),
    "pictures-scarce": Scenario(
        shape=replace(
            DRAW, sizes=replace(DRAW.sizes, decode_blocks=16, prefill_blocks=12, growth=1),
        ),
        prompt=24, answer=12, requests=40, cancels=0.2, crashes=1, faults=NOISE, allowed=UNLUCKY,
    ),
    "pictures-all": replace(
        _ALL, shape=replace(DRAW, routers=2, clients=4), prompt=24, answer=12, requests=40,
    ),
    "clients": Scenario(crashes=3, victims=("client",), cancels=0.2),
    "routers": Scenario(
        shape=Shape(routers=2, clients=4), crashes=2, victims=EVERYONE, cancels=0.1,
        allowed=UNLUCKY,
    ),
    "failover": replace(_FAILOVER, crashes=2, deadlines=0.1),
    "failover-noise": replace(_FAILOVER, crashes=2, cancels=0.2, faults=NOISE, answer=60),
    "failover-stop": replace(
        _FAILOVER, load_s=3.0, shape=replace(TWO, sizes=Sizes(decode_blocks=200)), stops=3,
        answer=200,
    ),
    "failover-scarce": replace(
        _FAILOVER, shape=replace(TWO, sizes=SCARCE), crashes=1, stops=1, answer=40, requests=40,
        load_s=0.3,
    ),
    "cut-off": Scenario(
        load_s=3.0, isolations=2, harmless=True, cancels=0.1, answer=200,
        shape=Shape(sizes=Sizes(decode_blocks=200)),
    ),
    "isolated": Scenario(
        harmless=True, requests=40, load_s=4.0, wait_s=TRIED_S,
        shape=replace(TWO, sizes=Sizes(decode_blocks=200)), isolations=3, cancels=0.1,
        deadlines=0.1, answer=200, allowed=UNLUCKY,
    ),
    "cut": replace(_CUT, pins=0.3, answer=16),
    "cut-narrow": replace(
        _CUT, shape=replace(CUT_ROOM, sizes=replace(NARROW, decode_blocks=400, prefill_blocks=400)),
        prompt=100,
    ),
    "cut-in-place": replace(
        _CUT,
        shape=replace(CUT_ROOM, sizes=replace(IN_PLACE, decode_blocks=400, prefill_blocks=400)),
        prompt=120, cancels=0.3,
    ),
    "cuts-noise": Scenario(
        requests=60, load_s=12.0, shape=replace(CUT_ROOM, sizes=Sizes()), cuts=5, crashes=2,
        stops=1, flaps=2, cancels=0.2, deadlines=0.2, faults=NOISE, allowed=UNLUCKY,
    ),
    "failover-all": replace(
        _ALL, shape=Shape(routers=3, clients=4), flaps=3, partitions=2, isolations=1,
    ),
    "raises": replace(_RAISES, victims=("router", "prefill", "decode")),
    "raises-router": replace(_RAISES, victims=("router",), deadlines=0.2),
    "raises-prefill": replace(_RAISES, victims=("prefill",), prompt=120),
    "raises-links": replace(
        _RAISES,
        victims=("prefill",),
        raises=8,
        raise_in=LINK_EVENTS,
        flaps=4,
        deadlines=0.0,
        wait_s=5.6,  # three workers may end within 0.4 s: poison until one is dead, 5 s later
    ),
    "raises-decode": replace(_RAISES, victims=("decode",), structured=0.3),
    "raises-embed": replace(_RAISES, shape=EMBED, requests=60, load_s=0.4),
    "raises-pictures": replace(
        _RAISES, shape=DRAW, prompt=24, answer=12, victims=("router", "prefill", "decode"),
    ),
    "raises-scarce": replace(_RAISES, shape=Shape(sizes=SCARCE), answer=40, load_s=0.4),
    "raises-in-place": replace(_RAISES, shape=Shape(sizes=IN_PLACE), prompt=120),
    "raises-failover": replace(
        _RAISES, shape=TWO, victims=("router", "prefill", "decode"), crashes=1, flaps=1,
    ),
    "raises-all": replace(_ALL, raises=6, allowed=_ALL.allowed | {"internal"}),
    "colocated": Scenario(shape=COLOCATED, cancels=0.2, deadlines=0.1, faults=NOISE),
    "colocated-crash": Scenario(shape=COLOCATED, crashes=4, cancels=0.1, allowed=UNLUCKY),
    "colocated-scarce": Scenario(
        shape=replace(COLOCATED, sizes=SCARCE), cancels=0.2, answer=40, requests=40, crashes=2,
        faults=NOISE, load_s=0.3, structured=0.3, allowed=UNLUCKY,
    ),
    "colocated-router": Scenario(
        shape=replace(COLOCATED, routers=2, clients=4), crashes=3, victims=("router",), cancels=0.1,
        faults=NOISE,
    ),
    "colocated-pauses": Scenario(
        shape=COLOCATED, load_s=3.0, pauses=6, stops=1, cancels=0.1, answer=100, allowed=UNLUCKY,
    ),
    "colocated-raises": replace(_RAISES, shape=COLOCATED, victims=("router", "decode"), raises=6),
    "colocated-rogue": replace(
        _ROGUE, shape=replace(COLOCATED, clients=4, rogues=True, greedy=True), allowed=UNLUCKY,
    ),
    "colocated-all": replace(
        _ALL, shape=replace(COLOCATED, routers=2, clients=4), structured=0.2, pauses=1,
    ),
    "mixed": Scenario(shape=MIXED, crashes=3, victims=("prefill",), cancels=0.1, faults=NOISE),
    "mixed-raises": replace(
        _RAISES, shape=MIXED, victims=("router", "prefill", "decode"), crashes=1,
    ),
    "mixed-rogue": replace(
        _ROGUE, shape=replace(ROGUES, prefill=1, local=True), crashes=2, victims=("prefill",),
        allowed=UNLUCKY,
    ),
    "mixed-all": replace(
        _ALL, shape=replace(MIXED, routers=2, clients=4), crashes=5, structured=0.2, pauses=1,
    ),
    "adaptive": Scenario(
        shape=ADAPTIVE, requests=60, crashes=2, cancels=0.1, faults=NOISE, allowed=UNLUCKY,
    ),
    "adaptive-all": replace(
        _ALL, shape=replace(ADAPTIVE, routers=2, clients=4), requests=60, structured=0.2, pauses=1,
    ),
    "rogue": _ROGUE,
    "rogue-failover": replace(
        _ROGUE, shape=replace(ROGUES, routers=2), victims=("router",), crashes=2,
    ),
    "rogue-moves": replace(_ROGUE, shape=replace(ROGUES, sizes=MOVES), prompt=120),
    "rogue-in-place": replace(_ROGUE, shape=replace(ROGUES, sizes=IN_PLACE), prompt=120),
    "rogue-greedy": replace(_ROGUE, shape=replace(ROGUES, greedy=True), allowed=UNLUCKY),
    "rogue-all": replace(_ALL, shape=replace(ROGUES, routers=2, greedy=True)),
    "all": _ALL,
}
# fmt: on


OWN_SLO_S = 0.5
"""TTFT target in a scenario that has none, which a user's own order needs."""


def with_extensions(scenario: Scenario, policy: str, decider: str, order: str) -> Scenario:
    """Return the scenario with classes of the user's own, as ``module:Class``; empty: as it is.

    Modules are looked for in the working directory last. A decider sets mode adaptive.
    """
    if not (policy or decider or order):
        return scenario
    shape = replace(scenario.shape, extensions=str(Path.cwd()))
    if policy:
        shape = replace(shape, policy=policy)
    if decider:
        shape = replace(shape, mode="adaptive", local=True, decider=decider)
    if order:
        sizes = replace(shape.sizes, slo_ttft=shape.sizes.slo_ttft or OWN_SLO_S)
        shape = replace(shape, sizes=sizes, order=order)
    return replace(scenario, shape=shape)
