"""The layout that lets top-level folders be imported as ``baton.*``, and what gets installed."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from baton import DISTRIBUTION

HERE = Path(__file__)
ROOT = HERE.parents[2]
LINKS = ROOT / "src" / "baton"
RAY_DATA = {".sh", ".txt", ".yaml"}
NOT_INSTALLED = ("benchmarks",)
SPOKEN = {".md", ".py", *RAY_DATA}


def package_folders():
    return sorted(p.parent.name for p in ROOT.glob("*/__init__.py") if p.parent.name != "tests")


def data_files():
    return [
        *sorted((ROOT / "engine/kernels/csrc").glob("*")),
        *sorted((ROOT / "deploy/demo_model").glob("*")),
        *(p for p in sorted((ROOT / "deploy/demo_flux").rglob("*")) if p.is_file()),
        *sorted((ROOT / "deploy/demo_vision_model").glob("*")),
        *(p for p in sorted((ROOT / "deploy/demo_speech").rglob("*")) if p.is_file()),
        *(p for p in sorted((ROOT / "deploy/ray").rglob("*")) if p.suffix in RAY_DATA),
        ROOT / "deploy/ray/kuberay/Dockerfile",
    ]


def expected_files():
    names = [name for name in package_folders() if name not in NOT_INSTALLED]
    python = [p for name in names for p in (ROOT / name).rglob("*.py")]
    python.remove(ROOT / "deploy/docker/ready.py")
    return {f"baton/{p.relative_to(ROOT)}" for p in [*python, *data_files()]} | {"baton/py.typed"}


def test_every_package_folder_has_its_relative_link():
    assert len(package_folders()) >= 12
    for name in package_folders():
        link = LINKS / name
        assert link.is_symlink(), (
            f"src/baton/{name} is missing: ln -s ../../{name} src/baton/{name}"
        )
        assert str(link.readlink()) == f"../../{name}"


def test_no_link_without_its_folder():
    names = {p.name for p in LINKS.iterdir() if p.is_symlink()}
    assert names == set(package_folders())


def test_an_install_holds_every_module_kernel_source_and_model_file(tmp_path):
    # A separate base: file lists of earlier installs in src/*.egg-info would hide a gap.
    metadata = tmp_path / "metadata"
    metadata.mkdir()
    command = ["egg_info", f"--egg-base={metadata}", "build_py", f"--build-lib={tmp_path}/lib"]
    subprocess.run(
        [sys.executable, "setup.py", "-q", *command], cwd=ROOT, check=True, capture_output=True
    )
    built = {str(p.relative_to(tmp_path / "lib")) for p in (tmp_path / "lib").rglob("*")}
    assert expected_files() - built == set()
    outside = ("baton/benchmarks", "baton/deploy/docker", "baton/deploy/systemd")
    assert not any(name.startswith(outside) for name in built)
    facts = (metadata / "baton_serve.egg-info/PKG-INFO").read_text()
    assert "Name: baton-serve\n" in facts
    assert "Classifier: Operating System :: POSIX :: Linux\n" in facts


def test_without_a_compiler_the_build_goes_on_and_says_what_that_means(tmp_path):
    folders = [f"--build-lib={tmp_path}", f"--build-temp={tmp_path}"]
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *folders],
        cwd=ROOT, env={**os.environ, "CC": "/bin/false"},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "the C kernels were not built" in built.stderr
    assert "slow NumPy kernels" in built.stderr
    assert "C compiler" in built.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_pip_is_never_told_to_install_another_projects_distribution():
    """The import name is baton; on the package index that name is another project's."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == DISTRIBUTION
    wrong = re.compile(r"(?<![\w-])baton\[|(?<![\w-])baton-[*\d]\S*\.whl")
    folders = [ROOT / name for name in (*package_folders(), "docs", "tests")]
    files = [*ROOT.glob("*.md"), *(p for folder in folders for p in folder.rglob("*"))]
    named = {
        str(file.relative_to(ROOT)): found.group()
        for file in files
        if (file.suffix in SPOKEN or file.name == "Dockerfile") and file != HERE
        if (found := wrong.search(file.read_text()))
    }
    assert named == {}


def test_the_lock_is_hashed_and_names_no_index_and_no_torch():
    lock = (ROOT / "requirements.lock").read_text()
    for word in ("://", "--index", "--find-links", "--extra", "torch", "cupy"):
        assert word not in lock
    pinned = [line for line in lock.splitlines() if "==" in line and not line.startswith("#")]
    vendors = {line.split("==")[0] for line in pinned if line.startswith("nvidia")}
    assert vendors == {"nvidia-cuda-nvdisasm", "nvidia-cuda-nvrtc"}  # compilers, no libraries
    assert len(pinned) > 20
    assert lock.count("--hash=sha256:") > len(pinned)


def test_the_lock_covers_what_the_project_needs():
    lock = (ROOT / "requirements.lock").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    pinned = {line.split("==")[0] for line in lock.splitlines() if "==" in line}
    assert {requirement.split(">=")[0] for requirement in wanted} <= pinned


def pins(text):
    lines = (line.split()[0] for line in text.splitlines() if "==" in line and line[0].isalnum())
    return dict(line.split("==") for line in lines)


def test_nodes_install_what_the_lock_and_the_ray_extra_say():
    lock = pins((ROOT / "requirements.lock").read_text())
    nodes = pins((ROOT / "deploy/ray/constraints.txt").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {requirement.split(">=")[0] for requirement in project["dependencies"]}
    assert wanted <= set(nodes)
    assert [f"ray=={nodes['ray']}"] == project["optional-dependencies"]["ray"]
    assert project["optional-dependencies"]["cuda"] == ["cupy-cuda13x[ctk]>=14"]
    assert {"cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cublas"} <= set(nodes)  # ctk brings them
    assert {name: nodes[name] for name in nodes if name in lock} == {
        name: lock[name] for name in nodes if name in lock
    }


def test_the_environment_of_test_deploy_has_the_versions_of_the_nodes():
    # Otherwise pip on a host replaces what Ray brought, from an index that no host reaches.
    (rule,) = re.findall(
        r"^\$\(RAY_VENV\)/\.installed:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M
    )
    (ray,) = [line for line in rule.replace("\\\n", "").splitlines() if '["ray"]' in line]
    assert "--constraint $(RAY_CONSTRAINTS)" in ray


@pytest.mark.long
def test_wheel_from_a_source_archive_has_everything(tmp_path):
    build = "from setuptools import build_meta; import sys; build_meta.build_{}(sys.argv[1])"
    run = {"check": True, "capture_output": True}
    subprocess.run([sys.executable, "-c", build.format("sdist"), str(tmp_path)], cwd=ROOT, **run)
    (archive,) = tmp_path.glob("*.tar.gz")
    subprocess.run(["tar", "xzf", archive.name], cwd=tmp_path, **run)
    source = archive.name.removesuffix(".tar.gz")
    subprocess.run(
        [sys.executable, "-c", build.format("wheel"), str(tmp_path)], cwd=tmp_path / source, **run
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected_files() - names == set()
    assert any(name.startswith("baton/engine/kernels/_cpu.") for name in names)
    assert not any(name.startswith("baton/benchmarks") for name in names)
