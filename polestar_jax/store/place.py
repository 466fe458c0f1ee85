"""Device and pinned host memory: moving arrays, and keeping the moves behind the computation.

Hidden inputs are fetched a whole window at a time, although a refresh needs about half of its rows:
which ones is known only after the layer's own proxy attention, when nothing is left to hide a copy
behind, while the window can come during the layer before. For LLaDA-8B that is 1.0 MB a layer in
bfloat16 and 0.30 MB in four bits: 42 and 12 us at 25 GB/s, against the 87 us that reading a layer's
weights (416 MB) takes at 4.8 TB/s. Fetching single rows would need some 2,000 copies a pass, of
which XLA runs two at a time.

A move is a `jax.device_put` inside the compiled program, which XLA for GPUs turns into an
asynchronous copy: a start, whatever the program does meanwhile, and a wait. Three rules keep those
copies cheap (all checked in the compiled program by tests):

- What is fetched is a whole array, or a contiguous slice of one: a gather would be computed on the
  host.
- A fetch may not start before its turn (`fetch`), else every layer's rows would be on the device
  at once; and a write must be over some time after it started (`settle`), else writes pile up and
  use up the few copies that may run at a time.
- Whatever is written to a host array depends on what was read from it, or replaces it whole: two
  independent uses in one iteration of a loop make XLA copy the array.
"""

from typing import Any, TypeVar

import jax
from jax import Array, lax

from polestar_jax.errors import PolestarError
from polestar_jax.kernels.dispatch import target_platform

PLACES = ("device", "host")
HOST_KIND = "pinned_host"
Tree = TypeVar("Tree")


def has_host_memory() -> bool:
    """Whether the target of programs traced now can keep arrays in pinned host memory."""
    if target_platform() in ("gpu", "cuda"):  # also a card that is only compiled for
        return True
    device = jax.local_devices()[0]
    try:
        memories = device.addressable_memories()
    except RuntimeError:  # how a back end says that it does not implement memories
        return False
    return HOST_KIND in {memory.kind for memory in memories}


def check_place(field: str, place: str, fallback: bool) -> None:
    """Raise unless `place` can be had, or its absence be made up for."""
    if place == "host" and not fallback and not has_host_memory():
        raise PolestarError(
            f"{field}='host' needs pinned host memory, which the back end "
            f"{target_platform()!r} does not have; use {field}='device', or host_fallback=True to "
            "stay on the device wherever that is so"
        )


def resolve(place: str) -> str:
    """Where rows meant for `place` go on this target: "host" only where there is such memory."""
    return place if place == "device" or has_host_memory() else "device"


def to_host(tree: Any) -> Any:
    """The arrays in pinned host memory."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: Any) -> Any:
    """The arrays in device memory."""
    return jax.device_put(tree, jax.memory.Space.Device)


def put(tree: Tree, place: str) -> Tree:
    """Arrays of the device sent to `place`."""
    return to_host(tree) if place == "host" else tree


def fetch(tree: Tree, place: str, x: Array) -> tuple[Tree, Array]:
    """Arrays from `place` on the device, and `x`; the copy starts once `x` is there.

    Call it with the input of one layer and the rows of the next, and go on with the `x` returned.
    """
    if place == "device":
        return tree, x
    tree, x = lax.optimization_barrier((tree, x))
    return to_device(tree), x


def settle(tree: Tree, place: str, x: Array) -> tuple[Tree, Array]:
    """Arrays written to `place`, and `x`, which is held back until they have arrived."""
    return (tree, x) if place == "device" else lax.optimization_barrier((tree, x))
