"""What the kernels of a compiled program need of the card: registers, spills, shared memory."""

import dataclasses
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from polestar_jax.errors import PolestarError

ENTRY = re.compile(r"\.visible \.entry ([\w$.]+)\(")
THUNK = re.compile(
    r"\] ([\w.$-]+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]"
    r"\s+shared_memory: (\d+) bytes"
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a program, as assembled for its card. Sizes in bytes, per thread or block."""

    name: str
    registers: int  # per thread
    stack: int  # per thread; spilled registers live there
    spilled: int  # bytes of spill stores and loads in the code
    shared: int  # per block, static and dynamic
    threads: int  # per block; 0 when the launch was not found
    blocks: int
    matrix: int  # tensor-core instructions in the code
    target: str  # sm_80, sm_90a


@cache
def ptxas() -> str:
    """Path of CUDA's assembler: of the pip packages, on PATH, or of an installed toolkit."""
    places = []
    try:
        import nvidia

        places = [str(Path(root) / "cu13" / "bin") for root in nvidia.__path__]
    except ImportError:
        pass
    for place in [*places, None, "/usr/local/cuda/bin"]:
        found = shutil.which("ptxas", path=place)
        if found:
            return found
    raise PolestarError("CUDA's ptxas was not found; install the extra 'gpu-check'")


def kernel_resources(folder: Path) -> tuple[Kernel, ...]:
    """Assemble every kernel that the compiler dumped into `folder` (`*.ptx`), in name order."""
    launches = {}
    for path in folder.glob("*thunk_sequence.txt"):
        for found in THUNK.finditer(path.read_text()):
            grid = [int(x) for x in found.groups()[1:4]]
            block = [int(x) for x in found.groups()[4:7]]
            launches[found[1]] = (
                grid[0] * grid[1] * grid[2],
                block[0] * block[1] * block[2],
                int(found[8]),
            )
    kernels = {}
    for path in sorted(folder.glob("*.ptx")):
        for kernel in _assemble(path, launches):
            kernels[kernel.name] = kernel
    return tuple(kernels[name] for name in sorted(kernels))


def _assemble(path: Path, launches: dict[str, tuple[int, int, int]]) -> list[Kernel]:
    text = path.read_text()
    target_line = re.search(r"^\.target (\w+)", text, re.M)
    if target_line is None:
        return []
    target = target_line[1]
    run = subprocess.run(
        [ptxas(), "-v", f"-arch={target}", str(path), "-o", "/dev/null"],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise PolestarError(f"ptxas refused a kernel for {target}: {run.stderr.strip()}")
    bodies = ENTRY.split(text)[1:]
    matrix = {n: _matrix_instructions(body) for n, body in zip(bodies[::2], bodies[1::2])}
    kernels = []
    for report in run.stderr.split("Compiling entry function")[1:]:
        name = re.search(r"'([^']+)'", report)
        stack = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
        )
        used = re.search(r"Used (\d+) registers", report)
        if name is None or stack is None or used is None:
            raise PolestarError(f"ptxas printed a report that was not understood: {report!r}")
        static = re.search(r"(\d+) bytes smem", report)
        blocks, threads, dynamic = launches.get(name[1]) or _mosaic_launch(path, text)
        kernels.append(
            Kernel(
                name=name[1],
                registers=int(used[1]),
                stack=int(stack[1]),
                spilled=int(stack[2]) + int(stack[3]),
                shared=dynamic + (int(static[1]) if static else 0),
                threads=threads,
                blocks=blocks,
                matrix=matrix.get(name[1], 0),
                target=target,
            )
        )
    return kernels


def _mosaic_launch(path: Path, text: str) -> tuple[int, int, int]:
    """Blocks (unknown: 0), threads and dynamic shared memory of a kernel that Mosaic dumped."""
    threads = re.search(r"\.maxntid (\d+)", text)
    note = path.with_suffix(".resources.txt")
    scratch = re.search(r"smem_scratch_bytes=(\d+)", note.read_text()) if note.exists() else None
    return 0, int(threads[1]) if threads else 0, int(scratch[1]) if scratch else 0


def _matrix_instructions(body: str) -> int:
    return len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", body))
