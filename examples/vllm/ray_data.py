"""Batch inference by Ray Data and vLLM, with drafts.

``python ray_data.py MODEL INDEX_FOLDER ROWS.jsonl ANSWERS_FOLDER`` reads rows with ``input``. Needs
``ray[data,llm]``.
"""

import sys
from typing import Any

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig


def asked(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": row["input"]}],
        "sampling_params": {"temperature": 0, "max_tokens": 256},
    }


def answered(row: dict[str, Any]) -> dict[str, Any]:
    return {"input": row["input"], "output": row["generated_text"]}


if __name__ == "__main__":
    model, index, rows, answers = sys.argv[1:]
    config = vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={
            "max_model_len": 1024,
            "speculative_config": {
                "method": "custom_class",
                "model": "tasc_draft.vllm.TascProposer",
                "num_speculative_tokens": 16,
            },
            "additional_config": {"tasc": {"index": index}},
        },
        batch_size=64,
        concurrency=1,
    )
    process = build_processor(config, preprocess=asked, postprocess=answered)
    process(ray.data.read_json(rows)).write_json(answers)
