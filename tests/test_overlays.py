"""The engine on older transformers, and notebooks in a kernel with Colab's versions of widgets and IPython.

Each set of versions is installed once into a folder of the cache, which stands first on PYTHONPATH of a new process.
"""

import os
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import nbformat
import papermill
import pytest
import torch
import transformers
from filelock import FileLock

from flashspec_core.engine import bundled

ROOT = Path(__file__).resolve().parents[1]
FILES = ("tests/test_decode.py", "tests/test_drafters.py", "tests/test_kv_cache.py", "tests/test_bundled.py")
LEFT_OUT = (  # words of the names of tests, for pytest's -k
    "real_model or a_stop_string or a_stream_equals or an_empty_stop or another_tokenizer"  # need the real SmolLM2
    " or joint_law"  # slow, and nothing of transformers in it but a forward pass
    " or (greedy_equals and (qwen2 or mistral) and not model)"  # all drafters for llama, one for each other family
)
COLAB = ("ipywidgets==7.7.1", "ipykernel==6.17.1", "ipython==7.34.0", "jupyter_client==7.4.9", "traitlets==5.7.1")
COLAB_NEEDS = (  # what these need beyond what is installed; without `notebook`, which only a browser's side needs
    *("backcall==0.2.0", "decorator==5.3.1", "ipython_genutils==0.2.0", "jupyterlab_widgets==1.1.11"),
    *("nest-asyncio==1.6.0", "pickleshare==0.7.5", "widgetsnbextension==3.6.10"),
)
NOTEBOOKS = [(name, "target_name") for name in ("00_quickstart", "03_live_acceptance")]  # and the model's parameter
PROBE = """
import ipykernel, IPython, ipywidgets, jupyter_client, traitlets
print(*(module.__version__ for module in (ipywidgets, ipykernel, IPython, jupyter_client, traitlets)))
ipywidgets.IntSlider(value=3)
"""


def overlay(name, *requirements):
    """The folder with these packages and no others; the first call installs them."""
    folder = bundled.cache_folder() / "overlays" / f"{name}-{zlib.crc32(' '.join(requirements).encode()):08x}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"), tempfile.TemporaryDirectory(dir=folder.parent) as build:
        if not folder.exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            command += ["--no-deps", "--no-compile", "--target", f"{build}/new", *requirements]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode and re.search("connection broken|timed out", done.stderr):
                pytest.skip(f"PyPI cannot be reached, and {name} is not in the cache yet")
            assert done.returncode == 0, done.stderr
            os.rename(f"{build}/new", folder)
    return folder


def python_path(folder):
    return os.pathsep.join([str(folder), str(ROOT)])


@pytest.mark.parametrize("version", ["5.13.1", "5.15.0"])  # Colab's in July and August 2026
def test_the_engine_on_older_transformers(version):
    needs = ("tokenizers==0.22.2", "huggingface_hub==1.27.0")  # as on Colab; both versions refuse newer ones
    folder = overlay(f"transformers-{version}", f"transformers=={version}", *needs)
    options = {"capture_output": True, "text": True, "cwd": ROOT}
    options["env"] = {**os.environ, "PYTHONPATH": python_path(folder)}
    code = "import transformers; print(transformers.__version__, transformers.__file__)"
    asked = subprocess.run([sys.executable, "-c", code], **options)
    assert asked.stdout.split() == [version, str(folder / "transformers" / "__init__.py")], asked.stderr
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", *FILES, "-k", f"not ({LEFT_OUT})"]
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 150 and "skipped" not in done.stdout


@pytest.fixture(scope="module")
def tiny_folder(smollm2, tmp_path_factory):
    """A tiny random Llama with SmolLM2's tokenizer, saved.

    Shared embeddings and small weights make it repeat itself now and then, so drafts stand and fall. With this seed it
    does so more often behind the copy-edit prompt than behind the chat prompt (9 steps against 14, in float32 and
    in bfloat16), which the quickstart claims of a real model.
    """
    folder, tokenizer = tmp_path_factory.mktemp("tiny"), smollm2.tokenizer
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        tie_word_embeddings=True,
        **{key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name, parameter", NOTEBOOKS)
def test_a_notebook_with_colabs_widgets(name, parameter, tiny_folder, monkeypatch):
    folder = overlay("colab", *COLAB, *COLAB_NEEDS)
    monkeypatch.setenv("PYTHONPATH", python_path(folder))  # the kernel inherits it
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(PROBE))
    options = {"kernel_name": "python3", "cwd": ROOT / "notebooks", "progress_bar": False}
    done = papermill.execute_notebook(notebook, None, {parameter: str(tiny_folder)}, **options)
    printed, slider = done.cells[-1].outputs
    assert printed.text.split() == [requirement.split("==")[1] for requirement in COLAB]
    assert "application/vnd.jupyter.widget-view+json" in slider.data
