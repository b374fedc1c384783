"""Ray Serve's own deployment of vLLM, with drafts: ``python ray_serve.py MODEL INDEX_FOLDER``.

Needs ``ray[serve,llm]``. Each node needs the folder, or use {"task": ..., "redis_url": ...}.
"""

import sys

from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

if __name__ == "__main__":
    model, index = sys.argv[1:]
    config = LLMConfig(
        model_loading_config={"model_id": "my-task", "model_source": model},
        engine_kwargs={
            "max_model_len": 1024,
            "speculative_config": {
                "method": "custom_class",
                "model": "tasc_draft.vllm.TascProposer",
                "num_speculative_tokens": 16,
            },
            "additional_config": {"tasc": {"index": index}},
        },
    )
    serve.run(build_openai_app({"llm_configs": [config]}), blocking=True)
