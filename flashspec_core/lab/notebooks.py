"""Run the notebooks: execute, normalise, render; and the quickstart's table on the terminal.

Two executions of a notebook in which nothing is timed give the same bytes. It leaves out what the notebooks measure.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from flashspec_core.lab.bench import ROOT

NOTEBOOKS = ROOT / "notebooks"
RESULT_MIME = "application/vnd.flashspec.result+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
MODEL_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")


def publish(rows) -> None:
    """Show rows in a notebook in a form that `published` reads back.

    Args:
        rows: dicts from `row`.
    """
    from IPython.display import display

    display({RESULT_MIME: list(rows), "text/plain": f"{len(rows)} measured rows"}, raw=True)


def published(notebook) -> list[dict]:
    """All rows that an executed notebook has published.

    Args:
        notebook: path of the .ipynb.
    """
    cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
    shown = [output.get("data", {}).get(RESULT_MIME, []) for cell in cells for output in cell.get("outputs", [])]
    return [row for rows in shown for row in rows]


def quickstart_table(rows) -> str:
    """Plain and speculative tokens per second side by side.

    Args:
        rows: published by notebook 00.

    Returns:
        Lines of text, one a domain.
    """
    speed = {(r["domain"], r["provider"]): float(r["p50"]) for r in rows if r["metric"] == "tokens_per_second"}
    same = {r["domain"]: float(r["p50"]) == 1 for r in rows if r["metric"] == "identical"}
    lines = [f"{'prompt':<12}{'plain tokens/s':>16}{'speculative':>14}{'ratio':>8}  identical"]
    for domain in dict.fromkeys(d for d, _ in speed):
        plain, fast = speed[domain, "transformers"], speed[domain, "flashspec_core"]
        verdict = "yes" if same.get(domain) else "NO"
        lines.append(f"{domain:<12}{plain:>16.1f}{fast:>14.1f}{fast / plain:>7.2f}x  {verdict}")
    return "\n".join(lines)


def run_notebook(source: Path, out: Path, parameters: dict | None = None, progress: bool = True):
    """Execute a notebook with papermill, from its own folder.

    Args:
        source: the committed notebook.
        out: where the executed one goes.
        parameters: of its cell tagged `parameters`.
        progress: show a bar of cells.

    Returns:
        The executed notebook, an nbformat node; a failing cell raises, and `out` then shows it in red.
    """
    import papermill

    out.parent.mkdir(parents=True, exist_ok=True)
    return papermill.execute_notebook(
        str(source), str(out), parameters or {}, kernel_name="python3", cwd=str(source.parent), progress_bar=progress
    )


def render_html(notebook: Path) -> Path:
    """Write a notebook as an HTML page beside it.

    Args:
        notebook: path of the .ipynb.

    Returns:
        Path of the .html.
    """
    import nbformat
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter().from_notebook_node(nbformat.read(notebook, as_version=4))
    notebook.with_suffix(".html").write_text(page, encoding="utf-8")
    return notebook.with_suffix(".html")


def normalise(notebook: dict) -> str:
    """A notebook as text without what changes from run to run: clocks, random ids, versions, progress bars.

    Args:
        notebook: an nbformat node or its dict.

    Returns:
        JSON, keys sorted; the same bytes for two runs in which nothing is timed.
    """
    import nbformat
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    notebook, join = nbformat.from_dict(json.loads(json.dumps(notebook))), CoalesceStreamsPreprocessor()
    widgets = notebook["metadata"].get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    cells = []
    for number, cell in enumerate(c for c in notebook["cells"] if "injected-parameters" not in _tags(c)):
        cell["id"] = f"cell-{number:02d}"
        cell["metadata"] = {"tags": _tags(cell)} if _tags(cell) else {}
        if cell["cell_type"] == "code":
            cell["outputs"] = [output for output in cell["outputs"] if not _is_noise(output)]
            join.preprocess_cell(cell, {}, number)  # where a stream is cut hangs on the clock
        cells.append(cell)
    order = list(dict.fromkeys(MODEL_ID.findall(json.dumps(cells, sort_keys=True))))  # shown first, then what they hold
    for model in order:
        found = dict.fromkeys(MODEL_ID.findall(json.dumps(widgets.get(model, {}), sort_keys=True)))
        order += [other for other in found if other not in order]
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    shown = {model: widgets[model] for model in order if model in widgets}
    if shown:
        metadata["widgets"] = {WIDGET_STATE: {"state": shown, "version_major": 2, "version_minor": 0}}
    text = json.dumps({**notebook, "cells": cells, "metadata": metadata}, ensure_ascii=False)
    ids = {model: f"{number:032x}" for number, model in enumerate(order)}
    renamed = json.loads(MODEL_ID.sub(lambda match: ids.get(match[0], match[0]), text))
    return json.dumps(renamed, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _tags(cell) -> list[str]:
    return cell["metadata"].get("tags", [])


def _is_noise(output) -> bool:
    """Progress bars: text on stderr that redraws itself, or a bar's widget."""
    if output["output_type"] == "stream":
        return output["name"] == "stderr" and "%|" in "".join(output["text"])
    return any("%|" in "".join(text) for mime, text in output.get("data", {}).items() if mime == "text/plain")


def execute_all(build: Path) -> None:
    """Execute every notebook with its committed parameters and write the outputs back, normalised.

    Args:
        build: folder for what papermill writes meanwhile.
    """
    for source in sorted(NOTEBOOKS.glob("*.ipynb")):
        print(source.name)
        source.write_text(normalise(run_notebook(source, build / source.name)), encoding="utf-8")


def main(arguments=None) -> None:
    """The command line: `python -m flashspec_core.lab.notebooks quickstart` or `execute`.

    Args:
        arguments: list of words; None: sys.argv.
    """
    parser = argparse.ArgumentParser(description="Run notebooks.")
    parser.add_argument("what", choices=["quickstart", "execute"])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder for what is written")
    options = parser.parse_args(arguments)
    if options.what == "execute":
        return execute_all(options.build)
    done = options.build / "00_quickstart.ipynb"
    run_notebook(NOTEBOOKS / done.name, done)
    page, rows = render_html(done), published(done)
    print(f"\n{rows[0]['model']}, {rows[0]['dtype']}, {rows[0]['device']}\n{quickstart_table(rows)}")
    print(f"\n{done}\n{page}")


if __name__ == "__main__":
    main()
