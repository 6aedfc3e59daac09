"""The kernels under NVIDIA's compute-sanitizer: no access outside a buffer, no race in shared memory."""

import os
import shutil
import subprocess
import sys

import pytest
from test_kernels import GPU

from flashspec_core.engine import product_kernels as products
from flashspec_core.verify import kernels


@GPU
@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="needs compute-sanitizer of the CUDA toolkit")
@pytest.mark.parametrize(
    "tool, kernel, file, chosen",
    [
        ("memcheck", kernels._verify_kernel, "test_kernels.py", "parts_of_few_rows"),
        ("memcheck", kernels._floors_kernel, "test_kernels.py", "parts_of_few_rows"),
        ("memcheck", products.product_kernel, "test_product_kernels.py", "as_near_as_the_library"),
        ("racecheck", kernels._verify_kernel, "test_kernels.py", "parts_of_few_rows"),
        ("racecheck", kernels._floors_kernel, "test_kernels.py", "parts_of_few_rows"),
    ],
)
def test_gpu_sanitizers_find_nothing(tool, kernel, file, chosen):
    # one kernel at a time: what libraries launch is not ours, and racecheck reports cuBLAS's own barriers
    tests = [os.path.join(os.path.dirname(__file__), file), "-k", chosen]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99"]
    command += ["--kernel-name", f"kernel_substring={kernel.fn.__name__}"]
    command += [sys.executable, "-m", "pytest", "-q", *tests]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # a buffer of its own for each tensor
    ran = subprocess.run(command, env=own, capture_output=True, text=True)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-2000:]
