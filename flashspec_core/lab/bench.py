"""Measure honestly: warm up, synchronise, repeat, quantiles, and tidy rows with device, versions and commit.

The only writer of notebooks/results. It leaves out figures (plots.py) and what is measured against what (notebooks).
"""

from __future__ import annotations

import csv
import functools
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "notebooks" / "results"
COLUMNS = tuple(
    (
        "benchmark provider mode model batch vocab gamma temperature method domain metric unit p20 p50 p80 num_repeats "
        "note device dtype python torch triton transformers commit date"
    ).split()
)


def measure(call, warmup: int = 1, repeat: int = 5) -> list[float]:
    """Seconds of each of several calls, the device waited for before and after.

    Args:
        call: without arguments.
        warmup: calls that are not counted.
        repeat: calls that are, at least 1.

    Returns:
        repeat times, in order, seconds.

    >>> len(measure(lambda: None, warmup=0, repeat=3))
    3
    """
    for _ in range(warmup):
        call()
    seconds = []
    for _ in range(repeat):
        synchronise()
        start = time.perf_counter()
        call()
        synchronise()
        seconds.append(time.perf_counter() - start)
    return seconds


def synchronise() -> None:
    """Wait for the GPU where one is in use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def quantiles(values) -> dict[str, float]:
    """The 20th, 50th and 80th percentile, linear between neighbours.

    Args:
        values: at least one number.

    Returns:
        {"p20", "p50", "p80", "num_repeats"}.

    >>> quantiles([1.0, 2.0, 3.0])
    {'p20': 1.4, 'p50': 2.0, 'p80': 2.6, 'num_repeats': 3}
    """
    p20, p50, p80 = np.quantile(list(values), [0.2, 0.5, 0.8]).tolist()
    return {"p20": p20, "p50": p50, "p80": p80, "num_repeats": len(values)}


@functools.cache  # asks git twice and reads /proc: once a process, not once a row
def environment() -> dict[str, str]:
    """What a number depends on: device, versions, commit ("+" behind it: uncommitted changes) and date."""

    def installed(name):
        try:
            return version(name)
        except PackageNotFoundError:
            return ""

    def git(*words):
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    return {
        "device": device_name(),
        "python": platform.python_version(),
        **{name: installed(name) for name in ("torch", "triton", "transformers")},
        "commit": os.environ.get("FLASHSPEC_COMMIT")  # of a copy that has no history
        or git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def device_name() -> str:
    """The GPU's name, or the CPU's model and the number of cores this process may use."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()


def cpu_name() -> str:
    """The CPU's model and the number of cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    names = [platform.processor() or platform.machine()]
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")] or names
    return f"{names[0]}, {cores} cores"


def row(benchmark: str, provider: str, metric: str, unit: str, values, **cells) -> dict:
    """One measured value with all that it depends on.

    Args:
        benchmark, provider, metric, unit: see the columns in `COLUMNS`.
        values: the measurements, at least one.
        cells: any other column; what is left out stays empty.

    Returns:
        A dict with every column.

    Raises:
        ValueError: a cell that is no column.
    """
    unknown = set(cells) - set(COLUMNS)
    if unknown:
        raise ValueError(f"expected columns among {COLUMNS}, got {sorted(unknown)}")
    known = dict(benchmark=benchmark, provider=provider, metric=metric, unit=unit)
    filled = {**environment(), **quantiles(list(values)), **cells, **known}
    return {column: filled.get(column, "") for column in COLUMNS}


def model_cells(target) -> dict[str, str]:
    """What a row says of the model.

    Args:
        target: what `load_target` returns.
    """
    return {"model": target.name, "dtype": str(target.dtype).removeprefix("torch.")}


def append_rows(rows, path) -> None:
    """Add rows to a CSV, whole or not at all.

    Args:
        rows: dicts from `row`.
        path: of the CSV; made with its header where it is missing.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    old = read_rows(path) if path.exists() else []
    temporary = path.with_suffix(".partial")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*old, *rows])
    os.replace(temporary, path)


