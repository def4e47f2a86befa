"""The cores of a CPU quota, on trees of control groups made up as Linux, Docker and Kubernetes show them."""
import os

import pytest

from common.cores import cores_of_quota, cores_of_worker

V1 = "4:memory:/x\n3:cpu,cpuacct:/docker/abc/task\n1:name=systemd:/y\n"
TREES = {  # name -> (/proc/self/cgroup, files, cores of one worker)
    "version 2": ("0::/a/b\n", {"a/b/cpu.max": "250000 100000"}, 3),
    "an ancestor's": ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000", "cpu.max": "max 100000"},
                      2),
    "the least": ("0::/a/b\n", {"a/b/cpu.max": "800000 100000", "a/cpu.max": "600000 100000"}, 6),
    "less than one": ("0::/a\n", {"a/cpu.max": "10000 100000"}, 1),
    "another period": ("0::/a\n", {"a/cpu.max": "100000 20000"}, 5),
    "none": ("0::/a\n", {"a/cpu.max": "max 100000"}, None),
    "no file": ("0::/\n", {}, None),
    "another group's": ("0::/a\n", {"b/cpu.max": "100000 100000", "a/c/cpu.max": "100000 100000"}, None),
    "a container with its own root": ("0::/\n", {"cpu.max": "200000 100000"}, 2),
    "a container that shows the host's path": ("0::/kubepods/pod1/c1\n", {"cpu.max": "400000 100000"}, 4),
    "a process that has moved": ("0::/../..\n", {"cpu.max": "300000 100000"}, 3),
    "version 1": (V1, {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "700000",
                       "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
                       "cpu,cpuacct/docker/abc/task/cpu.cfs_quota_us": "-1",
                       "cpu,cpuacct/docker/abc/task/cpu.cfs_period_us": "100000"}, 7),
    "version 1 in a container": (V1, {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "25000"}, 2),
    "version 1 without": (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    "both versions": ("1:cpu:/a\n0::/b\n", {"cpu/a/cpu.cfs_quota_us": "500000", "cpu/a/cpu.cfs_period_us": "100000",
                                            "unified/b/cpu.max": "400000 100000",
                                            "cpu/b/cpu.cfs_quota_us": "200000", "cpu/b/cpu.cfs_period_us": "200000",
                                            "b/cpu.max": "max 100000"}, 4),
    "a path of another controller": ("3:cpuset:/a\n1:cpu:/\n", {"cpu/a/cpu.cfs_quota_us": "100000",
                                                                "cpu/a/cpu.cfs_period_us": "100000"}, None),
    "a path with a colon": ("0::/a:b\n", {"a:b/cpu.max": "200000 100000"}, 2),
}


@pytest.fixture
def linux(tmp_path, monkeypatch):
    """A function that writes such a tree, and has a machine of 64 cores; `bound` are those of this process."""
    def make(name: str, bound: int = 64):
        listed, files, _ = TREES[name]
        (tmp_path / "cgroup").write_text(listed)
        for path, text in files.items():
            (tmp_path / "fs" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "fs" / path).write_text(f"{text}\n")
        monkeypatch.setattr(os, "cpu_count", lambda: 64)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(bound))
        monkeypatch.setattr(cores_of_quota, "__defaults__", (tmp_path / "cgroup", tmp_path / "fs"))
        return tmp_path / "cgroup", tmp_path / "fs"

    return make


@pytest.mark.parametrize("name", TREES)
def test_the_quota_of_all_ancestors(name, linux):
    assert cores_of_quota(1, *linux(name)) == (TREES[name][2] or 64)


def test_workers_share_a_quota_bound_or_not(linux):
    """6 cores; a quota binds nobody, and a worker that is bound to 4 cores has no more of it than the others."""
    linux("the least")
    assert [cores_of_worker(workers) for workers in (1, 2, 4, 8)] == [6, 3, 1, 1]
    linux("the least", bound=4)
    assert [cores_of_worker(workers) for workers in (1, 2, 4, 8)] == [4, 3, 1, 1]


def test_without_a_quota_a_worker_has_what_it_is_bound_to_or_its_share(linux):
    linux("none")
    assert [cores_of_worker(workers) for workers in (1, 2, 4, 128)] == [64, 32, 16, 1]
    linux("none", bound=24)
    assert [cores_of_worker(workers) for workers in (1, 2, 4, 128)] == [24] * 4


def test_a_system_without_control_groups(tmp_path):
    assert cores_of_quota(1, tmp_path / "none", tmp_path) == os.cpu_count()
