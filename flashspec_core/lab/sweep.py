"""Run a function or a notebook with each setting of a grid, here or on a Dask cluster, and go on where it was stopped.

Each result is a file, written whole. It leaves out what is measured (bench.py, regret.py) and starting a cluster.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import itertools
import json
import os
import sys
import traceback
from concurrent.futures import BrokenExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import joblib

from flashspec_core.lab.notebooks import published, run_notebook

TABLE = "table.csv"


class SweepError(RuntimeError):
    """Some settings failed; the others are kept.

    Args:
        message: what failed.
        rows: the table of the others.
        errors: digest of each failed setting -> its error's text.
    """

    def __init__(self, message: str, rows: list[dict], errors: dict[str, str]):
        super().__init__(message)
        self.rows, self.errors = rows, errors


def grid(**choices) -> list[dict]:
    """Every combination of values, the last name's values changing fastest; a seed is a name like any other.

    Args:
        choices: name -> its values, in order.

    Returns:
        Settings, each a dict.

    Raises:
        ValueError: a name without values, or with a string where a list of them is expected.

    >>> grid(policy=["UCB1", "Thompson"], seed=range(2))[1:3]
    [{'policy': 'UCB1', 'seed': 1}, {'policy': 'Thompson', 'seed': 0}]
    """
    for name, values in choices.items():
        if isinstance(values, str) or not len(values):
            raise ValueError(f"expected a list of values of {name}, got {values!r}")
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


@dataclass(frozen=True)
class NotebookTask:
    """A notebook as a function of its parameters; made by `notebook_task`.

    Args:
        path, folder: absolute.
        name: of the notebook, with a digest of its code.
    """

    path: Path
    folder: Path
    name: str

    def __call__(self, **parameters) -> list[dict]:
        """Execute the notebook; Args: parameters: of its tagged cell. Returns: its published rows."""
        import papermill

        known = papermill.inspect_notebook(str(self.path))
        if set(parameters) - set(known):
            raise ValueError(f"expected parameters among {list(known)}, got {sorted(set(parameters) - set(known))}")
        done = self.folder / f"{digest(self.name, parameters)}.ipynb"
        now = done.with_suffix(f".{os.getpid()}.partial.ipynb")  # the same setting may run twice at a time
        try:
            run_notebook(self.path, now, parameters, progress=False)
            return published(now)
        finally:
            if now.exists():
                os.replace(now, done)


def notebook_task(path, folder) -> NotebookTask:
    """A notebook as a task of `run`: its rows are those that it shows by `notebooks.publish`.

    Args:
        path: of the .ipynb; every worker must find it there, and the package installed.
        folder: for the executed notebooks, on the machine that executes them; a failed one shows its error in red.

    Returns:
        f(**parameters) -> rows. Its name holds a digest of the notebook's code: after a change all settings run again.
    """
    path = Path(path).resolve()
    code = [cell["source"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    return NotebookTask(path, Path(folder).resolve(), f"{path.stem} {digest(path.stem, code)}")


def digest(name: str, setting) -> str:
    """The name under which a result is kept: 16 hexadecimal digits of SHA-256.

    Args:
        name: of the task.
        setting: what JSON holds, or numpy; the order of its keys does not matter.

    Raises:
        TypeError: JSON cannot hold it.

    >>> digest("f", {"a": 1, "b": 2}) == digest("f", {"b": 2, "a": 1}) != digest("f", {"a": 1, "b": 3})
    True
    """
    return hashlib.sha256(json.dumps([name, setting], sort_keys=True, default=_plain).encode()).hexdigest()[:16]


def run(task, settings, out, *, backend=None, n_jobs: int = 1, progress: bool = True) -> list[dict]:
    """Run a task with each setting and merge what it returns into one table; what `out` holds already is not run again.

    Results come back as return values and this process writes them, each whole or not at all; so the workers of a
    cluster need the package and what the task reads, but not this folder. A setting whose worker process dies is run
    again, and fails when it goes on to kill workers. For a cluster make the client first; the call stays the same:

        from dask.distributed import Client
        client = Client("tcp://scheduler:8786")
        run(task, settings, out, backend="dask")

    Args:
        task: f(**setting) -> row or list of rows, each a dict; a named function, known by that name alone (a changed
            one wants another folder), or an object with a `name`, as `notebook_task` makes.
        settings: dicts that JSON can hold, as from `grid`; one that comes twice counts once.
        out: the sweep's folder, made where it is missing: DIGEST.json and DIGEST.error.txt of each setting, table.csv.
        backend: "dask", or any of joblib's; None: its default, processes on this machine.
        n_jobs: settings at a time, -1 for one a core; they slow each other, so 1 (in this process) where time is
            measured. A cluster takes as many as its workers have threads, one each where time is measured.
        progress: print a line a setting.

    Returns:
        Rows in the order of the settings (also in table.csv): the setting's values, then the task's. A name that both
        have stands for the setting's, the task's is row_NAME; a setting without rows has one with its values alone.

    Raises:
        ValueError: a task without a name of its own.
        SweepError: settings failed; told when all others are done, and tried again at the next call.
    """
    name = getattr(task, "name", None) or f"{task.__module__}.{getattr(task, '__qualname__', '<no name>')}"
    if name.endswith(">"):
        raise ValueError(f"expected a named function, since results are kept under its name, got {name}")
    out, errors = Path(out), {}
    out.mkdir(parents=True, exist_ok=True)
    wanted = {digest(name, setting): setting for setting in settings}
    kept = {key: out / f"{key}.json" for key in wanted}
    todo = {key: setting for key, setting in wanted.items() if not kept[key].exists()}
    say = partial(print, flush=True) if progress else lambda *words: None
    for key in wanted:
        if key not in todo:
            say("kept  ", wanted[key])
    for key, result, error in _results(task, todo, n_jobs, _dask() if backend == "dask" and todo else backend):
        failed = out / f"{key}.error.txt"
        if error:
            errors[key] = error
            _write(failed, f"{name} {wanted[key]}\n\n{error}")
        else:
            _write(kept[key], result)
            failed.unlink(missing_ok=True)
        say("failed" if error else "done  ", wanted[key])
    rows = [
        row for key, path in kept.items() if key not in errors for row in _rows(json.loads(path.read_text("utf-8")))
    ]
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    _write(out / TABLE, file.getvalue())
    if errors:
        told = "\n".join(f"{wanted[key]}: {text.strip().splitlines()[-1]}" for key, text in errors.items())
        raise SweepError(
            f"{len(errors)} of {len(wanted)} settings failed, see *.error.txt in {out}\n{told}", rows, errors
        )
    return rows


def _results(task, todo: dict, n_jobs, backend, last: bool = False):
    """(digest, JSON text, error's text) of each setting as it comes, one of the texts None.

    A process that dies takes joblib's pool with it: what is missing is run again by halves, until the setting that
    killed it stands alone, and has a last chance.
    """
    if not todo:
        return
    missing = dict(todo)
    calls = [joblib.delayed(_attempt)(task, key, setting) for key, setting in todo.items()]
    options = dict(batch_size=1, pre_dispatch="all", return_as="generator_unordered")
    try:
        for key, result, error in joblib.Parallel(n_jobs, backend=backend, **options)(calls):
            del missing[key]
            yield key, result, error
    except BrokenExecutor as died:
        keys = list(missing)
        if last and keys:
            yield keys[0], None, _told(died)
            return
        for half in (keys[::2], keys[1::2]):
            yield from _results(task, {key: todo[key] for key in half}, n_jobs, backend, last=len(keys) == 1)


def _attempt(task, key: str, setting: dict):
    """One setting, in the worker; as _results yields."""
    try:
        rows = task(**setting)
        rows = [rows] if isinstance(rows, dict) else rows
        if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
            raise TypeError(f"expected a row or a list of rows, each a dict, got {rows!r}")
        return key, json.dumps({"setting": setting, "rows": rows}, default=_plain), None
    except Exception:
        return key, None, traceback.format_exc()


def _told(error) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _plain(value):
    """Numpy's numbers and arrays, for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"expected what JSON holds, got {value!r}")


def _rows(kept: dict) -> list[dict]:
    """The table's rows of one setting."""
    setting = kept["setting"]
    own = [{f"row_{name}" if name in setting else name: row[name] for name in row} for row in kept["rows"]]
    return [setting | row for row in own or [{}]]


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    now = path.with_suffix(f".{os.getpid()}.partial")
    now.write_text(text, encoding="utf-8", newline="")
    os.replace(now, path)


def _dask():
    """joblib's Dask backend, with each result by its future's own callback.

    As it stands, a setting that the cluster gives up (its workers died) is waited for for ever; workers are waited for
    10 s only; and where they have one thread in all, the settings run in the caller's process.
    """
    from joblib._dask import DaskDistributedBackend

    class Cluster(DaskDistributedBackend):
        def effective_n_jobs(self, n_jobs):
            return 2  # any number but 1: all is sent at once, and the cluster has its own queue

        def submit(self, func, callback=None):
            attempt, (task, key, setting), _ = func.items[0]

            def come(future):
                try:
                    result = future.result()
                except BaseException as error:  # a future that was cancelled raises no Exception
                    result = key, None, _told(error)
                callback([result])

            future = self.client.submit(partial(attempt, task, key, setting), pure=False)
            self._results[key] = future
            future.add_done_callback(come)
            return future

        def abort_everything(self, ensure_ready=True):
            self.client.cancel(list(self._results.values()))

    return Cluster()


def values(text: str) -> list:
    """The values of a parameter in the command line: JSON, or else plain words, between commas.

    >>> values("8,16"), values("[0.3, 0.7],[0.5]"), values("UCB1,true")
    ([8, 16], [[0.3, 0.7], [0.5]], ['UCB1', True])
    """
    try:
        return json.loads(f"[{text}]")
    except ValueError:
        parts = text.split(",")
        return [text] if len(parts) == 1 else [value for part in parts for value in values(part)]


def main(arguments=None) -> None:
    """python -m flashspec_core.lab.sweep NOTEBOOK -p gamma=4,8 --out FOLDER; Args: arguments: None: the command's."""
    parser = argparse.ArgumentParser(prog="python -m flashspec_core.lab.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("-p", action="append", default=[], metavar="NAME=V1,V2", help="values, JSON or plain words")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and executed notebooks")
    parser.add_argument("--jobs", type=int, default=1, help="settings at a time on this machine")
    parser.add_argument("--scheduler", help="address of a Dask cluster, as tcp://host:8786")
    o = parser.parse_args(arguments)
    choices = {}
    for name, _, text in (word.partition("=") for word in o.p):
        choices.setdefault(name, []).extend(values(text))
    backend, client = None, nullcontext()
    if o.scheduler:
        from dask.distributed import Client

        backend, client = "dask", Client(o.scheduler)
    try:
        with client:
            run(notebook_task(o.notebook, o.out), grid(**choices), o.out, backend=backend, n_jobs=o.jobs)
    except SweepError as error:
        sys.exit(str(error))
    print(o.out / TABLE)


if __name__ == "__main__":
    main()