def read_rows(path) -> list[dict]:
    """The rows of a CSV, every cell a string.

    Args:
        path: of the CSV.

    Raises:
        ValueError: its header is not `COLUMNS`.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"expected the columns {COLUMNS} in {path}, got {reader.fieldnames}")
        return list(reader)


def pick(rows, **cells) -> list[dict]:
    """The rows whose cells are these.

    Args:
        rows: from `read_rows` or `row`.
        cells: column -> value, compared as text.

    >>> pick([{"batch": "8"}, {"batch": "32"}], batch=8)
    [{'batch': '8'}]
    """
    return [r for r in rows if all(str(r[name]) == str(value) for name, value in cells.items())]


def median(rows, **cells) -> float:
    """The p50 of the first row whose cells are these.

    Args:
        rows, cells: see `pick`.

    Raises:
        ValueError: there is none.

    >>> median([{"batch": "8", "p50": "2.5"}], batch=8)
    2.5
    """
    found = pick(rows, **cells)
    if not found:
        raise ValueError(f"expected a row with {cells} among {len(rows)}, got none")
    return float(found[0]["p50"])


def compare_decode(target, arms, prompts: dict, max_new_tokens: int = 48, repeat: int = 1, plain=None):
    """Decode each prompt greedily three ways in one run: plain, transformers' prompt lookup, and here.

    Args:
        target: what `load_target` returns.
        arms: as `generate` takes them.
        prompts: domain -> chat messages.
        max_new_tokens: for all three.
        repeat: timed rounds; every round takes each way in turn, so that a slow moment hits all.
        plain: an untouched transformers model; None: the target's, which decoding here leaves as it was.

    Returns:
        rows (tokens per second of each provider and domain), and for each domain the ids of each provider and the
        Generation.
    """
    import torch

    from flashspec_core.engine.decode import generate

    model = target.model if plain is None else plain
    rows, outputs = [], {}
    for domain, messages in prompts.items():
        encoded = target.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(target.device)

        def transformers(limit, encoded=encoded, **options):
            with torch.inference_mode():
                ids = model.generate(**encoded, max_new_tokens=limit, do_sample=False, **options)
            return ids[0, encoded["input_ids"].shape[1] :].tolist()

        ways = {
            "transformers": transformers,
            "transformers-prompt-lookup": lambda limit, call=transformers: call(limit, prompt_lookup_num_tokens=10),
            "flashspec_core": lambda limit, m=messages: generate(target, arms, m, max_new_tokens=limit),
        }
        for way in ways.values():
            way(4)  # the warm-up
        seconds, outputs[domain], outs = {name: [] for name in ways}, {}, []
        for _ in range(repeat):
            for name, way in ways.items():
                seconds[name] += measure(lambda w=way, o=outs: o.append(w(max_new_tokens)), warmup=0, repeat=1)
                outputs[domain][name] = outs.pop()
        for name, times in seconds.items():
            out = outputs[domain][name]
            count = len(getattr(out, "token_ids", out))
            mode = "graph" if getattr(out, "mode", "") == "captured" else "eager"
            cells = dict(mode=mode, batch=1, temperature=0, domain=domain, **model_cells(target))
            cells |= dict(method="token" if name == "flashspec_core" else "plain")
            rows.append(row("decode", name, "tokens_per_second", "1/s", [count / t for t in times], **cells))
    return rows, outputs


def panel_rows(target, drafters, repeat: int = 5) -> list[dict]:
    """Tokens a second of one text with the panel drawn and without, in turn; to be run where the panel is shown.

    Args:
        target, drafters: as live.LivePanel takes them.
        repeat: texts of each kind.

    Returns:
        rows.
    """
    from flashspec_core.lab.live import LivePanel

    speeds = {"panel on": [], "panel off": []}
    for _ in range(repeat + 1):
        for note, found in speeds.items():
            panel = LivePanel(target, drafters)
            if note == "panel off":
                panel._draw = lambda: None
            panel.controls["domain"].value = "copy-edit"
            start = time.perf_counter()
            steps = panel.play().steps
            found.append(sum(len(step.token_ids) for step in steps) / (time.perf_counter() - start))
    cells = dict(mode="eager", batch=1, gamma=4, temperature=0, method="token", domain="copy-edit")
    cells |= model_cells(target)
    unit = ("tokens_per_second", "1/s")
    return [row("panel", "flashspec_core", *unit, found[1:], note=note, **cells) for note, found in speeds.items()]


def first_divergence(target, prompt_ids, plain_ids, fast_ids) -> dict | None:
    """Where two greedy texts part, and how close the target's choice was there.

    Rule: the margin is the difference of the target's two largest logits behind the shared prefix, in its own dtype;
    in 16 bits a small one may fall either way, in float32 none should.

    Args:
        target: what `load_target` returns.
        prompt_ids, plain_ids, fast_ids: lists of ids.

    Returns:
        None where they agree, else {"position", "margin", "plain", "fast"}.
    """
    import torch

    from flashspec_core.engine.kv_cache import common_prefix

    at = common_prefix(plain_ids, fast_ids)
    if at == len(plain_ids) == len(fast_ids):
        return None
    ids = torch.tensor([[*prompt_ids, *plain_ids[:at]]], device=target.device)
    with torch.inference_mode():
        best = target.model(input_ids=ids, logits_to_keep=1).logits[0, -1].float().topk(2).values.tolist()
    words = [target.tokenizer.decode(x[at : at + 1]) for x in (plain_ids, fast_ids)]
    return {"position": at, "margin": best[0] - best[1], "plain": words[0], "fast": words[1]}
