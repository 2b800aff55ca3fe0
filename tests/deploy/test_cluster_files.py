"""The cluster files in the wheel pass Ray's schema and preparation."""

import copy
import importlib.resources
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from msgspec import structs

import baton.deploy.ray.leave
from baton.cli.command import build_parser, main
from baton.cli.down import _SPARE_S as DOWN_SPARE_S
from baton.deploy.controller.pools import ControllerLimits
from baton.deploy.ray import firewall
from baton.deploy.ray.cluster_file import (
    RECONNECT_VARIABLE,
    FixedCluster,
    check_cluster,
    read_cluster_file,
    write_cluster_file,
)
from baton.deploy.ray.key_copies import HEAD_ROLES, roles_by_type
from baton.proto.errors import ConfigError
from baton.runtime.keys.keyring import KeyRing, make_folder
from baton.runtime.keys.shares import write_share

FILES = Path(str(importlib.resources.files("baton.deploy.ray")))
LAUNCHABLE = {"on-premises.yaml"}
NAMES = sorted(path.name for path in FILES.glob("*.yaml"))
CONNECT_S, RAY_STOP_S = 10.0, 20.0  # maximum seconds of `connect` and `ray stop`
NOT_LAUNCHED = "schema-checked, not launched"
CLUSTER = FixedCluster(
    head="10.1.0.1",
    prefill=("10.1.0.2", "10.1.0.3"),
    decode=("10.1.0.4",),
    wheel="/tmp/baton_serve-9.9.9-cp311-cp311-linux_x86_64.whl",
    name="my lab: one",
    user="root",
    reconnect=86400,
)


@pytest.fixture
def with_ray():
    return pytest.importorskip("ray", reason="needs Ray: make test-deploy")


def load(name):
    return read_cluster_file(FILES / name)


@pytest.mark.deploy
@pytest.mark.parametrize("name", NAMES)
def test_ray_takes_the_file_and_it_has_our_shape(with_ray, capfd, name):
    prepared = check_cluster(load(name))
    assert capfd.readouterr() == ("", "")  # no warnings about keys that Ray itself adds
    types = prepared["available_node_types"]
    assert set(types) == {"head", "prefill", "decode"} and prepared["head_node_type"] == "head"
    assert types["head"]["resources"] == {"CPU": 0, "router": 1}
    for pool in ("prefill", "decode"):
        assert types[pool]["resources"][pool] == 1 and types[pool]["labels"] == {"pool": pool}
        assert 0 < types[pool]["min_workers"] <= types[pool]["max_workers"]
    assert "~/.ray/auth_token" in prepared["file_mounts"]
    setup = "\n".join(prepared["head_setup_commands"])
    assert "RAY_AUTH_MODE=token" in setup and "constraints.txt" in setup
    assert f"{RECONNECT_VARIABLE}=3600" in setup
    assert "BATON_KEYS=~/.baton/keys" in setup and "~/.baton/keys" in prepared["file_mounts"]
    last = prepared["head_start_ray_commands"][-1].split()
    assert last[:4] == ["baton", "launch", "--backend", "ray"]
    build_parser().parse_args(last[1 : last.index("#") if "#" in last else None])


