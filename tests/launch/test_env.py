"""launch/env.sh: what it sets where, as a launcher that sources it finds it."""
import os
import shutil
import subprocess

import pytest
from conftest import BIN, ROOT, require_tool, unshare

SOURCED = f". '{ROOT}/launch/env.sh' && env"


def variables(interfaces: tuple[str, ...], ports: str = "", **given) -> dict[str, str]:
    """The environment on a host with these network interfaces, beside the loopback: real ones, in a namespace.

    ports: the kernel's range there.
    """
    made = f"echo {ports} >/proc/sys/net/ipv4/ip_local_port_range && " if ports else ""
    made += "".join(f"ip link add {name} type bridge && " for name in interfaces)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL", "OMPI", "PRTE", "CUDA"))}
    done = subprocess.run([*unshare("--net"), "bash", "-c", made + SOURCED], text=True, capture_output=True,
                          timeout=300, env=kept | given)
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def test_dockers_bridge_is_left_out():
    require_tool("ip")
    seen = variables(("docker0", "eth0"))
    assert seen["OMPI_MCA_btl_tcp_if_exclude"] == "127.0.0.1/8,sppp,docker0"
    assert seen["PRTE_MCA_prte_if_exclude"] == seen["OMPI_MCA_oob_tcp_if_exclude"] == "docker0"
    assert seen["NCCL_SOCKET_IFNAME"] == "^lo,docker"


@pytest.mark.parametrize("interfaces, given, missing", [
    (("eth0",), {}, ("OMPI_MCA_btl_tcp_if_exclude", "PRTE_MCA_prte_if_exclude", "NCCL_SOCKET_IFNAME")),
    (("docker0", "veth12"), {}, ("NCCL_SOCKET_IFNAME",)),  # it would have no interface at all
    (("docker0", "eth0"), {"OMPI_MCA_btl_tcp_if_include": "eth0"}, ("OMPI_MCA_btl_tcp_if_exclude",)),
])
def test_and_nothing_else(interfaces, given, missing):
    require_tool("ip")
    assert not set(missing) & set(variables(interfaces, **given))


def test_what_is_set_stays():
    require_tool("ip")
    given = {"NCCL_SOCKET_IFNAME": "ib0", "CUDA_CACHE_MAXSIZE": "1"}
    seen = variables(("docker0", "eth0"), **given)
    assert {name: seen[name] for name in given} == given
    assert variables(())["CUDA_CACHE_MAXSIZE"] == str(4 * 2**30)


def test_open_mpi_takes_the_kernels_ports():
    seen = variables((), ports="40000 40999", OMPI_MCA_btl_tcp_port_min_v6="50000")
    assert [seen[f"OMPI_MCA_btl_tcp_port_{name}"] for name in ("min_v4", "range_v4", "min_v6", "range_v6")] == [
        "40000", "1000", "50000", "1000"]


def test_mpirun_takes_the_names():
    """Open MPI knows these parameters; of a wrong name it would say nothing."""
    info = subprocess.run([BIN / "prte_info", "--all"], text=True, capture_output=True, timeout=300).stdout
    info += subprocess.run([BIN / "ompi_info", "--all"], text=True, capture_output=True, timeout=300).stdout
    assert all(f'"btl_tcp_port_{name}_v{version}"' in info for name in ("min", "range") for version in (4, 6))
    assert '"prte_if_exclude"' in info and '"btl_tcp_if_exclude" (current value: "127.0.0.1/8,sppp"' in info


@pytest.mark.parametrize("environment", ["own venv", "/nowhere/venv", ""])
def test_the_python_is_that_of_uvs_environment(environment, tmp_path):
    """UV_PROJECT_ENVIRONMENT is a path in the checkout, or an absolute one; else it is .venv."""
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "env.sh", tmp_path / "launch")
    python = tmp_path / (environment or ".venv") / "bin" / "python"
    done = subprocess.run(["bash", "-euc", '. launch/env.sh; echo "$python"'], cwd=tmp_path, text=True,
                          capture_output=True, env={"PATH": os.environ["PATH"], "UV_PROJECT_ENVIRONMENT": environment})
    assert (done.returncode, done.stdout) == (1, "") and f"{python} does not exist" in done.stderr
