"""Kernels compiled for a GPU that is not there, in a process of its own: this one may interpret them."""

import json
import os
import re
import subprocess
import sys
import tempfile


def build(
    fn, constants: dict, types: dict, capability: int, num_warps: int, dtype: str = "bf16", aligned=(), **options
) -> dict:
    """Compile one kernel, and read what it takes: shared, local and spilled bytes, registers,
    bfloat16 instructions, and whether it waits for the kernel before it, and reads before that.

    Args:
        fn: a Triton kernel; constants.
        types: of arguments, names without _ptr (else: pointers to dtype, i32).
        capability, num_warps, dtype, options: of the compiler.
        aligned: names of arguments, with _ptr, that are multiples of 16.
    """
    import triton
    import triton.backends.nvidia as nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    of = lambda name: types.get(name.removesuffix("_ptr"), "*" + dtype if name.endswith("_ptr") else "i32")  # noqa: E731
    signature = {name: of(name) for name in fn.arg_names} | dict.fromkeys(constants, "constexpr")
    attrs = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source, target = ASTSource(fn, signature, constexprs=constants, attrs=attrs), GPUTarget("cuda", capability, 32)
    built = triton.compile(source, target=target, options={"num_warps": num_warps, **options})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        tool = os.path.join(os.path.dirname(nvidia.__file__), "bin", "cuobjdump")
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    registers, spilled, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    ptx = built.asm["ptx"]
    bf16 = len(re.findall(r"^\s*[a-z.]+\.bf16", ptx, re.M))
    reads = [m.start() for m in re.finditer(r"ld\.global|cp\.async", ptx)]
    waits = ptx.find("griddepcontrol.wait")  # -1: it begins in its turn
    return dict(capability=capability, shared=built.metadata.shared, local=local, registers=registers, bf16=bf16,
                spilled=spilled, waits=waits >= 0, reads_first=bool(reads) and min(reads) < waits)  # fmt: skip


def in_a_child(code: str, cache) -> list[dict]:
    """What a script's variable `out` holds. Args: code: it may import `build` from here; cache: a folder of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), environment.get("PYTHONPATH", "")])
    code += "\nimport json\nprint(json.dumps(out))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
