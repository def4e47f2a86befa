"""Locks that name their holder; tests/plan/test_run_lock.py has those of other processes and hosts."""
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from common import locks
from common.locks import Taken, locked, this_process


def test_who_waits_for_long_says_for_whom(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(locks, "PATIENCE", 0.1)
    monkeypatch.setenv("SLURM_JOB_ID", "34")

    def wait():
        with locked(tmp_path / "x.lock", wait=True):
            return True

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / "x.lock"):
            with pytest.raises(Taken, match=rf"^{this_process()}$"), locked(tmp_path / "x.lock"):
                pass
            waiting, said = pool.submit(wait), ""
            while not said:
                time.sleep(0.01)
                said = capsys.readouterr().err
        assert waiting.result()
    assert said == f"bigbatch: waiting for {this_process()}, which has locked {tmp_path}/x.lock\n"
    assert str(this_process()).endswith(", Slurm job 34") and not capsys.readouterr().err
