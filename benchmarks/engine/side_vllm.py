"""vLLM on a CPU as a side: without drafts, or with those of `ngram`, `suffix` or our index.

One vLLM answers all settings of a side. It learns from the answers of earlier runs where its
drafter does, so every run needs rows that it has not answered. A run holds ``plain 8`` or
``drafted 8`` rows together by adding a request for each that ended, as `vllm.LLM.generate` does
with all of its requests. The run includes reading the prompts; prompts of earlier runs are not
cached. ``first 8`` ends each answer after its first token.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from loop import Job, Other, Ran, Run, hold, no_other, serve
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

LENGTH = 1024
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
DRAFTED = "vllm:spec_decode_num_draft_tokens"
SPECULATION: dict[str, dict[str, Any]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    "suffix": {"method": "suffix"},
    "tasc": {
        "method": "custom_class",
        "model": "tasc_draft.vllm.TascProposer",
        "num_speculative_tokens": 16,
    },
}


class Vllm:
    """A setting is ``plain``, ``drafted`` or ``first``, and the rows decoded together."""

    def __init__(self, job: Job) -> None:
        self.job, self.next_id, self.drafting = job, 0, 0.0
        drafted: dict[str, Any] = {}
        if job.drafts:
            drafted["speculative_config"] = SPECULATION[job.drafts]
        if job.drafts == "tasc":
            drafted["additional_config"] = {"tasc": {"index": job.index}}
        self.engine = LLM(
            job.folder, dtype=job.dtype, max_model_len=LENGTH, max_num_seqs=job.batch,
            disable_log_stats=False, **drafted,
        ).llm_engine  # fmt: skip
        if job.drafts:
            self.time_drafts()

    def run(self, setting: str, prompts: Sequence[list[int]]) -> Ran:
        """Step until all rows are answered."""
        hold(self.job.threads)  # for each run, because a run may start threads
        kind, batch, rows = setting.split()[0], int(setting.split()[1]), len(prompts)
        params = partial(self.params, 1 if kind == "first" else self.job.max_tokens)
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept the prompts of an earlier run in its cache")
        ran, open_ = Ran([[] for _ in range(rows)]), dict[str, tuple[int, float]]()
        accepted, drafted, self.drafting = self.total(ACCEPTED), self.total(DRAFTED), 0.0
        began, row = time.perf_counter(), 0
        while open_ or row < rows:
            while row < rows and len(open_) < batch:
                open_[self.add(prompts[row], params)] = row, time.perf_counter()
                row += 1
            ran.steps += 1
            ran.row_steps += len(open_)
            for output in self.engine.step():
                if output.finished:
                    of, added = open_.pop(output.request_id)
                    ran.answers[of] = list(output.outputs[0].token_ids)
                    ran.latency.append(time.perf_counter() - added)
        ran.seconds = time.perf_counter() - began
        ran.accepted = self.total(ACCEPTED) - accepted
        ran.drafted = self.total(DRAFTED) - drafted
        ran.draft = self.drafting if self.job.drafts else None
        if not self.job.temperature:
            ran.answers = [self.job.whole(answer) for answer in ran.answers]
        return ran

    def add(self, prompt: list[int], params: Callable[[], SamplingParams]) -> str:
        self.next_id += 1
        name = str(self.next_id)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params())
        return name

    def params(self, max_tokens: int) -> SamplingParams:
        sampled, labels = self.job.temperature > 0, self.job.labels
        return SamplingParams(
            temperature=self.job.temperature, max_tokens=max_tokens,
            seed=self.next_id if sampled else None, ignore_eos=sampled,
            structured_outputs=StructuredOutputsParams(choice=labels) if labels else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    def total(self, counter: str) -> int:
        return sum(each.value for each in self.engine.get_metrics() if each.name == counter)

    def time_drafts(self) -> None:
        """Add the time of each call of the drafter to ``drafting``."""
        executor = self.engine.engine_core.engine_core.model_executor
        drafter = executor.driver_worker.worker.model_runner.drafter
        propose = drafter.propose

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return propose(*args, **options)
            finally:
                self.drafting += time.perf_counter() - began

        drafter.propose = timed


def load(job: Job) -> tuple[Run, Other]:
    return Vllm(job).run, no_other


if __name__ == "__main__":
    serve(load)
