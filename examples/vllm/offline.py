"""vLLM in this process, with drafts: ``python offline.py MODEL INDEX_FOLDER PROMPT...``."""

import sys

from vllm import LLM, SamplingParams

SPECULATIVE = {
    "method": "custom_class",
    "model": "tasc_draft.vllm.TascProposer",
    "num_speculative_tokens": 16,
}

if __name__ == "__main__":
    model, index, *prompts = sys.argv[1:]
    tasc = {"tasc": {"index": index}}
    llm = LLM(
        model,
        max_model_len=1024,
        max_num_seqs=8,
        speculative_config=SPECULATIVE,
        additional_config=tasc,
        disable_log_stats=False,
    )
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    for answer in llm.chat(chats, SamplingParams(temperature=0, max_tokens=256)):
        print(answer.outputs[0].text)
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_accepted_tokens":
            print("accepted draft tokens:", metric.value)
