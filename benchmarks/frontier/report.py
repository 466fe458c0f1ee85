"""A run as Markdown: what was measured, on what, and the tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.frontier.intervals import difference, interval
from benchmarks.frontier.measure import marks
from benchmarks.frontier.settings import KNOBS, USUAL

Run = Mapping[str, Any]

NOTES = """\
Accuracy with a 95 % bootstrap interval over prompts. TPF: answer tokens (neither EOS nor padding)
per forward pass. tokens/s: answer tokens by wall seconds at this batch size (a batch lasts until
its slowest sequence is done), and by CPU seconds, which other load on the machine changes less;
both without compiling, loading and tokenising. MFLOP and rows (through all layers) per answer token
follow from passes and shapes. Passes and commits are means per prompt; refreshed rows are per
refresh pass and layer. MB: weights, state and temporaries of the compiled program."""

COLUMNS = (
    "accuracy %", "TPF", "NFE", "tokens/s", "per CPU s", "MFLOP/token", "rows/token",
    "passes full / windowed / cached / refresh", "refreshed rows",
    "commits confidence / drift / suffix / EOS", "MB",
)  # fmt: skip


def markdown(run: Run) -> str:
    """The whole report."""
    everything = list(run["records"].values())
    if run["identity"]["kind"] == "frontier":
        sections, by_task = by_family(run, everything), task_table(run, usual(everything))
    else:
        sections, by_task = by_knob(everything), task_table(run, everything)
    parts = [
        header(run),
        glance(run),
        NOTES,
        *sections,
        f"## Accuracy by task, %\n\n{by_task}",
        pairs(run),
    ]
    if run["drift"] is not None:
        parts.append(gate(run["drift"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def glance(run: Run) -> str:
    """The usual settings on one line each: accuracy by family, speed over all tasks."""
    families = list(run["families"])
    rows = []
    for record in usual(list(run["records"].values())):
        every = record["all"]
        setting = "defaults" if record["knob"] == "policy" else setting_name(record)
        rows.append(
            [record["policy"], setting]
            + [with_interval(record["families"][name]) for name in families]
            + [
                f"{every['tokens_per_forward']:.2f}",
                f"{every['flops_per_token'] / 1e6:.1f}",
                f"{every['tokens_per_second']:.0f}",
            ]
        )
    columns = ["policy", "setting", *(f"{name} %" for name in families)]
    return table([*columns, "TPF", "MFLOP/token", "tokens/s"], rows) if rows else ""


def setting_name(record: Mapping[str, Any]) -> str:
    return f"{record['knob'].replace('_', ' ')} {record['value']}"


def by_family(run: Run, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table over all tasks, and one for each family where there are several."""
    families = list(run["families"])
    sections = [] if len(families) == 1 else ["## All tasks\n\n" + points(records, None)]
    for name in families:
        sections.append(f"## {name[0].upper()}{name[1:]}\n\n" + points(records, name))
    return sections


