"""lab/sweep.py: grids, results that are kept whole, settings that fail, processes that die, a cluster, notebooks."""

import csv
import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import flashspec_core as fs
from flashspec_core.lab import notebooks, regret, sweep

POLICIES = {"UCB1": fs.UCB1, "Thompson": fs.ThompsonSampling}
SETTINGS = sweep.grid(policy=["UCB1", "Thompson"], horizon=[50, 100, 150])


def simulate(policy, horizon):
    """The last mean regret of eight runs."""
    world = regret.stationary([0.3, 0.7], horizon)
    played = regret.simulate(POLICIES[policy](2, 1, (8,)), world, np.random.default_rng(2))
    return {"regret": played.regret[-1].mean(), "first_arm": played.arms[0, 0]}


@dataclass(frozen=True)
class Counted:
    """A simulation that leaves a file of each call, and at one horizon first does something else.

    Args: folder: of the files; what: done by the call whose horizon is `at`, once.
    """

    folder: Path
    what: object = None
    at: int = 0
    name: str = "counted"

    def __call__(self, policy, horizon):
        """Count, perhaps do it, simulate."""
        calls = self.folder / f"{policy}-{horizon}"
        with calls.open("a") as file:
            file.write("x")
        if horizon == self.at and len(calls.read_text()) == 1:
            self.what()
        return simulate(policy, horizon)

    def calls(self):
        """Calls of each setting that was run, in the order of SETTINGS."""
        found = {path.name: len(path.read_text()) for path in self.folder.iterdir()}
        return [found.get("{policy}-{horizon}".format(**setting), 0) for setting in SETTINGS]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt():
    raise KeyboardInterrupt


@pytest.fixture
def counted(tmp_path):
    """f(what, at) -> a Counted with a folder of its own."""

    def make(what=None, at=0, kind=Counted):
        (tmp_path / "calls").mkdir()
        return kind(tmp_path / "calls", what, at)

    return make


@pytest.fixture(scope="module")
def one_by_one():
    """The table that every sweep of SETTINGS must give."""
    return [setting | {name: float(cell) for name, cell in simulate(**setting).items()} for setting in SETTINGS]


@pytest.fixture
def cluster():
    """A client of two workers, each a process on this machine."""
    from dask.distributed import Client, LocalCluster

    options = dict(n_workers=2, threads_per_worker=1, host="127.0.0.1", silence_logs=50)
    options |= dict(dashboard_address="127.0.0.1:0")  # None takes one port for all, and warns where it is taken
    with LocalCluster(**options) as local, Client(local) as client:
        yield client


def files(folder, kind):
    return sorted(path for path in folder.iterdir() if path.name.endswith(kind))


def test_a_grid_is_in_order():
    assert sweep.grid(a=[1, 2], b=["xy"], c=range(2)) == [{"a": a, "b": "xy", "c": c} for a in (1, 2) for c in (0, 1)]
    assert sweep.grid() == [{}]
    for wrong in ("UCB1", []):
        with pytest.raises(ValueError, match=re.escape(f"expected a list of values of policy, got {wrong!r}")):
            sweep.grid(policy=wrong)


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_a_sweep_is_its_settings_one_by_one(tmp_path, one_by_one, capsys, n_jobs):
    table = sweep.run(simulate, [*SETTINGS, SETTINGS[0]], tmp_path, n_jobs=n_jobs)
    assert table == one_by_one
    with (tmp_path / "table.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{name: str(cell) for name, cell in row.items()} for row in table]
    assert len(files(tmp_path, ".json")) == 6 and len(list(tmp_path.iterdir())) == 7, "nothing half-written stays"
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"done   {setting}" for setting in SETTINGS)


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path, counted, one_by_one, capsys):
    task, out = counted(interrupt, at=150), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        sweep.run(task, SETTINGS, out)
    assert task.calls() == [1, 1, 1, 0, 0, 0] and len(files(out, ".json")) == 2
    capsys.readouterr()
    with pytest.raises(KeyboardInterrupt):
        sweep.run(task, SETTINGS, out)
    assert sweep.run(task, SETTINGS, out) == one_by_one
    assert task.calls() == [1, 1, 2, 1, 1, 2]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()][-6:] == ["kept"] * 5 + ["done"]
    wider = sweep.run(task, [*SETTINGS, {"policy": "UCB1", "horizon": 20}], out, progress=False)
    assert wider[:6] == one_by_one and wider[6]["horizon"] == 20
    assert task.calls() == [1, 1, 2, 1, 1, 2], "a wider grid runs what is new"


def sometimes(policy, horizon):
    """Rows of three kinds, and two kinds of fault."""
    if horizon == 100:
        return [{"horizon": 7, "arm": i} for i in range(2)] if policy == "UCB1" else []
    return simulate(POLICIES[policy], horizon) if policy == "UCB1" else "no row"


def test_a_failed_setting_is_told_and_stops_no_other(tmp_path):
    for _ in range(2):  # what failed is tried again
        with pytest.raises(sweep.SweepError, match="4 of 6 settings failed") as told:
            sweep.run(sometimes, SETTINGS, tmp_path, progress=False)
        assert "{'policy': 'UCB1', 'horizon': 50}: KeyError: <class 'flashspec_core.bandits.UCB1'>" in str(told.value)
        assert "TypeError: expected a row or a list of rows, each a dict, got 'no row'" in str(told.value)
        assert told.value.rows == [
            {"policy": "UCB1", "horizon": 100, "row_horizon": 7, "arm": 0},
            {"policy": "UCB1", "horizon": 100, "row_horizon": 7, "arm": 1},
            {"policy": "Thompson", "horizon": 100},
        ]
        kept = files(tmp_path, ".error.txt")
        assert len(kept) == 4 and all("Traceback" in path.read_text() for path in kept)
        assert len((tmp_path / "table.csv").read_text().splitlines()) == 4


