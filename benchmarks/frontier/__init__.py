"""Speed against quality: every policy over its main knob, on tasks with known answers.

    python -m benchmarks.frontier --model embedded|DIR [--policies ...] [--tasks ...] [--limit N]

Data flows one way: `workload` (rows, prompts) and `settings` (policies) -> `measure` with
`programs` (compiled once per policy), `cost` and `intervals` -> `store` (one JSON file per run,
rewritten after every setting) -> `report` (Markdown) and `plots`.
"""
