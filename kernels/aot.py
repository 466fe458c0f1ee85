"""Compile a function for an NVIDIA GPU on a machine that has none, and say what came of it.

XLA's GPU compiler needs no card, only the CUDA plugin of JAX (which also carries the descriptions
of the cards) and CUDA's `ptxas` and `libdevice`; the extra `gpu-check` installs all of them. What
can be read off this way: memory, copies, which kernels are in the program, their registers, spills
and matrix instructions. What can not: speed.
"""

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from polestar_jax.errors import PolestarError
from polestar_jax.kernels.hlo import Move, custom_calls, moves
from polestar_jax.kernels.ptx import Kernel, kernel_resources

# Short names of the cards this project checks: the plugin's own name and the number of SMs.
CARDS = {
    "A100": ("NVIDIA A100-SXM4-80GB", 108),
    "H100": ("NVIDIA H100 80GB HBM3", 132),
    "H200": ("NVIDIA H200 141GB HBM3e", 132),
}
PLUGINS = ("jax_plugins/xla_cuda13", "jax_plugins/xla_cuda12")
REMEDY = "install the extra 'gpu-check' (pip install 'polestar-jax[gpu-check]', Python >= 3.12)"


@dataclasses.dataclass(frozen=True)
class Program:
    """One function compiled for one card. Sizes in bytes.

    `temp` is what the program allocates beside its arguments and results; `alias` the part of the
    results written into donated arguments. `custom_calls` counts call targets (Pallas kernels
    lowered through Triton are `__gpu$xla.gpu.triton`). `kernels` is filled on request.
    """

    gpu: str
    seconds: float  # to lower and compile
    argument: int
    output: int
    alias: int
    temp: int
    moves: tuple[Move, ...]
    custom_calls: dict[str, int]
    kernels: tuple[Kernel, ...]
    hlo: str

    @property
    def temp_gib(self) -> float:
        return self.temp / 2**30

    @property
    def copies(self) -> dict[str, int]:
        """How many copies of which shape (`bf16[1,8,64]`), in fusions or alone."""
        return dict(Counter(m.shape for m in self.moves if m.op in ("copy", "copy-start")))

    def large_moves(self, minimum: int) -> list[Move]:
        """Copies, slices and transposes that write at least `minimum` bytes to memory."""
        return [m for m in self.moves if m.written and m.bytes >= minimum]


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module-level function in a fresh interpreter and return what it returns."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def available() -> str | None:
    """None when this environment can compile for a GPU, else the reason why not."""
    if _plugin_library() is None:
        return f"the CUDA plugin of JAX is not installed; {REMEDY}"
    try:
        _topology("A100")
    except PolestarError as error:
        return str(error)
    return None


def compile_for(
    fn: Callable[..., Any],
    args: Sequence[Any],
    gpu: str = "H200",
    donate_argnums: int | Sequence[int] = (),
    resources: bool = False,
    **jit_options: Any,
) -> Program:
    """Compile `fn(*args)` for a card; nothing runs and no array is made.

    `args` are pytrees of arrays or `jax.ShapeDtypeStruct`; `gpu` a key of `CARDS` or the plugin's
    name of a card; `resources` also assembles every kernel and reads its registers and spills
    (slower). `fn` may already be jitted if it needs no `jit_options`. Raises `PolestarError` when
    the compiler is not installed or the card unknown.
    """
    topology = _topology(gpu)
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("card",)), PartitionSpec())

    def described(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    abstract = jax.tree.map(described, tuple(args))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="polestar-aot-") as folder:
        with card_in_scope(gpu), _mosaic_dump(folder if resources else None):
            lowered = jax.jit(fn, donate_argnums=donate_argnums, **jit_options).lower(*abstract)
        options: dict[str, Any] = {}
        if resources:
            options = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
        with _mosaic_dump(folder if resources else None):
            compiled = lowered.compile(compiler_options=options or None)
        seconds = time.perf_counter() - start
        kernels = kernel_resources(Path(folder)) if resources else ()
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    if hlo is None or memory is None:
        raise PolestarError(f"JAX {jax.__version__} gives no program text for {gpu}; use >= 0.12")
    return Program(
        gpu=gpu,
        seconds=seconds,
        argument=memory.argument_size_in_bytes,
        output=memory.output_size_in_bytes,
        alias=memory.alias_size_in_bytes,
        temp=memory.temp_size_in_bytes,
        moves=tuple(moves(hlo)),
        custom_calls=custom_calls(hlo),
        kernels=kernels,
        hlo=hlo,
    )


@contextlib.contextmanager
def _mosaic_dump(folder: str | None) -> Iterator[None]:
    """Let Mosaic, which assembles kernels by itself, leave their code in `folder` too."""
    if folder is None:
        yield
        return
    before = os.environ.get("MOSAIC_GPU_DUMP_TO")
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder
    try:
        yield
    finally:
        del os.environ["MOSAIC_GPU_DUMP_TO"]
        if before is not None:
            os.environ["MOSAIC_GPU_DUMP_TO"] = before


def _plugin_library() -> Path | None:
    try:
        import jax_plugins
    except ImportError:
        return None
    for root in jax_plugins.__path__:
        for plugin in PLUGINS:
            library = Path(root).parent / plugin / "xla_cuda_plugin.so"
            if library.exists():
                return library
    return None


@cache
def card_descriptions() -> dict[str, str]:
    """The plugin's descriptions of cards, by device name.

    They are text messages embedded in the library, so they are found by their first field and end
    with the field that names the device.
    """
    library = _plugin_library()
    if library is None:
        raise PolestarError(f"the CUDA plugin of JAX is not installed; {REMEDY}")
    text = rb"[\t\n -~]*?"
    pattern = rb"gpu_device_info \{" + text + rb'device_description_str: "([^"]+)"'
    found = re.finditer(pattern, library.read_bytes())
    return {match[1].decode(): match[0].decode() + "\n" for match in found}


@cache
def _topology(gpu: str) -> Any:
    name, _ = CARDS.get(gpu, (gpu, 132))
    descriptions = card_descriptions()
    if name not in descriptions:
        known = ", ".join([*CARDS, *sorted(n for n in descriptions if n.startswith("NVIDIA"))])
        raise PolestarError(f"unknown card {gpu!r}; the installed plugin knows: {known}")
    _register_plugin()
    try:
        return topologies.get_topology_desc(
            platform="cuda", target_config=descriptions[name], topology="1x1x1"
        )
    except Exception as error:
        raise PolestarError(
            f"the CUDA plugin of JAX {jax.__version__} can not describe {name} here ({error}); "
            "run with JAX_PLATFORMS=cpu, and JAX >= 0.12"
        ) from error


def _register_plugin() -> None:
    """Let JAX load its plugins without looking for a card.

    With no platform named, the plugin first demands the whole of CUDA (cuDNN among it) and refuses
    to register itself, with a traceback in the log; when only the CPU is asked for it registers
    its compiler and demands nothing. So an unset choice becomes "cpu" - before any back end has
    been made, and only where no card is wanted.
    """
    if not jax.config.jax_platforms:  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")
    jax.devices()


def card_in_scope(gpu: str) -> contextlib.AbstractContextManager[Any]:
    """What is traced inside is meant for the card; needs no compiler.

    Pallas asks for its target in this way, and the decode loop whether to use kernels, from JAX
    0.11 on; before, nothing is in scope.
    """
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

    name, cores = CARDS.get(gpu, (gpu, 132))
    device = AbstractDevice(name, cores, "gpu")
    return use_abstract_mesh(
        AbstractMesh((1,), ("card",), axis_types=(AxisType.Auto,), abstract_device=device)
    )
