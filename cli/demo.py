"""``baton demo``: start a whole cluster, answer prompts, survive a killed worker, and stop.

One answer comes over HTTP. With ``--images`` the questions are about pictures, and
with ``--pictures`` the prompts become pictures. With ``--speech`` the cluster speaks digits.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable

from baton.client import Client
from baton.deploy.config import (
    ServeSettings,
    demo_flux_folder,
    demo_speech_folder,
    demo_vision_model_folder,
)
from baton.deploy.local.cluster import LocalCluster, check_model
from baton.deploy.local.terminal import terminal
from baton.proto.errors import BatonError, ConfigError
from baton.proto.sampling import SamplingParamsInput

from .demo_media import DrawTour, ImageTour, SpeechTour
from .demo_steps import KILL_TOKENS, Question, show, show_http, show_kill
from .serve import run_cluster

QUESTIONS = (
    "What is Baton?",
    "What is the KV cache?",
    "Tell me a story about a fox.",
    "What is 7 plus 8?",
)
HTTP_QUESTION = "Who are you?"
KILL_QUESTION = Question(
    "Tell me a story about a fox.",
    sampling=SamplingParamsInput(
        temperature=0.8, seed=7, max_new_tokens=KILL_TOKENS, ignore_eos=True
    ),
)

Tour = Callable[[Client, str], None]
"""Asks the questions, of a client and of the gateway at an URL."""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("demo", help="start a cluster, answer prompts, kill a worker, stop")
    parser.add_argument("--address", default="", help="client address [a private socket file]")
    parser.add_argument(
        "--images", action="store_true", help="ask about images, with a model that takes images"
    )
    parser.add_argument(
        "--speech", action="store_true", help="speak, with a model that speaks digits"
    )
    parser.add_argument(
        "--pictures",
        nargs="?",
        const="",
        metavar="PROMPT",
        help="draw pictures of the prompts, with a model of coloured shapes",
    )
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="where --images, --speech or --pictures writes its files [a new temporary folder]",
    )
    parser.add_argument("questions", metavar="QUESTION", nargs="*", help="prompts [examples]")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the supervisor in the main thread, and ask the questions from another thread."""
    model, make_tour = _model_and_tour(arguments)
    settings = ServeSettings(
        model=model,
        prefill=1,
        decode=2,
        http_port=0,
        address=arguments.address,
        kv_memory="64MiB",
        stats_interval=0,
    )
    check_model(settings)
    tour = make_tour()
    print("starting a gateway, a router, one prefill worker and two decode workers ...", flush=True)
    cluster = LocalCluster(settings, terminal, private=not arguments.address)
    asker = _Asker(cluster, tour)
    cluster.on_ready(asker.start)
    code = run_cluster(cluster)
    if cluster.interrupted and not asker.done:
        raise KeyboardInterrupt  # also if the cluster failed: the user pressed Ctrl-C
    code = code or asker.outcome()
    if code == 0:
        print("demo finished: the cluster is stopped and its files are removed", flush=True)
    return code


def _model_and_tour(arguments: argparse.Namespace) -> tuple[str, Callable[[], Tour]]:
    """Return the model, empty for the embedded text model, and what makes its tour."""
    kind, folder, questions = kind_of(arguments)
    if kind == "pictures":
        return str(demo_flux_folder()), lambda: DrawTour(folder, questions)
    if kind == "speech":
        return str(demo_speech_folder()), lambda: SpeechTour(folder, questions)
    if kind == "images":
        return str(demo_vision_model_folder()), lambda: ImageTour(folder, questions)
    return "", lambda: text_tour(questions or QUESTIONS)


def kind_of(arguments: argparse.Namespace) -> tuple[str, str | None, tuple[str, ...]]:
    """Return the kind of demo, its folder and its questions. Raises ConfigError for two kinds."""
    folder, prompt, questions = arguments.output, arguments.pictures, tuple(arguments.questions)
    if prompt:
        questions = (prompt, *questions)
    kinds = {
        "images": arguments.images,
        "speech": arguments.speech,
        "pictures": prompt is not None,
    }
    chosen = [kind for kind, wanted in kinds.items() if wanted]
    if len(chosen) > 1:
        raise ConfigError(f"--{chosen[0]} and --{chosen[1]} are two demos: choose one")
    if not chosen and folder is not None:
        raise ConfigError("--output needs --images, --speech or --pictures")
    return chosen[0] if chosen else "", folder, questions


def text_tour(questions: tuple[str, ...]) -> Tour:
    """Return the tour of the model for text."""

    def tour(client: Client, url: str) -> None:
        for question in questions:
            show(client, Question(question))
        messages = [{"role": "user", "content": HTTP_QUESTION}]
        show_http(url, {"messages": messages, "temperature": 0})
        show_kill(client, KILL_QUESTION, "sampled with a seed")

    return tour


class _Asker(threading.Thread):
    """Thread that asks the questions and then stops the cluster."""

    def __init__(self, cluster: LocalCluster, tour: Tour) -> None:
        super().__init__(name="demo", daemon=True)
        self._cluster = cluster
        self._tour = tour
        self.done = False  # every question is answered
        self._problem: BatonError | OSError | None = None

    def run(self) -> None:
        try:
            terminal.flush()  # else a late line of the cluster comes between question and answer
            with Client(self._cluster.plan.address) as client:
                self._tour(client, self._cluster.plan.http_url)
            self.done = True
        except (BatonError, OSError) as problem:  # OSError: the reader closed the output pipe
            self._problem = problem
        finally:
            self._cluster.interrupt()

    def outcome(self) -> int:
        """Return 0 if every question was answered, else 1. Raises the error that occurred."""
        if self._problem is not None:
            raise self._problem
        return 0 if self.done else 1
