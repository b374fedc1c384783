"""The part that runs the prepared model in another engine, beside ours without drafts.

vLLM answers the same rows where it is installed. Otherwise, transformers decodes with a static
cache, whose steps torch.compile records as CUDA graphs. Its tokens/s are those of full batches
without prompts, admission or ends of answers, so they are an upper limit of what it can serve.
"""

import time
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StaticCache

from benchmarks.engine.steps import CONTEXT
from benchmarks.gpu.gpu import Found, Here
from benchmarks.gpu.steps import LENGTH, batch_of, step_ms
from benchmarks.gpu.work import ANSWER, PLAIN, Work, free, model_folder, share_of_equal


def peer(found: Found, here: Here) -> None:
    if find_spec("vllm") is not None and not here.dry:
        of_vllm(found, here)
        return
    for batch in here.batches:
        work = Work.load(here, batch)
        work.target.warm_up()
        least, repeats = 1000 * work.floor, here(100, 3)
        ours = step_ms(work.target, batch_of(work.target, batch, 0, CONTEXT), repeats)
        found.figure(f"b={batch} step, ours", ours, "ms", least)
        del work
        free(here)
        theirs = compiled_ms(here, batch, repeats)
        found.figure(f"b={batch} step, transformers compiled", theirs, "ms", least)
        rates, most = [1000 * batch / ms for ms in theirs], 1000 * batch / least
        found.figure(f"b={batch} transformers compiled, full batches", rates, "tokens/s", most)


@torch.inference_mode()
def compiled_ms(here: Here, rows: int, repeats: int) -> list[float]:
    """Milliseconds of a token for each row, until the tokens are on the host."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_folder(here), dtype=getattr(torch, here.dtype)
    )
    model = model.to(here.device).eval()
    ids = torch.ones((rows, CONTEXT), dtype=torch.long, device=here.device)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    step, one, took = torch.compile(model, mode="reduce-overhead"), ids[:, :1].contiguous(), []
    for _ in range(repeats + 5):
        began = time.perf_counter()
        step(input_ids=one, past_key_values=cache).logits[:, -1].argmax(-1).tolist()
        took.append(1000 * (time.perf_counter() - began))
    return took[5:]


def of_vllm(found: Found, here: Here) -> None:
    """Answer the same rows with vLLM, with as many requests at a time as ours has rows."""
    import vllm

    work = Work.load(here, 1)
    prompts, floor = work.prompts, work.floor
    del work
    free(here)
    llm = vllm.LLM(
        str(model_folder(here)), dtype=here.dtype, max_model_len=1024,
        max_num_seqs=max(here.batches), gpu_memory_utilization=0.4, enable_prefix_caching=False,
    )  # fmt: skip
    theirs: dict[int, list[list[int]]] = {}
    for batch in here.batches:
        own, rates = prompts[: 24 * batch], list[float]()
        for repeat in range(4):
            began = time.perf_counter()
            theirs[batch] = answered(llm.llm_engine, own, batch, f"{batch}-{repeat}")
            rates.append(sum(map(len, theirs[batch])) / (time.perf_counter() - began))
        found.figure(f"b={batch} vLLM", rates[1:], "tokens/s", batch / floor)
    del llm
    for batch in here.batches:
        work = Work.load(here, batch)
        runs = [work.run(PLAIN, 24 * batch) for _ in range(4)]
        found.figure(
            f"b={batch} ours without drafts", [ran.tokens_per_second for ran in runs[1:]],
            "tokens/s", work.most(runs[-1]), same=share_of_equal(runs[-1].answers, theirs[batch]),
        )  # fmt: skip
        del work


def answered(engine: Any, prompts: list[list[int]], batch: int, run: str) -> list[list[int]]:
    """Answers of vLLM's engine, which holds ``batch`` requests at a time."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0.0, max_tokens=ANSWER)
    left, done = list(enumerate(prompts))[::-1], dict[int, list[int]]()
    while len(done) < len(prompts):
        while left and len(prompts) - len(left) - len(done) < batch:
            row, prompt = left.pop()
            engine.add_request(f"{run}-{row}", {"prompt_token_ids": prompt}, asked)
        for output in engine.step():
            if output.finished:
                done[int(output.request_id.rsplit("-", 1)[1])] = list(output.outputs[0].token_ids)
    return [done[row] for row in range(len(prompts))]
