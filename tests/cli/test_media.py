"""The files that ``baton draw`` and ``baton speak`` write: no name promises another format."""

import pytest

from baton.cli.command import main
from baton.cli.media import check_output
from baton.proto.errors import ConfigError

FORMATS = {".wav": "WAV", ".flac": "FLAC"}


@pytest.mark.parametrize("name", ["a.wav", "a.FLAC", "a", "a.2", "-"])
def test_names_that_are_written(name, tmp_path):
    check_output(name if name == "-" else str(tmp_path / name), FORMATS)


@pytest.mark.parametrize(
    ("command", "name", "said"),
    [
        ("speak", "a.mp3", "as .mp3: only WAV (.wav) or FLAC (.flac) is written"),
        ("speak", "a.png", "as .png: only WAV"),
        ("draw", "a.JPG", "as .jpg: only PNG (.png) is written"),
    ],
)
def test_a_name_of_another_format_is_refused_before_the_cluster_is_asked(
    command, name, said, tmp_path, capsys
):
    path = tmp_path / name
    assert main([command, "one", "-o", str(path), "--address", "ipc:///nowhere"]) == 2
    assert f"cannot write {path} {said}" in capsys.readouterr().err
    assert not path.exists()


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        check_output(str(tmp_path / "none" / "a.wav"), FORMATS)


def test_stop_strings_are_no_option_of_speech(capsys):
    command = ["speak", "one", "-o", "a.wav", "--address", "ipc:///nowhere", "--stop", "x"]
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert "--stop" in capsys.readouterr().err