@pytest.mark.deploy
def test_ray_derives_the_same_pools_from_the_kubernetes_file(with_ray):
    import yaml
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _derive_autoscaling_config_from_ray_cr as derive,
    )

    cluster, service, *_ = yaml.safe_load_all((FILES / "kuberay/raycluster.yaml").read_text())
    types = derive(cluster)["available_node_types"]
    for pool in ("prefill", "decode"):
        assert types[pool]["resources"].items() >= {pool: 1, "GPU": 1}.items()
        assert types[pool]["labels"] == {"pool": pool}
        assert (types[pool]["min_workers"], types[pool]["max_workers"]) == (1, 4)
    assert types["headgroup"]["resources"]["router"] == 1
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert cluster["spec"]["rayVersion"] == with_ray.__version__
    assert service["spec"]["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]


def test_pods_drain_before_they_end_within_their_grace_period():
    yaml = pytest.importorskip("yaml", reason="needs Ray's YAML: make test-deploy")
    spec = next(yaml.safe_load_all((FILES / "kuberay/raycluster.yaml").read_text()))["spec"]

    def words(template, hook):
        return template["containers"][0]["lifecycle"][hook]["exec"]["command"][-1]

    def seconds(text, flag):
        return float(text.split(f"{flag} ")[1].split()[0].rstrip(";"))

    head = spec["headGroupSpec"]["template"]["spec"]
    grace = seconds(words(head, "postStart"), "--grace")
    build_parser().parse_args(words(head, "postStart").split("; baton ")[1].split())
    down, end = words(head, "preStop").split("; ")
    build_parser().parse_args(down.split()[1:])
    assert end == "ray stop"
    assert head["terminationGracePeriodSeconds"] >= grace + DOWN_SPARE_S + RAY_STOP_S
    assert len(spec["workerGroupSpecs"]) == 2
    for group in spec["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        leave, end = words(pod, "preStop").split("; ")
        assert leave.startswith(f"python -P -m {baton.deploy.ray.leave.__name__} --within ")
        within = seconds(leave, "--within")
        assert within >= grace + CONNECT_S + ControllerLimits().stop_timeout
        assert end == "ray stop" and pod["terminationGracePeriodSeconds"] >= within + RAY_STOP_S


def test_the_kubernetes_file_says_that_it_was_not_launched():
    for name in ("raycluster.yaml", "Dockerfile"):
        assert NOT_LAUNCHED in (FILES / "kuberay" / name).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_whether_it_was_launched(name):
    head = (FILES / name).read_text().split("\n\n")[0]
    assert (NOT_LAUNCHED in head) == (name not in LAUNCHABLE)


@pytest.mark.parametrize("pool", ["prefill", "decode"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - LAUNCHABLE))
def test_in_a_cloud_a_workers_node_keeps_the_keys_of_its_pool_alone(name, pool, tmp_path):
    text = (FILES / name).read_text()
    after = text.split(f'labels: {{"pool": "{pool}"}}')[1]
    found = re.match(
        r"\n    initialization_commands:.*\n      - (find /tmp/ray_tmp_mount .*)\n", after
    )
    assert found and "  ~/.baton/keys: cluster-keys\n" in text
    keys = tmp_path / "baton" / "~" / ".baton" / "keys"
    keys.mkdir(parents=True)
    ours = {"allowed.toml", f"{pool}.key", f"{pool}@gpu7.key", f"{pool}-3.key"}
    other = {"prefill": "decode", "decode": "prefill"}[pool]
    for file in (*ours, "router.key", "operator.key", "client.key", f"{other}.key", "alice.key"):
        (keys / file).touch()
    command = found[1].replace("/tmp/ray_tmp_mount", str(tmp_path))
    subprocess.run(["sh", "-c", command], check=True)
    assert {path.name for path in keys.iterdir()} == ours


def texts():
    """Return the text of every cluster file by name: those in the wheel and a written one."""
    found = {name: (FILES / name).read_text() for name in NAMES}
    return {**found, "written": write_cluster_file(CLUSTER)}


@pytest.mark.parametrize("name", [*NAMES, "written"])
def test_a_nodes_environment_turns_rays_memory_monitor_off(name, tmp_path):
    commands = re.findall(r"^  - (echo 'export .*)$", texts()[name], re.MULTILINE)
    (tmp_path / ".baton").mkdir()
    script = "; ".join([*commands, ". ~/.baton/env", "env"])
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash", "-ec", script], env=environment, capture_output=True, text=True, check=True
    )
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert found["RAY_memory_monitor_refresh_ms"] == "0" and found["RAY_AUTH_MODE"] == "token"
    assert found["BATON_ADDRESS"].endswith(":7070")
    assert found["BATON_KEYS"] == f"{tmp_path}/.baton/keys"


START_OPTIONS = {**firewall.NODE_PORTS, **firewall.WORKER_PORTS}


@pytest.mark.parametrize("name", [*NAMES, "written"])
def test_every_ray_start_of_a_file_names_all_its_ports(name):
    starts = re.findall(r"ray start .*", texts()[name])
    assert len(starts) == 2
    for start in starts:
        assert f"--port={firewall.GCS}" in start or f":{firewall.GCS} " in start
        found = {key: int(value) for key, value in re.findall(r"--(\S+-port)=(\d+)", start)}
        assert found == START_OPTIONS


def pods():
    """Return the Kubernetes manifest's Ray containers with their groups, and its policies."""
    yaml = pytest.importorskip("yaml", reason="needs Ray's YAML: make test-deploy")
    documents = list(yaml.safe_load_all((FILES / "kuberay/raycluster.yaml").read_text()))
    spec = documents[0]["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    policies = [d["spec"] for d in documents if d["kind"] == "NetworkPolicy"]
    return [(group, group["template"]["spec"]["containers"][0]) for group in groups], policies


def test_every_ray_pod_has_fixed_ports_its_own_probes_and_no_memory_monitor():
    groups, _ = pods()
    assert len(groups) == 3
    agent = firewall.NODE_PORTS["dashboard-agent-listen-port"]
    for group, container in groups:
        found = {k: int(v) for k, v in group["rayStartParams"].items() if k.endswith("-port")}
        assert found == START_OPTIONS
        assert {"name": "RAY_memory_monitor_refresh_ms", "value": "0"} in container["env"]
        for probe in ("livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"] == {"path": "/api/healthz", "port": agent}
    text = (FILES / "kuberay/raycluster.yaml").read_text()
    assert "KubeRay operator 1.6 or later" in text


def between_hosts() -> list[tuple[int, int]]:
    """Ranges of ports (first, last) that Ray on one host of a cluster uses on another."""
    low, high = firewall.WORKER_PORTS.values()
    single = sorted(
        {firewall.GCS, *firewall.NODE_PORTS.values()} - {firewall.NODE_PORTS["metrics-export-port"]}
    )
    ranges: list[tuple[int, int]] = []
    for port in single:
        if ranges and port == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], port)
        else:
            ranges.append((port, port))
    return sorted([*ranges, (low, high)])


