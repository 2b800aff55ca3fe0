"""Checks of a wheel before its installation on a running cluster. No Ray needed."""

import zipfile

import pytest

from baton.cli.command import main
from baton.deploy.ray.connect import RAY_VERSION
from baton.deploy.ray.release import read_wheel
from baton.proto.errors import ConfigError


def wheel(folder, name="baton-serve", ray=RAY_VERSION):
    path = folder / "baton_serve-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "baton_serve-9.9.9.dist-info/METADATA",
            f"Metadata-Version: 2.4\nName: {name}\nVersion: 9.9.9\n"
            f'Requires-Dist: numpy>=2\nRequires-Dist: ray=={ray}; extra == "ray"\n\ntext',
        )
    return path


def test_a_wheel_is_read_with_its_version(tmp_path):
    path = wheel(tmp_path)
    assert read_wheel(path) == (path.name, "9.9.9", path.read_bytes())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "baton"}, "is not a wheel of baton-serve"),
        ({"ray": "9.0.0"}, r"needs ray==9\.0\.0 and this cluster runs Ray 2\.60\.0: end the clus"),
    ],
)
def test_a_wheel_that_would_break_the_cluster_is_refused(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        read_wheel(wheel(tmp_path, **changes))


def test_a_file_that_is_no_wheel_is_named(tmp_path, capsys):
    (tmp_path / "x.whl").write_text("text")
    assert main(["install", str(tmp_path / "x.whl")]) == 2
    assert "x.whl is not a wheel; create one with" in capsys.readouterr().err
    assert main(["install", str(tmp_path / "missing.whl")]) == 2
    assert "No such file" in capsys.readouterr().err
