"""The JSON schema of a run's file. All means are over prompts, all times in seconds."""

from typing import Any

COUNT = {"type": "integer", "minimum": 0}
NUMBER = {"type": "number", "minimum": 0}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
TEXT = {"type": "string"}
BYTES = {"type": ["integer", "null"]}


def fields(**properties: Any) -> dict[str, Any]:
    """An object with exactly these fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def mapping(values: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


def array(items: Any, least: int = 0, most: int | None = None) -> dict[str, Any]:
    bound = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": items, "minItems": least, **bound}


def optional(values: Any) -> dict[str, Any]:
    return {"oneOf": [{"type": "null"}, values]}


INTERVAL = array(NUMBER, 2, 2)

SUMMARY: dict[str, Any] = {
    "prompts": {"type": "integer", "minimum": 1},
    "accuracy": SHARE,
    "accuracy_interval": INTERVAL,
    "strict_accuracy": SHARE,
    "tokens_per_forward": NUMBER,
    "tokens_per_forward_interval": INTERVAL,
    "nfe": NUMBER,
    "answer_tokens": NUMBER,
    "tokens_per_second": NUMBER,
    "tokens_per_cpu_second": NUMBER,
    "flops_per_token": NUMBER,
    "rows_per_token": NUMBER,
    "passes": fields(full=NUMBER, windowed=NUMBER, cached=NUMBER, refresh=NUMBER),
    "commits": fields(confidence=NUMBER, drift=NUMBER, suffix=NUMBER, eos=NUMBER),
    "refreshed_rows": NUMBER,
    "refreshed_rows_per_pass_and_layer": NUMBER,
    "wall_seconds": NUMBER,
    "cpu_seconds": NUMBER,
}

TASK = fields(
    **SUMMARY,
    marks={"type": "string", "pattern": "^[01]+$"},  # of each prompt, in order
    digest={"type": "string", "pattern": "^[0-9a-f]{64}$"},  # of all tokens and pass counts
)

RECORD = fields(
    policy=TEXT,
    knob=TEXT,
    value={"type": ["number", "string"]},
    config={"type": "object"},
    compile_seconds=NUMBER,  # 0 where the program was there already
    program_bytes=BYTES,  # weights, state and temporaries, as the compiler plans them
    peak_bytes=BYTES,  # of the process or accelerator, since its start
    all=fields(**SUMMARY),
    families=mapping(fields(**SUMMARY)),
    tasks=mapping(TASK),
    date=TEXT,
    revision=TEXT,
)

DRIFT = fields(
    policy=TEXT,
    prompts=COUNT,
    curves=array(
        fields(
            **{"pass": COUNT},
            committed={"type": "boolean"},
            rows=COUNT,
            quartiles=array(NUMBER, 3, 3),
        )
    ),
    gate=array(
        fields(
            confidence=INTERVAL,
            gate_open={"type": "boolean"},
            rows=COUNT,
            stable=optional(SHARE),
            interval=optional(INTERVAL),
        )
    ),
)

IDENTITY = fields(
    kind={"enum": ["frontier", "ablations"]},
    model=fields(
        name=TEXT,
        fingerprint=TEXT,
        family=TEXT,
        parameters=COUNT,
        dtype=TEXT,
        layers=COUNT,
        width=COUNT,
    ),
    source={"enum": ["held-out", "parallelbench"]},
    prompts={"enum": ["compact", "chat"]},
    tasks=mapping({"type": "integer", "minimum": 1}),  # prompts of each
    seeds=array(COUNT, 1),
    gen_length=COUNT,
    block_length=COUNT,
    prompt_bucket=COUNT,
    batch_size=COUNT,
)

RUN: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A run of benchmarks.frontier or benchmarks.ablations",
    **fields(
        version={"const": 1},
        identity=IDENTITY,
        command=TEXT,
        created=TEXT,
        environment=fields(
            python=TEXT,
            platform=TEXT,
            device=TEXT,
            backend=TEXT,
            cores={"type": ["integer", "null"]},
            packages=mapping({"type": ["string", "null"]}),
        ),
        families=mapping(array(TEXT, 1)),
        loading_seconds=NUMBER,
        tokenising_seconds=NUMBER,
        drift=optional(DRIFT),
        records=mapping(RECORD),
    ),
}
