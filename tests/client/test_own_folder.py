"""The user's own folder of the model vouches for the files that the cluster describes."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.client.description import Description
from baton.client.model import ServedModel
from baton.deploy.config import demo_model_folder
from baton.text.tokenizer import Tokenizer

from ..model_cards import model_card

CARD = model_card(vocab_size=1024)
NAMES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.mark.parametrize(
    ("change", "trusted"),
    [
        (lambda files: None, True),
        (lambda files: files.pop("tokenizer_config.json"), True),
        (lambda files: files.update({"chat_template.jinja": b"{{ 1 }}"}), False),
        (lambda files: files.update({"special_tokens_map.json": b"{}"}), False),
    ],
    ids=["same", "fewer", "another template", "a file that the folder lacks"],
)
def test_files_of_the_own_folder_are_trusted(change, trusted):
    folder = demo_model_folder()
    files = {name: (folder / name).read_bytes() for name in NAMES}
    change(files)
    model = ServedModel(Description(CARD, "", files), str(folder))
    try:
        assert model.tokenizer.is_guarded is not trusted
    finally:
        model.close()


def test_without_an_own_folder_nothing_is_trusted():
    folder = demo_model_folder()
    files = {name: (folder / name).read_bytes() for name in NAMES}
    model = ServedModel(Description(CARD, str(folder), files))
    try:
        assert model.tokenizer.is_guarded
    finally:
        model.close()


def test_requests_at_the_same_time_load_one_tokenizer(monkeypatch):
    from_files = Tokenizer.from_files

    def slow(*arguments, **options):
        time.sleep(0.05)  # of a large vocabulary
        return from_files(*arguments, **options)

    monkeypatch.setattr(Tokenizer, "from_files", slow)
    folder = demo_model_folder()
    files = {name: (folder / name).read_bytes() for name in NAMES}
    model = ServedModel(Description(CARD, str(folder), files))
    start = threading.Barrier(8)

    def load() -> Tokenizer:
        start.wait()
        return model.tokenizer

    try:
        with ThreadPoolExecutor(8) as threads:
            tokenizers = [one.result() for one in [threads.submit(load) for _ in range(8)]]
        assert len(set(map(id, tokenizers))) == 1
    finally:
        model.close()
