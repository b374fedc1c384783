"""vLLM answers the same with drafts as without, in every situation that moves its rows."""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.lora.request import LoRARequest

from tasc_draft import Tokens, build_learnt_index, write_index
from tasc_draft.mixture.row_state import NONE
from tasc_text import TaskTokenizer
from vllm import LLM, SamplingParams

DEMO = Path(__file__).parents[2] / "pipelines" / "tasc_jobs" / "demo"
MODEL, TASK, MOST, LENGTH = DEMO / "tasc-demo-7m", "massive_en", 12, 160
TOKENIZER = TaskTokenizer.from_folder(MODEL)
ADAPTER = LoRARequest(TASK, 1, str(DEMO / "adapters" / TASK))
BLOCK = 32  # tokens of a block of vLLM's KV cache on CPUs

Engine = Callable[..., LLM]


def rows_of(split: str, n: int) -> list[tuple[list[int], str]]:
    with gzip.open(DEMO / "data" / f"{TASK}.{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for _, line in zip(range(n), lines, strict=False)]
    render = "intent and slots: {input}\n".format
    return [(TOKENIZER.encode_prompt(render(input=r["input"])), r["output"]) for r in rows]


def write(folder: Path, rows: int) -> Path:
    data = rows_of("train", rows)
    outputs = Tokens.of(TOKENIZER.encode_outputs([output for _, output in data]))
    prompts = Tokens.of([prompt for prompt, _ in data])
    write_index(
        build_learnt_index(outputs, prompts, **TOKENIZER.index_facts), folder / "index.tasc"
    )
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, 600)


@pytest.fixture
def engine(folder: Path) -> Engine:
    def made(drafts: bool = True, **options: Any) -> LLM:
        if drafts:
            options["speculative_config"] = {
                "method": "custom_class",
                "model": "tasc_draft.vllm.TascProposer",
                "num_speculative_tokens": MOST,
            }
            options["additional_config"] = {"tasc": {"index": str(folder), "poll_s": 0.05}}
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 256, **options}
        return LLM(
            model=str(MODEL),
            dtype="float32",
            max_model_len=LENGTH,
            block_size=BLOCK,
            enforce_eager=True,
            enable_lora=True,
            max_lora_rank=16,
            disable_log_stats=False,
            **options,
        )

    return made


def runner_of(llm: LLM) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


def answered(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=60, **params)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    made = llm.generate(given, sampling, use_tqdm=False, lora_request=ADAPTER)
    return [list(each.outputs[0].token_ids) for each in made]


def metric(llm: LLM, name: str) -> int:
    return next(int(m.value) for m in llm.get_metrics() if m.name == f"vllm:{name}")


class Watched:
    """Checks each call of an engine's proposer against vLLM's own names of the rows."""

    def __init__(self, llm: LLM) -> None:
        self.runner = runner_of(llm)
        self.proposer = self.runner.drafter
        self.rows = defaultdict[str, set[int]](set)
        self.slots = defaultdict[str, set[int]](set)
        self.partial = 0
        self._propose = self.proposer.propose
        self.proposer.propose = self.propose

    def propose(self, sampled: Any, ends: Any, ids: Any, slot_mappings: Any = None) -> Any:
        chains = self._propose(sampled, ends, ids, slot_mappings)
        used = [row for row in self.proposer._row_of.tolist() if row != NONE]
        assert len(used) == len(set(used))
        requests = list(self.runner.input_batch.req_ids)
        for i, (request, new, chain) in enumerate(zip(requests, sampled, chains, strict=True)):
            self.slots[request].add(i)
            assert len(chain) <= MOST
            assert all(0 <= token < TOKENIZER.vocab_size for token in chain)
            if not new:
                self.partial += 1
                assert chain == []
                continue
            row = int(self.proposer._row_of[i])
            self.rows[request].add(row)
            length = int(self.proposer._rows[row]["length"])
            assert ends[i] - len(new) < length <= ends[i]
            assert np.array_equal(self.proposer._texts[row, :length], ids[i, :length])
        return chains


def test_greedy_answers_with_drafts_equal_those_without(engine: Engine) -> None:
    prompts = [prompt for prompt, _ in rows_of("test", 96)]
    expected = answered(engine(drafts=False), prompts)
    llm = engine()
    assert answered(llm, prompts) == expected
    # The control: drafts were made, and most were right.
    accepted = metric(llm, "spec_decode_num_accepted_tokens")
    assert accepted > 0.4 * sum(map(len, expected))


