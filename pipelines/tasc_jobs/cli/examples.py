"""Examples in the help of commands, by the name of the command's function.

Each paragraph is one example, after a few words on its purpose. The help joins lines. The text is
markup, so an opening bracket is escaped. Examples of grouped commands are beside these commands.
"""

from typing import Final

_MIXTURES: Final = """\
mixed: all sources, with weights learnt on held-out rows; the default of the service.

tasc: TASC-spec, n-grams of the corpus's outputs and of the current row, at a fixed ratio.

trie: N-Gram Trie, n-grams of the current row's prompt only, the most frequent first."""

EXAMPLES: Final = {
    "ingest": """\
Two files: tasc ingest tickets train.jsonl more.parquet

Other fields: tasc ingest tickets train.jsonl --input-field question --output-field answer""",
    "build_index": """\
The whole corpus: tasc build-index tickets

A limited size: tasc build-index tickets --max-bytes 100000000""",
    "refresh": """\
Once: tasc refresh tickets

Every hour: tasc refresh tickets --every 3600""",
    "model_bigrams": """\
For the next index: tasc model-bigrams ./my-model --output bigrams.npz;
tasc build-index tickets --bigrams bigrams.npz""",
    "serve": "tasc serve --config service.yaml",
    "demo": """\
The whole workflow: tasc demo

A service on another port: tasc demo --serve --port 8001""",
    "generate": """\
A file: tasc generate tickets --input rows.jsonl --output answers.jsonl

An estimate of the time: tasc generate tickets --input rows.jsonl --output answers.jsonl --dry-run

Two engines on GPUs: tasc generate tickets --input rows/ --output answers.parquet --actors 2
--gpus 1""",
    "worker": """\
Until Ctrl-C: tasc worker --config service.yaml

Only the waiting batches of two tasks: tasc worker --once --tasks tickets,tags""",
    "doctor": """\
A model: tasc doctor ./my-model

Which weights are fastest, and what they change: tasc doctor ./my-model --compare rows.jsonl

With its adapter, as JSON: tasc doctor ./my-model --adapter ./my-lora --json""",
    "stats": """\
A corpus: tasc stats tickets

Files, without Redis: tasc stats --train train.jsonl --report statistics.html""",
    "replay": f"""\
{_MIXTURES}

Compare two: tasc replay --train train.jsonl --test test.jsonl --tokenizer ./my-model
--proposer mixed,tasc --report replay.html""",
    "tune": """\
A quick guess of costs: tasc tune tickets

Costs of this machine: tasc tune tickets --measure-cost --report tune.html

Costs of another machine: tasc tune tickets --step-cost costs.json""",
    "calibrate": """\
A task with labels: tasc calibrate tickets --rows held-out.jsonl --report calibration.html

No label below 80 %: tasc task set tickets --abstain-below 0.8""",
}
