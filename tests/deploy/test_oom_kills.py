"""Evidence of out-of-memory kills from the kernel's counts."""

import pytest

from baton.deploy.supervise.oom import HINT, OomWatch


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory/a/b").mkdir(parents=True)
    return tmp_path


def count(root, group, machine):
    (root / "sys/fs/cgroup/memory/a/b/memory.oom_control").write_text(
        f"oom_kill_disable 0\nunder_oom 0\noom_kill {group}\n"
    )
    (root / "sys/fs/cgroup/a").mkdir(exist_ok=True)
    (root / "sys/fs/cgroup/a/memory.events").write_text(f"low 0\noom {group}\noom_kill {group}\n")
    (root / "proc/vmstat").write_text(f"nr_free_pages 7\noom_kill {machine}\n")
    (root / "proc/meminfo").write_text("MemTotal: 2097152 kB\n")


@pytest.mark.parametrize("line", ["4:memory:/a/b", "0::/a"])
@pytest.mark.parametrize(
    ("group", "machine", "words"),
    [(1, 1, "its memory limit, 2.0 GiB"), (0, 1, "probably out of memory"), (0, 0, "")],
)
def test_a_kill_is_explained_by_the_counts_that_rose(root, line, group, machine, words):
    (root / "proc/self/cgroup").write_text(f"1:cpu:/\n{line}\n")
    count(root, 3, 5)
    watch = OomWatch(root)
    count(root, 3 + group, 5 + machine)
    said = watch.evidence(-9)
    assert words in said
    assert bool(said) == bool(words)
    assert watch.evidence(-15) == watch.evidence(1) == ""


def test_a_count_that_rose_long_ago_explains_nothing(root):
    (root / "proc/self/cgroup").write_text("0::/a\n")
    count(root, 0, 0)
    watch = OomWatch(root)
    count(root, 1, 1)
    watch.look()
    assert watch.evidence(-9)
    for _ in range(10):
        watch.look()
    assert watch.evidence(-9) == ""


def test_where_nothing_can_be_read_it_is_said_where_to_look(root):
    assert OomWatch(root).evidence(-9) == HINT