@pytest.mark.parametrize("slots", [8, 64])
def test_moved_preempted_and_cancelled_rows_keep_their_drafts_apart(
    engine: Engine, slots: int
) -> None:
    """The KV cache is too small for all rows, and prompts are read in parts."""
    prompts = [prompt for prompt, _ in rows_of("test", 2 * slots)]
    prompts[3] = (prompts[3] * 12)[:100]
    expected = answered(engine(drafts=False), prompts)
    blocks = slots + slots // 4
    llm = engine(
        max_num_seqs=slots, num_gpu_blocks_override=blocks, max_num_batched_tokens=max(64, slots)
    )
    watched, core = Watched(llm), llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=60)
    for i, prompt in enumerate(prompts):
        core.add_request(str(i), {"prompt_token_ids": prompt}, sampling, lora_request=ADAPTER)
    found, steps = dict[int, list[int]](), 0
    while core.has_unfinished_requests():
        for each in core.step():
            if each.finished:
                found[int(each.request_id)] = list(each.outputs[0].token_ids)
        steps += 1
        if steps in (3, 6):
            core.abort_request([str(steps)])
            found.pop(steps, None)
    for i, tokens in found.items():
        assert tokens == expected[i], i
    assert len(found) >= len(prompts) - 2
    assert all(len(rows) == 1 for rows in watched.rows.values())
    assert sum(len(slots) > 1 for slots in watched.slots.values()) > 3
    assert watched.partial > 0
    assert metric(llm, "num_preemptions") > 0
    assert watched.proposer._faults == 0


def test_new_index_is_taken_over_while_rows_run(engine: Engine, folder: Path) -> None:
    prompts = [prompt for prompt, _ in rows_of("test", 64)]
    expected = answered(engine(drafts=False), prompts)
    llm = engine()
    proposer = runner_of(llm).drafter
    before, propose, calls = proposer.index, proposer.propose, 0

    def swapping(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            write(folder, 300)
            while proposer._next is None:
                proposer._closed.wait(0.01)
        return propose(*args, **named)

    proposer.propose = swapping
    assert answered(llm, prompts) == expected
    assert proposer.index is not before
    assert proposer._faults == 0


def test_rows_near_the_longest_length_end_as_without_drafts(engine: Engine) -> None:
    """vLLM makes no drafts in a step with such a row, and the other rows catch up."""
    prompts = [prompt for prompt, _ in rows_of("test", 16)]
    prompts[::4] = [(prompt * 12)[: LENGTH - 30] for prompt in prompts[::4]]
    expected = answered(engine(drafts=False), prompts, ignore_eos=True)
    llm = engine()
    watched = Watched(llm)
    assert answered(llm, prompts, ignore_eos=True) == expected
    assert watched.proposer._faults == 0


def test_fault_in_drafting_changes_no_answer(engine: Engine) -> None:
    prompts = [prompt for prompt, _ in rows_of("test", 12)]
    expected = answered(engine(drafts=False), prompts)
    llm = engine()
    proposer = runner_of(llm).drafter

    def fail(*args: Any) -> Any:
        raise RuntimeError("broken")

    proposer._propose = fail
    assert answered(llm, prompts) == expected
    assert proposer._faults == 3


def test_sampled_answers_come_with_drafts(engine: Engine) -> None:
    llm = engine()
    sampling = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=40)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in rows_of("test", 8)]
    made = llm.generate(prompts, sampling, use_tqdm=False, lora_request=ADAPTER)
    assert all(len(each.outputs) == 3 for each in made)
    assert metric(llm, "spec_decode_num_accepted_tokens") > 0
    assert runner_of(llm).drafter._faults == 0


def test_index_of_another_tokenizer_stops_vllm_with_a_clear_error(
    engine: Engine, folder: Path
) -> None:
    other = build_learnt_index(
        Tokens.of([[1, 2]] * 4),
        Tokens.of([[3]] * 4),
        **{**TOKENIZER.index_facts, "fingerprint": "another"},
    )
    write_index(other, folder / "index.tasc")
    with pytest.raises(RuntimeError, match="was built with tokenizer another"):
        engine()
