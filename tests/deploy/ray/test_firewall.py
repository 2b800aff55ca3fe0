"""Firewall rules for the hosts of a cluster."""

import pytest

from baton.cli.command import main
from baton.deploy.ray.firewall import firewall_rules
from baton.proto.errors import ConfigError

CLOSED = "6379, 6380, 6381, 6382, 6383, 6384, 10001, 44217, 44227, 52365, 10002-10999"
HOSTS = ["--head=10.1.0.1", "--prefill=10.1.0.2", "--decode=10.1.0.3,fd00::4"]


def test_rays_ports_are_open_to_hosts_its_metrics_to_prometheus_and_closed_to_others(capsys):
    assert main(["ray-config", "--firewall", *HOSTS, "--metrics=10.1.0.9"]) == 0
    rules = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert rules[rules.index('iifname "lo" accept') + 1 : -2] == [
        "ip saddr { 10.1.0.1, 10.1.0.2, 10.1.0.3 } accept",
        "ip6 saddr { fd00::4 } accept",
        "ip saddr { 10.1.0.9 } tcp dport { 6384, 44217, 44227 } accept",
        f"tcp dport {{ {CLOSED} }} drop",
    ]


def test_a_name_in_place_of_an_address_is_refused():
    with pytest.raises(ConfigError, match="'gpu-1' is not an IP address"):
        firewall_rules(["10.1.0.1", "gpu-1"])
