"""A launching machine, hosts for the cluster, and the wheel for them."""

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from .hosts import Lab, missing
from .plain import PlainCluster, answers_undisturbed

ROOT = Path(__file__).parents[2]


def _without_ray() -> str:
    try:
        import ray
    except ImportError:
        return "needs Ray: make test-deploy"
    return "" if ray.__version__ == "2.60.0" else f"needs Ray 2.60.0, not {ray.__version__}"


def _other_versions() -> list[str]:
    """Return installed packages whose versions a node would replace.

    The hosts of these tests use this environment's packages and reach no package index, so an
    installation there succeeds only if nothing has to be replaced.
    """
    found = []
    for line in (ROOT / "deploy/ray/constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        try:
            installed = metadata.version(name) if version else ""
        except metadata.PackageNotFoundError:  # of the extra cuda, which these hosts do not have
            continue
        if installed != version:
            found.append(f"{name} {installed}, not {version}")
    return found


@pytest.fixture(scope="module")
def plain_cluster(tmp_path_factory):
    """A cluster without Ray, each process on a separate host."""
    if why := missing():
        pytest.skip(why)
    cluster = PlainCluster(tmp_path_factory.mktemp("plain"))
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def expected(plain_cluster):
    """The answers of the streams of :class:`PlainCluster` without a fault."""
    return answers_undisturbed(plain_cluster)


@pytest.fixture(scope="session")
def able():
    """Skip if Ray is not installed or hosts cannot be created; fail if versions differ."""
    if why := _without_ray() or missing():
        pytest.skip(why)
    if others := _other_versions():
        pytest.fail(f"not the versions of deploy/ray/constraints.txt: {', '.join(others)}")


@pytest.fixture(scope="session")
def wheel(able, tmp_path_factory):
    """Baton's wheel, built once. On a busy machine its kernels take minutes to compile, so the
    time limits of tests (``func_only``) begin after their fixtures.
    """
    folder = tmp_path_factory.mktemp("wheel")
    build = ["build", f"--build-base={folder}/build", "bdist_wheel", f"--dist-dir={folder}/dist"]
    command = [sys.executable, "setup.py", "-q", "egg_info", f"--egg-base={folder}", *build]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def lab(wheel, tmp_path_factory):
    """Five hosts, each with a virtual environment with Ray, and a machine outside."""
    lab = Lab(tmp_path_factory.mktemp("lab"), 5, keep=[wheel.parent])
    try:
        for host in [lab.outside, *lab.hosts]:
            make_environment(host)
        install = f"~/.baton/venv/bin/python -m pip install -q --no-deps {wheel}"
        done = lab.outside.run(install, PIP_NO_INDEX="1")
        assert done.returncode == 0, done.stdout
        lab.wait_ssh()
        yield lab
    finally:
        lab.close()


def make_environment(host, ray="2.60.0") -> None:
    """Create a virtual environment with Ray and Baton's requirements, as in an operator's image.

    It only links to the packages of this test's environment, so it takes tenths of a second per
    host. The commands of the cluster file install Baton itself.
    """
    script = "from ray.scripts.scripts import main; main()"
    venv = "~/.baton/venv"
    packages = sysconfig.get_path("purelib")
    done = host.run(
        f"set -e; {sys.base_prefix}/bin/python3 -m venv --without-pip {venv}; "
        f"echo {packages} > {venv}/lib/python3.11/site-packages/image.pth; "
        f'echo -e "#!$(echo {venv})/bin/python\\n{script}" > {venv}/bin/ray; '
        f"chmod +x {venv}/bin/ray; echo 'export PIP_NO_INDEX=1' > ~/.bashrc"
    )
    assert done.returncode == 0, done.stdout
