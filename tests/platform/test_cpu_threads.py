"""Thread defaults: physical cores, container quota, and the user's word."""

import os

import pytest

from sglang_smc import upstream
from sglang_smc.cpu import threads

VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_NCCL_SO_PATH",
    "SGLANG_MAMBA_CONV_DTYPE",
)


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A host whose logical CPUs ``i`` and ``i + cores`` are two threads of one core."""

    def make(*, cores: int, quota: str = "max 100000") -> None:
        affinity = set(range(2 * cores))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: affinity)
        for cpu in affinity:
            (tmp_path / f"cpu{cpu}").write_text(f"{cpu % cores},{cpu % cores + cores}\n")
        (tmp_path / "cpu.max").write_text(quota + "\n")
        monkeypatch.setattr(threads, "_SIBLINGS", str(tmp_path / "cpu{}"))
        monkeypatch.setattr(threads, "_CGROUP_CPU_MAX", tmp_path / "cpu.max")
        monkeypatch.setattr(threads, "_set_here", {})
        for name in VARIABLES:
            # setenv first: the variable set below is then undone after the test.
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)

    return make


@pytest.mark.parametrize(("quota", "cores"), [("250000 100000", 2), ("50000 100000", 1)])
def test_a_container_quota_counts(host, quota, cores):
    host(cores=8, quota=quota)
    assert threads.usable_cores() == cores


# SGLang binds replicas since the newer releases.
BOTH = ("0,2|1,3", "0,4|1,5|2,6|3,7") if upstream.IS_NEWER else (None, "0,2,4,6|1,3,5,7")


@pytest.mark.parametrize(
    ("cores", "sizes", "share", "binding"),
    [
        (8, {"tp_size": 1}, "8", None),
        (8, {"tp_size": 2}, "4", "0,2,4,6|1,3,5,7"),
        (4, {"tp_size": 8}, "1", "|".join(["0", "1", "2", "3", *["0,1,2,3"] * 4])),
        (4, {"tp_size": 5}, "1", "0|1|2|3|0,1,2,3"),
        (4, {"tp_size": 1, "dp_size": 2}, "2", BOTH[0]),
        (8, {"tp_size": 2, "dp_size": 2}, "2", BOTH[1]),
    ],
)
def test_ranks_and_replicas_share_the_cores_and_have_their_own(host, cores, sizes, share, binding):
    host(cores=cores)
    threads.set_default_environment(**sizes)
    assert os.environ["OMP_NUM_THREADS"] == share
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"]) == ("PASSIVE", "20000")
    assert os.environ.get("SGLANG_CPU_OMP_THREADS_BIND") == binding


def test_what_the_user_set_stays_and_the_next_engine_of_a_process_gets_its_own(host, monkeypatch):
    host(cores=8)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    threads.set_default_environment(tp_size=2, dtype="bfloat16")
    threads.set_default_environment(tp_size=1, dtype="float32")
    found = [os.environ.get(name) for name in VARIABLES]
    assert found == ["8", "ACTIVE", None, None, None, "float32"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    threads.set_default_environment(tp_size=2)
    assert os.environ["OMP_NUM_THREADS"] == "3"
