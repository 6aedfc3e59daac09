"""The kernels under NVIDIA's compute-sanitizer: no access outside a buffer, no race in shared memory."""

import os
import shutil
import subprocess
import sys

import pytest
from test_kernels import GPU

RUNS = [
    ("memcheck", "test_kernels.py", "few_rows"),
    ("racecheck", "test_kernels.py", "few_rows"),
    ("memcheck", "test_product_kernels.py", "on_a_gpu"),
    ("racecheck", "test_product_kernels.py", "on_a_gpu"),
    ("memcheck", "test_cuda_graphs.py", "captured_steps_give and token and (eagle or n-gram)"),
]


@GPU
@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="needs compute-sanitizer of the CUDA toolkit")
@pytest.mark.parametrize("tool, file, chosen", RUNS)
def test_gpu_sanitizers_find_nothing(tool, file, chosen):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99", sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", os.path.join(os.path.dirname(__file__), file), "-k", chosen]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # a buffer of its own for each tensor
    ran = subprocess.run(command, env=own, capture_output=True, text=True)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-2000:]