def test_policies_open_rays_ports_to_pods_of_the_cluster_alone():
    _, policies = pods()
    rules = [(policy["podSelector"], rule) for policy in policies for rule in policy["ingress"]]

    def ranges(source):
        return sorted(
            (port["port"], port.get("endPort", port["port"]))
            for selected, rule in rules
            if selected == {"matchLabels": {"ray.io/cluster": "baton"}}
            and any(source in peer for peer in rule["from"])
            for port in rule["ports"]
        )

    assert ranges("podSelector") == between_hosts()
    assert ranges("namespaceSelector") == [
        (port, port) for port in sorted(firewall.metrics_ports())
    ]
    open_to_all = [rule["ports"] for _, rule in rules if "from" not in rule]
    assert open_to_all == [[{"protocol": "TCP", "port": 7070}]]


def test_a_pod_makes_keys_that_are_accepted_of_what_kubernetes_mounts(tmp_path):
    """Volumes as Kubernetes creates them with fsGroup: an emptyDir with mode 2777, and a secret
    whose files are links to group-readable files."""
    text = (FILES / "kuberay/raycluster.yaml").read_text()
    (command,) = re.findall(r'command: \[sh, -c, "(umask .*)"\]', text)
    make_folder(tmp_path / "all")
    secret, mount = tmp_path / "secret", tmp_path / "baton"
    write_share(tmp_path / "all", secret / "..2026_11_22", ["decode"])
    (secret / "..data").symlink_to("..2026_11_22")
    for file in (secret / "..data").iterdir():
        file.chmod(0o640)
        (secret / file.name).symlink_to(f"..data/{file.name}")
    mount.mkdir()
    mount.chmod(0o2777)
    command = command.replace("/mnt/keys", str(secret)).replace("/home/ray/.baton", str(mount))
    for _ in range(2):  # a restarted pod has the same volume
        subprocess.run(["sh", "-c", command], check=True)
    assert KeyRing(mount / "keys", "decode").role == "decode"
    assert (mount / "keys").stat().st_mode & 0o777 == 0o700
    for path, mode, said in (
        (mount / "keys", 0o2777, "others may write to it"),
        (mount / "keys/decode.key", 0o640, "others may use it"),
    ):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(ConfigError, match=said):
            KeyRing(mount / "keys", "decode")
        path.chmod(before)


