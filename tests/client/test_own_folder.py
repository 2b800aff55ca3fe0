"""The user's own folder of the model vouches for the files that the cluster describes."""

import pytest

from baton.client.description import Description
from baton.client.model import ServedModel
from baton.deploy.config import demo_model_folder

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