def by_knob(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table over all tasks for each thing that was varied."""
    sections = []
    for knob in dict.fromkeys(record["knob"] for record in records):
        title = knob.replace("_", " ")
        chosen = [record for record in records if record["knob"] == knob]
        sections.append(f"## {title[0].upper()}{title[1:]}\n\n" + points(chosen, None))
    return sections


def header(run: Run) -> str:
    identity, place, records = run["identity"], run["environment"], run["records"].values()
    model, packages = identity["model"], place["packages"]
    total = sum(identity["tasks"].values())
    computing = sum(r["all"]["wall_seconds"] for r in records)
    compiling = sum(r["compile_seconds"] for r in records)
    revisions = ", ".join(sorted({r["revision"] for r in records})) or "none"
    seeds = ", ".join(map(str, identity["seeds"]))
    peak = max((r["peak_bytes"] or 0 for r in records), default=0)
    kind = identity["kind"]
    lines = [
        f"# {kind[0].upper()}{kind[1:]}: {model['name']}",
        "",
        f"`{run['command']}`",
        "",
        f"- Model: {model['name']}, {model['family']}, {model['parameters']:,} parameters, "
        f"{model['layers']} layers x {model['width']}, {model['dtype']}, "
        f"fingerprint {model['fingerprint']}",
        f"- Rows: {total} {identity['source']} prompts a setting, {identity['prompts']} style, "
        f"seeds {seeds}: "
        + ", ".join(f"{name} {count}" for name, count in identity["tasks"].items()),
        f"- Canvas: {identity['gen_length']} tokens in blocks of {identity['block_length']}, "
        f"prompts padded to {identity['prompt_bucket']}, batches of {identity['batch_size']}",
        f"- Machine: {place['device']}, {place['cores']} cores, Python {place['python']}, "
        f"JAX {packages['jax']}, Flax {packages['flax']}",
        f"- Revision {revisions}, begun {run['created']}",
        f"- Time: {computing:.0f} s computing, {compiling:.0f} s compiling, "
        f"{run['loading_seconds']:.1f} s loading, {run['tokenising_seconds']:.1f} s tokenising",
        f"- Peak memory: {f'{peak / 2**20:.0f} MB' if peak else 'unknown'}, of the accelerator or "
        "else of the whole process",
    ]
    return "\n".join(lines)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns, rule, *rows))


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def with_interval(summary: Mapping[str, Any]) -> str:
    low, high = summary["accuracy_interval"]
    return f"{percent(summary['accuracy'])} ({percent(low)} to {percent(high)})"


def points(records: Sequence[Mapping[str, Any]], family: str | None) -> str:
    """One row per setting."""
    rows = []
    for record in records:
        s = record["all"] if family is None else record["families"][family]
        low, high = s["tokens_per_forward_interval"]
        size = record["program_bytes"]
        rows.append(
            [
                record["policy"],
                setting_name(record),
                with_interval(s),
                f"{s['tokens_per_forward']:.2f} ({low:.2f} to {high:.2f})",
                f"{s['nfe']:.1f}",
                f"{s['tokens_per_second']:.0f}",
                f"{s['tokens_per_cpu_second']:.0f}",
                f"{s['flops_per_token'] / 1e6:.1f}",
                f"{s['rows_per_token']:.1f}",
                " / ".join(f"{n:.1f}" for n in s["passes"].values()),
                f"{s['refreshed_rows_per_pass_and_layer']:.1f}",
                " / ".join(f"{n:.1f}" for n in s["commits"].values()),
                "" if size is None else f"{size / 2**20:.0f}",
            ]
        )
    return table(("policy", "setting", *COLUMNS), rows)


def usual(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Records at their knob's usual value (threshold 0.9, ...) or all defaults; else every one."""
    chosen = [r for r in records if r["knob"] == "policy" or USUAL.get(r["knob"]) == r["value"]]
    return chosen or list(records)


def task_table(run: Run, records: Sequence[Mapping[str, Any]]) -> str:
    names = list(run["identity"]["tasks"])
    rows = [
        [r["policy"], setting_name(r)] + [percent(r["tasks"][name]["accuracy"]) for name in names]
        for r in records
    ]
    return table(("policy", "setting", *names), rows)


def references(run: Run, record: Mapping[str, Any]) -> dict[str, Mapping[str, Any] | None]:
    """What a record is compared with, prompt by prompt."""
    records = run["records"]
    if run["identity"]["kind"] == "ablations":
        return {
            "against polestar's defaults": records.get("polestar policy=default"),
            "against fast-dllm-dual": records.get("fast-dllm-dual policy=default"),
        }
    same = KNOBS.get(record["policy"]) == "threshold"
    dual = records.get(f"fast-dllm-dual threshold={record['value']}") if same else None
    return {
        "against one token a pass": records.get("vanilla tokens_per_pass=1"),
        "against fast-dllm-dual at this threshold": dual,
    }


def pairs(run: Run) -> str:
    """Differences of accuracy on the same prompts."""
    tasks = list(run["identity"]["tasks"])
    rows: list[list[str]] = []
    columns: list[str] = []
    for record in run["records"].values():
        cells = []
        others = references(run, record)
        columns = list(others)
        for other in others.values():
            if other is None or other is record:
                cells.append("")
                continue
            mine, theirs = marks(record, tasks), marks(other, tasks)
            low, high = (100 * x for x in interval(difference, mine, theirs))
            cells.append(f"{100 * np.mean(mine - theirs):+.1f} ({low:+.1f} to {high:+.1f})")
        if any(cells):
            rows.append([record["policy"], setting_name(record), *cells])
    if not rows:
        return ""
    title = "## Accuracy on the same prompts, difference in points with its 95 % interval\n\n"
    return title + table(("policy", "setting", *columns), rows)


def gate(drift: Mapping[str, Any]) -> str:
    """Whether an open gate foretells that a prediction stays."""
    rows = []
    for entry in drift["gate"]:
        low, high = entry["confidence"]
        stable = "" if entry["stable"] is None else percent(entry["stable"])
        if entry["interval"] is not None:
            stable += " ({} to {})".format(*map(percent, entry["interval"]))
        state = "open" if entry["gate_open"] else "shut"
        rows.append([f"{low:.2f} to {high:.2f}", state, str(entry["rows"]), stable])
    text = (
        f"## Does a drift spike foretell the final token?\n\n{drift['prompts']} prompts, "
        f"{drift['policy']}: rows that were not confident enough, by whether the drift gate would "
        "have committed them early, and how often their prediction was the token committed in the "
        "end (intervals over rows).\n\n"
    )
    return text + table(("confidence", "gate", "rows", "final token predicted %"), rows)