def test_a_failed_setting_that_passes_later_leaves_no_error(tmp_path, counted, one_by_one):
    task = counted({}.popitem, at=50)
    with pytest.raises(sweep.SweepError, match="KeyError: 'popitem"):
        sweep.run(task, SETTINGS, tmp_path / "out", progress=False)
    assert sweep.run(task, SETTINGS, tmp_path / "out", progress=False) == one_by_one
    assert task.calls() == [2, 1, 1, 2, 1, 1] and not files(tmp_path / "out", ".error.txt")


def test_what_cannot_be_kept_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a named function.*<lambda>"):
        sweep.run(lambda: {}, [{}], tmp_path)
    with pytest.raises(TypeError, match="expected what JSON holds, got <class"):
        sweep.run(simulate, [{"policy": fs.UCB1}], tmp_path)
    assert sweep.digest("f", {"a": np.int64(3)}) == sweep.digest("f", {"a": 3}) != sweep.digest("f", {"a": 3.5})


class Deadly(Counted):
    """Each call with that horizon does it, not the first alone."""

    def __call__(self, policy, horizon):
        """Count, do it or simulate."""
        if horizon == self.at and policy == "UCB1":
            self.what()
        return super().__call__(policy, horizon)


def test_a_process_that_dies_here(tmp_path, counted, one_by_one):
    task = counted(die, at=100)
    assert sweep.run(task, SETTINGS, tmp_path / "out", n_jobs=2, progress=False) == one_by_one
    assert min(task.calls()) >= 1 and task.calls()[1] >= 2
    with pytest.raises(sweep.SweepError, match="1 of 6 settings failed") as told:
        sweep.run(Deadly(task.folder, die, 50, "deadly"), SETTINGS, tmp_path / "out", n_jobs=2, progress=False)
    assert told.value.rows == one_by_one[1:] and "TerminatedWorkerError" in str(told.value)


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """A tiny notebook that publishes one row."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    publish = (
        "from flashspec_core.lab import notebooks\nnotebooks.publish([{'gamma': '', 'twice': 2 * gamma, 'word': word}])"
    )
    cells = [
        {"cell_type": "code", "source": source, "metadata": {"tags": tags}, "outputs": [], "execution_count": None}
        for source, tags in (("gamma = 4\nword = 'a'", ["parameters"]), (publish, []))
    ]
    metadata = {"kernelspec": notebooks.KERNEL, "language_info": {"name": "python"}}
    found = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}
    (tmp_path / "tiny.ipynb").write_text(json.dumps(found))
    return tmp_path / "tiny.ipynb"


def test_a_sweep_of_a_notebook_by_the_command(tmp_path, notebook, capsys):
    out = tmp_path / "out"
    sweep.main([str(notebook), "-p", "gamma=4,8", "--out", str(out)])
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["done   {'gamma': 4}", "done   {'gamma': 8}", str(out / "table.csv")]
    assert (out / "table.csv").read_text() == "gamma,row_gamma,twice,word\n4,,8,a\n8,,16,a\n"
    assert len(files(out, ".ipynb")) == 2 and not files(out, ".partial.ipynb")


def test_a_notebook_that_changes_runs_again_and_a_parameter_must_be_its_own(tmp_path, notebook):
    task = sweep.notebook_task(notebook, tmp_path)
    with pytest.raises(ValueError, match=r"expected parameters among \['gamma', 'word'\], got \['gama'\]"):
        task(gama=3)
    assert sweep.notebook_task(notebook, tmp_path / "other").name == task.name
    notebook.write_text(notebook.read_text().replace("2 * gamma", "3 * gamma"))
    assert sweep.notebook_task(notebook, tmp_path).name != task.name


def test_a_cluster_on_which_workers_die(tmp_path, counted, one_by_one, cluster, monkeypatch, notebook):
    task, before = counted(die, at=100), set(cluster.scheduler_info()["workers"])
    assert sweep.run(task, SETTINGS, tmp_path / "out", backend="dask", progress=False) == one_by_one
    assert min(task.calls()) >= 1 and task.calls()[1] >= 2, "its setting was run again, and counted once"
    assert before != set(cluster.scheduler_info()["workers"])
    assert len(files(tmp_path / "out", ".json")) == 6
    there = ["--scheduler", cluster.scheduler.address, "--out", str(tmp_path / "there")]
    with pytest.raises(SystemExit, match=r"1 of 2 settings failed.*\n.*None}: TypeError: unsupported operand"):
        sweep.main([str(notebook), "-p", "gamma=8,null", *there])
    assert (tmp_path / "there" / "table.csv").read_text() == "gamma,row_gamma,twice,word\n8,,16,a\n"
    assert len(files(tmp_path / "there", ".ipynb")) == 2, "the failed one too"
    monkeypatch.setattr(cluster.cluster.scheduler, "allowed_failures", 0)  # given up at its first death
    deadly = Deadly(task.folder, die, 50, "deadly")
    with pytest.raises(sweep.SweepError, match="(?s)1 of 1 settings failed.*KilledWorker"):
        sweep.run(deadly, SETTINGS[:1], tmp_path / "out", backend="dask", progress=False)
