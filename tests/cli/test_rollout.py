"""``baton rollout`` after ``baton wait-ready``: the controller is the last to see all ready."""

import contextlib

import pytest

from baton.cli import rollout
from baton.cli.command import build_parser
from baton.deploy.controller.admin import Overview, Progress, RollOut
from baton.proto.errors import CheckpointError, RequestFailed


class Controller:
    """Is starting for a number of polls, then serves; refuses a rollout while it starts."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.orders: list[RollOut] = []

    def overview(self) -> Overview:
        self.looks -= 1
        return Overview(phase="serving" if self.looks < 0 else "starting")

    def ask(self, request):
        if self.looks >= 0:
            raise RequestFailed("the cluster is not ready yet")
        self.orders.append(request)
        yield Progress(number=1, text="0 of 3 replaced", accepted=True)


def ordered(monkeypatch, controller: Controller, *words: str) -> int:
    monkeypatch.setattr(rollout, "operator", lambda _: contextlib.nullcontext(controller))
    monkeypatch.setattr(rollout, "_PAUSE", 0.0)
    arguments = build_parser().parse_args(["rollout", *words])
    return arguments.run(arguments)


def test_a_cluster_that_still_starts_is_waited_for(monkeypatch, capsys):
    assert ordered(monkeypatch, Controller(3)) == 0
    assert "rollout begun: 0 of 3 replaced" in capsys.readouterr().out


def test_the_wait_is_over_with_the_timeout(monkeypatch):
    with pytest.raises(RequestFailed, match="not ready yet"):
        ordered(monkeypatch, Controller(1 << 40), "--timeout", "0.01")


def test_changes_of_the_command_replace_those_of_the_file(monkeypatch, tmp_path):
    controller = Controller(0)
    file = tmp_path / "baton.toml"
    file.write_text("max_num_seqs = 3\nmax-num-batched-tokens = 64\n")
    assert ordered(monkeypatch, controller, "--config", str(file), "max-num-seqs=5") == 0
    changes = {"max_num_seqs": "5", "max_num_batched_tokens": 64}
    assert controller.orders == [RollOut(changes=changes)]


def test_a_damaged_tokenizer_of_the_new_model_is_found_before_the_order(
    monkeypatch, tmp_path, capsys
):
    controller = Controller(0)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        ordered(monkeypatch, controller, f"model={tmp_path}")
    assert controller.looks == 0  # it was not polled
    elsewhere = tmp_path / "on_another_host"
    assert ordered(monkeypatch, controller, f"model={elsewhere}") == 0
    assert "rollout begun" in capsys.readouterr().out
