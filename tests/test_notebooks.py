"""Notebooks at three depths: structure, run and compared outputs, other parameters."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from flashspec_core.lab import notebooks

ROOT = Path(__file__).resolve().parents[1]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FLOOR = 8  # notebooks there are at least; raised with each new one


def code_cells(path):
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code" and c.source.strip()]


def tags(cell):
    return cell.metadata.get("tags", [])


def test_there_are_notebooks():
    assert len(PATHS) >= FLOOR


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_structure(path):
    cells = code_cells(path)
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1)), "one run from top to bottom"
    assert len(cells) <= 25 and path.stat().st_size <= 500_000
    assert sum("parameters" in tags(c) for c in cells) == 1
    assert sum("nbval-check-output" in tags(c) for c in cells) >= 3
    for cell in cells:
        assert len(cell.source.splitlines()) <= 15
        tree = ast.parse(re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", cell.source))
        assert not any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.walk(tree))
        assert not any(o.output_type == "error" or o.get("name") == "stderr" for o in cell.outputs)
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                assert len(output.metadata.get("image/png", {}).get("alt", "")) >= 20
    asserts = [sum(isinstance(n, ast.Assert) for n in ast.walk(ast.parse(c.source))) for c in cells[1:]]
    assert sum(asserts) >= 3 and sum(asserts[-4:]) >= 1


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_badge_and_bootstrap(path):
    badge = nbformat.read(path, as_version=4).cells[0].source
    assert badge.count(f"/notebooks/{path.name})") == 1
    first = code_cells(path)[0].source
    assert first == code_cells(PATHS[0])[0].source, "one bootstrap for all"
    assert len(re.findall(r"(?m)^INSTALL_FROM = .*$", first)) == 1
    installed = re.findall(r"(?m)^\s+%pip install (.*)$", first)
    assert installed and all("--no-deps" in line for line in installed)
    assert not re.search(r"\b(torch|triton|transformers|numpy|ipywidgets|ipykernel)\b", " ".join(installed))


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_committed_form_is_normalised(path):
    text = path.read_text(encoding="utf-8")
    assert notebooks.normalise(json.loads(text)) == text


def test_all_run_and_compared_outputs_are_what_is_committed(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # kernels share no history with each other or with the reader's
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env"]
    command += ["-p", "tests.stderr_apart", "--nbval-cell-timeout", "600", "-c", "/dev/null"]
    command += ["--rootdir", str(ROOT), *map(str, PATHS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= sum(len(code_cells(p)) for p in PATHS)


def test_quickstart_with_other_parameters(tmp_path):
    out = tmp_path / "00_quickstart.ipynb"
    parameters = {"max_new_tokens": 12, "gamma": 3}
    notebooks.run_notebook(ROOT / "notebooks" / "00_quickstart.ipynb", out, parameters, progress=False)
    rows = notebooks.published(out)
    table = notebooks.quickstart_table(rows)
    for domain in ("chat", "code", "copy-edit"):
        assert re.search(rf"(?m)^{domain}\s+[\d.]+\s+[\d.]+\s+[\d.]+x  yes$", table)
    assert notebooks.render_html(out).stat().st_size > 50_000


def test_exactness_with_another_fault(tmp_path):
    out = tmp_path / "01_exactness.ipynb"
    parameters = {"fault": "residual of the row before", "num_samples": 5000}
    notebooks.run_notebook(ROOT / "notebooks" / "01_exactness.ipynb", out, parameters, progress=False)
    text = "".join("".join(o.get("text", "")) for c in code_cells(out) for o in c.outputs)
    assert "red: " in text and "num_accepted[fell] - 1" in text and "every claim of this notebook held" in text


def test_bandits_with_other_worlds(tmp_path):
    out = tmp_path / "04_bandit_regret.ipynb"
    parameters = {"means": [0.2, 0.4, 0.6, 0.8], "horizon": 2000, "num_seeds": 60, "change_seeds": 10}
    parameters["policies"] = ["UCB1", "Thompson", "discounted Thompson", "full information"]
    notebooks.run_notebook(ROOT / "notebooks" / "04_bandit_regret.ipynb", out, parameters, progress=False)
    text = "".join("".join(o.get("text", "")) for c in code_cells(out) for o in c.outputs)
    assert "every claim of this notebook held" in text


def test_two_runs_give_the_same_bytes_where_nothing_is_timed(tmp_path):
    source = tmp_path / "tiny.ipynb"
    cells = ["1 + 1", "import ipywidgets\nipywidgets.IntSlider(value=3)", "print('same')"]
    cells.append("import time\nprint('one', flush=True)\ntime.sleep(1)\nprint('stream')")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, source)
    runs = [
        notebooks.normalise(notebooks.run_notebook(source, tmp_path / f"{i}.ipynb", progress=False)) for i in range(2)
    ]
    assert runs[0] == runs[1] and '"same' in runs[0] and r'"one\nstream\n"' in runs[0]
