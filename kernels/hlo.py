"""Read an optimised HLO module as text: what it moves and what it calls."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

MOVING = ("copy", "copy-start", "slice", "dynamic-slice", "transpose", "concatenate", "pad")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{\s*$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?[\w.-]+ = \(?(\w+)\[([\d,]*)\]\S*.*? ([a-z-]+)\(")
FUSED = re.compile(r"\bfusion\(.*calls=%?([\w.-]+)")
TUPLE_ROOT = re.compile(r"^\s+ROOT %?[\w.-]+ = .*? tuple\(([^)]*)\)", re.MULTILINE)
# The kernel's name comes behind its code, a string without quotes or line ends in it.
TRITON = re.compile(r'custom_call_target="__gpu\$xla\.gpu\.triton".*?, name = "(\w+)"')
NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = ")


@dataclasses.dataclass(frozen=True)
class Move:
    """An instruction that only moves data. `written`: its result goes to memory.

    Inside a fusion only the root is written (all parts of it, if it is a tuple); the rest is index
    arithmetic.
    """

    op: str
    shape: str  # bf16[1,8,64]
    bytes: int
    written: bool


def moves(hlo: str) -> Iterator[Move]:
    """Every moving instruction of the module, those inside fusions included."""
    fused = set(FUSED.findall(hlo))
    roots = {n.strip().lstrip("%") for root in TUPLE_ROOT.findall(hlo) for n in root.split(",")}
    inside = False
    for line in hlo.splitlines():
        if start := COMPUTATION.match(line):
            inside = start[1] in fused
        elif (found := INSTRUCTION.match(line)) and found[4] in MOVING:
            root, dtype, dims, op = found.groups()
            size = math.prod(int(d) for d in dims.split(",") if d)
            name = NAME.match(line)
            written = bool(root) or not inside or (name is not None and name[1] in roots)
            yield Move(op, f"{dtype}[{dims}]", math.ceil(size * bits(dtype) / 8), written)


def bits(dtype: str) -> int:
    """Width of an HLO element type: `bf16` 16, `pred` 8, `f8e4m3fn` 8, `s4` 4."""
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 8


def custom_calls(hlo: str) -> dict[str, int]:
    return dict(Counter(re.findall(r'custom_call_target="([^"]+)"', hlo)))


def kernel_calls(hlo: str) -> dict[str, int]:
    """How often each Pallas kernel, by name, is called: those that Triton compiled."""
    return dict(Counter(TRITON.findall(hlo)))


def host_choices(hlo: str) -> int:
    """Branches that the host chooses: on a GPU each waits for the card and leaves it idle."""
    return len(re.findall(r" conditional\(", hlo))
