"""Read from a compiled GPU program when it copies to and from the host, and what runs meanwhile."""

import dataclasses
import re

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{\s*$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
OPCODE = re.compile(r" ([a-z][a-z-]*)\(")
HOST = "S(5)"
# What may handle host memory without touching its contents on the host.
PASSING = {
    "parameter", "get-tuple-element", "tuple", "while", "opt-barrier", "bitcast", "conditional",
    "copy-start", "copy-done", "fusion-start", "fusion-done", "async-start", "async-done",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Transfer:
    """An asynchronous copy: `direction` "in" (to the device), "out", or "host" (within the host).

    `products` counts the matrix products between its start and the wait for it; `order` is the
    place of its start among the computation's transfers.
    """

    direction: str
    shape: str
    products: int
    order: int


def computations(hlo: str) -> dict[str, list[str]]:
    """Instructions of every computation, in their scheduled order."""
    found: dict[str, list[str]] = {}
    body: list[str] = []
    for line in hlo.splitlines():
        if start := COMPUTATION.match(line):
            body = found.setdefault(start[1], [])
        elif INSTRUCTION.match(line):
            body.append(line)
    return found


def loops(hlo: str) -> dict[str, list[str]]:
    """The bodies of while loops."""
    every = computations(hlo)
    names = re.findall(r"\bwhile\(.*body=%?([\w.-]+)", hlo)
    return {name: every[name] for name in names}


def opcode(line: str) -> str:
    found = OPCODE.search(" " + line.split(" = ", 1)[1])
    return found[1] if found else ""


def transfers(lines: list[str]) -> list[Transfer]:
    """Asynchronous copies of a computation that touch host memory."""
    open_at: dict[str, tuple[str, str, int, int]] = {}
    done, products = [], 0
    for line in lines:
        name, rest = INSTRUCTION.match(line).groups()  # type: ignore[union-attr]
        op = opcode(line)
        if op == "copy-start" and HOST in rest:
            target, source = re.findall(r"(\w+\[[\d,]*\]\{[^}]*\})", rest)[:2]
            sides = (HOST in source, HOST in target)
            direction = {(True, False): "in", (False, True): "out", (True, True): "host"}[sides]
            shape = target.split("{")[0]
            open_at[name] = (direction, shape, products, len(open_at) + len(done))
        elif op == "fusion-start" and HOST in rest:  # an update of a slice of a host array
            shape = re.findall(r"\w+\[[\d,]*\]", rest)[1]
            open_at[name] = ("out", shape, products, len(open_at) + len(done))
        elif op in ("copy-done", "fusion-done"):
            start = re.search(rf"{op}\(%?([\w.-]+)", rest)[1]  # type: ignore[index]
            if start in open_at:
                direction, shape, before, order = open_at.pop(start)
                done.append(Transfer(direction, shape, products - before, order))
        elif "dot" in name or "cublas" in rest:
            products += 1
    assert not open_at
    return sorted(done, key=lambda t: t.order)


def host_work(lines: list[str]) -> list[str]:
    """Instructions that compute, copy or gather in host memory: there should be none."""
    return [
        line.strip()[:120]
        for line in lines
        if HOST in line and opcode(line) not in PASSING and "wrapped_dynamic-update" not in line
    ]