def test_on_kubernetes_each_group_of_pods_mounts_a_secret_of_its_own():
    text = (FILES / "kuberay/raycluster.yaml").read_text()
    assert re.findall(r"secretName: ([a-z-]+)", text) == [
        f"baton-keys-{group}" for group in ("head", "prefill", "decode")
    ]


@pytest.mark.deploy
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [(), ("auth",), ("available_node_types", "decode")])
def test_an_unknown_key_is_named(with_ray, name, place):
    config = copy.deepcopy(load(name))
    section = config
    for key in place:
        section = section[key]
    section["autoscale"] = True
    with pytest.raises(ConfigError, match=r"'autoscale' was unexpected"):
        check_cluster(config)


@pytest.mark.deploy
def test_an_unknown_key_of_our_provider_is_named(with_ray):
    config = load("on-premises.yaml")
    config["provider"]["hosts"] = []
    with pytest.raises(ConfigError, match="provider: Object contains unknown field `hosts`"):
        check_cluster(config)


@pytest.mark.deploy
def test_a_file_for_hosts_of_ones_own_reads_back_as_what_it_was_written_from(with_ray, tmp_path):
    (tmp_path / "c.yaml").write_text(write_cluster_file(CLUSTER))
    config = read_cluster_file(tmp_path / "c.yaml")
    check_cluster(config)
    assert config["cluster_name"] == "my lab: one" and config["max_workers"] == 3
    assert config["provider"]["pools"] == {
        "head": ["10.1.0.1"],
        "prefill": ["10.1.0.2", "10.1.0.3"],
        "decode": ["10.1.0.4"],
    }
    assert config["available_node_types"]["prefill"]["max_workers"] == 2
    assert config["available_node_types"]["decode"]["max_workers"] == 1
    name = "baton_serve-9.9.9-cp311-cp311-linux_x86_64.whl"
    assert config["file_mounts"][f"~/.baton/wheel/{name}"] == f"/tmp/{name}"
    assert any(f"~/.baton/wheel/{name}" in command for command in config["setup_commands"])
    assert any(f" {RECONNECT_VARIABLE}=86400 " in c for c in config["setup_commands"])
    assert "baton_serve-0.1.0" not in (tmp_path / "c.yaml").read_text()


def test_hosts_of_workers_that_change_their_role_get_the_keys_of_both_pools():
    text = write_cluster_file(structs.replace(CLUSTER, turn=True))
    lines = [line.split(": ", 1)[1] for line in text.splitlines() if " resources: {" in line]
    found = {str(number): {"resources": json.loads(line)} for number, line in enumerate(lines)}
    both = ["prefill", "decode"]
    assert roles_by_type(found, "0") == {"0": list(HEAD_ROLES), "1": both, "2": both}
    assert "turn" not in write_cluster_file(CLUSTER)


def test_hosts_that_cannot_be_are_refused_when_the_file_is_written():
    import msgspec

    for change, said in (
        ({"head": "10.1.0.2"}, "in head and prefill"),
        ({"decode": ()}, "min_workers 1 and max_workers 0"),
        ({"prefill_min": 3}, "min_workers 3 and max_workers 2"),
        ({"reconnect": 0}, "reconnect is 0, not 1 to 1000000 seconds"),
        ({"decode": ("gpu-2",)}, "not an IP address"),
    ):
        with pytest.raises(ConfigError, match=said):
            write_cluster_file(msgspec.structs.replace(CLUSTER, **change))


def test_the_wheel_is_found_from_every_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "baton_serve-9.9.9-py3-none-any.whl").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["keygen", str(tmp_path / "keys")]) == 0
    words = ["--head=10.0.0.1", "--prefill=10.0.0.2", "--decode=10.0.0.3"]
    words.append(f"--keys={tmp_path / 'keys'}")
    assert main(["ray-config", *words, "--wheel=baton_serve-9.9.9-py3-none-any.whl"]) == 0
    assert f": {tmp_path}/baton_serve-9.9.9-py3-none-any.whl" in capsys.readouterr().out
