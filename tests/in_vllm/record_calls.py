"""Record how vLLM calls a proposer, for tests/unit/tasc_draft/test_vllm_proposer.py.

Run it in vLLM's environment: ``python tests/in_vllm/record_calls.py MODEL INDEX_FOLDER PROMPTS``. A
KV cache that is too small, prompts longer than a step, cancelled requests and two answers to one
prompt make vLLM move, remove and resume rows.
"""

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import vllm
from vllm import LLM, SamplingParams

TO = Path(__file__).parents[1] / "unit" / "tasc_draft" / "vllm_calls.json.gz"
SLOTS, TOKENS = 6, 8
BLOCKS = 8  # of 32 tokens: fewer than six rows need


def main(model: str, index: str, prompts: Path) -> None:
    llm = LLM(
        model=model,
        dtype="float32",
        max_num_seqs=SLOTS,
        max_model_len=160,
        max_num_batched_tokens=64,
        block_size=32,
        num_gpu_blocks_override=BLOCKS,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={
            "method": "custom_class",
            "model": "tasc_draft.vllm.TascProposer",
            "num_speculative_tokens": TOKENS,
        },
        additional_config={"tasc": {"index": index}},
    )
    engine = llm.llm_engine
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    proposer, calls = runner.drafter, list[Any]()
    propose = proposer.propose

    def recorded(sampled: Any, ends: Any, ids: Any, slot_mappings: Any = None) -> Any:
        n = len(sampled)
        calls.append(
            {
                "requests": list(runner.input_batch.req_ids),
                "prompts": runner.input_batch.num_prompt_tokens[:n].tolist(),
                "sampled": [list(map(int, tokens)) for tokens in sampled],
                "ends": ends[:n].tolist(),
                "ids": [ids[i, : ends[i]].tolist() for i in range(n)],
            }
        )
        return propose(sampled, ends, ids, slot_mappings)

    proposer.propose = recorded
    rows = [json.loads(line)["ids"] for line in prompts.read_text().splitlines()[:40]]
    rows[3] = (rows[3] * 9)[:100]  # read in two steps
    for i, ids in enumerate(rows):
        params = SamplingParams(
            temperature=0.8 if i == 5 else 0,
            n=2 if i == 5 else 1,
            max_tokens=8 if i % 7 == 6 else 48,
            ignore_eos=i == 8,
            seed=1,
        )
        engine.add_request(str(i), {"prompt_token_ids": ids}, params)
    steps = preempted = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
        if steps in (4, 9):
            engine.abort_request([str(steps)])
    for metric in llm.get_metrics():
        if metric.name == "vllm:num_preemptions":
            preempted = metric.value
    with gzip.open(TO, "wt", encoding="utf-8") as file:
        json.dump({"vllm": vllm.__version__, "slots": SLOTS, "calls": calls}, file)
    print(json.dumps({"calls": len(calls), "steps": steps, "preemptions": preempted}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
