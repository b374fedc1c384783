"""vLLM answers the same with drafts as without, in every situation that moves its rows."""

import gc
import gzip
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from vllm import LLM, SamplingParams

from tasc_text import TaskTokenizer

DEMO = Path(__file__).parents[2] / "pipelines" / "tasc_jobs" / "demo"
MODEL, TASK, MOST, LENGTH = DEMO / "tasc-demo-7m", "massive_en", 12, 160
TOKENIZER = TaskTokenizer.from_folder(MODEL)
NONE = -1
BLOCK = 32  # tokens of a block of vLLM's KV cache on CPUs

Engine = Callable[..., LLM]
Answers = list[list[int]]


def rows_of(split: str, n: int) -> list[tuple[list[int], str]]:
    with gzip.open(DEMO / "data" / f"{TASK}.{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for _, line in zip(range(n), lines, strict=False)]
    render = "intent and slots: {input}\n".format
    return [(TOKENIZER.encode_prompt(render(input=r["input"])), r["output"]) for r in rows]


def write(folder: Path, rows: int) -> Path:
    data = [{"prompt": TOKENIZER.decode(ids), "output": out} for ids, out in rows_of("train", rows)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, data)))
    command = [sys.executable, "-m", "tasc_draft", "index", str(folder / "rows.jsonl")]
    subprocess.run([*command, "--model", str(MODEL), "--to", str(folder)], check=True, timeout=600)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with the task's adapter merged."""
    folder, adapter = tmp_path_factory.mktemp("merged"), DEMO / "adapters" / TASK
    copytree(MODEL, folder, dirs_exist_ok=True)
    weights = {k: v.astype(np.float32) for k, v in load_file(MODEL / "model.safetensors").items()}
    low, given = load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_config.json"
    scale = json.loads(given.read_text())["lora_alpha"] / json.loads(given.read_text())["r"]
    for name in [name for name in low if "lora_A" in name]:
        target = name.removeprefix("base_model.model.").replace("lora_A.", "")
        product = low[name.replace("lora_A", "lora_B")].astype(np.float32) @ low[name]
        weights[target] += scale * product
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, 600)


@pytest.fixture
def engine(model: Path, folder: Path) -> Iterator[Engine]:
    """Makes engines, one after the other: vLLM's state in a process belongs to one engine."""
    open_engines = list[LLM]()

    def close() -> None:
        for llm in open_engines:
            llm.llm_engine.engine_core.shutdown()
        open_engines.clear()
        gc.collect()

    def made(drafts: bool = True, **options: Any) -> LLM:
        if drafts:
            options["speculative_config"] = {
                "method": "custom_class",
                "model": "tasc_draft.vllm.TascProposer",
                "num_speculative_tokens": MOST,
            }
            options["additional_config"] = {"tasc": {"index": str(folder), "poll_s": 0.05}}
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 256, **options}
        close()
        llm = LLM(
            model=str(model),
            dtype="float32",
            max_model_len=LENGTH,
            block_size=BLOCK,
            enforce_eager=True,
            disable_log_stats=False,
            **options,
        )
        open_engines.append(llm)
        return llm

    yield made
    close()


def runner_of(llm: LLM) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


def answered(llm: LLM, prompts: Answers, ignoring: int = 0) -> Answers:
    """Greedy answers. Each ``ignoring``-th ignores ends, so that it is long."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    sampling = [sampled(i, ignoring) for i in range(len(prompts))]
    made = llm.generate(given, sampling, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in made]


def sampled(i: int, ignoring: int) -> SamplingParams:
    ignores = ignoring > 0 and i % ignoring == 0
    return SamplingParams(temperature=0, max_tokens=60, ignore_eos=ignores)


def metric(llm: LLM, name: str) -> int:
    return next(int(m.value) for m in llm.get_metrics() if m.name == f"vllm:{name}")


class Watched:
    """Checks each call of an engine's proposer against vLLM's own names of the rows."""

    def __init__(self, llm: LLM) -> None:
        self.runner = runner_of(llm)
        self.proposer = self.runner.drafter
        self.rows = defaultdict[str, set[int]](set)
        self.slots = defaultdict[str, set[int]](set)
        self.resumed = set[str]()  # requests that left the batch and came back
        self._last: list[str] = []
        self.partial = 0
        self._propose = self.proposer.propose
        self.proposer.propose = self.propose

    def propose(self, sampled: Any, ends: Any, ids: Any, slot_mappings: Any = None) -> Any:
        chains = self._propose(sampled, ends, ids, slot_mappings)
        used = [row for row in self.proposer._row_of.tolist() if row != NONE]
        assert len(used) == len(set(used))
        requests = list(self.runner.input_batch.req_ids)
        self.resumed |= {r for r in requests if r in self.rows and r not in self._last}
        self._last = requests
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


@pytest.mark.parametrize(("slots", "blocks"), [(8, 12), (64, 80)])
def test_moved_preempted_and_cancelled_rows_keep_their_drafts_apart(
    engine: Engine, slots: int, blocks: int
) -> None:
    """The KV cache is too small for all rows, and prompts are read in parts."""
    prompts = [prompt for prompt, _ in rows_of("test", 2 * slots)]
    prompts[3] = (prompts[3] * 12)[:100]
    expected = answered(engine(drafts=False), prompts, 2)
    llm = engine(
        max_num_seqs=slots,
        num_gpu_blocks_override=blocks,
        max_num_batched_tokens=slots * (MOST + 1),
        long_prefill_token_threshold=64,
    )
    watched, core = Watched(llm), llm.llm_engine
    for i, prompt in enumerate(prompts):
        core.add_request(str(i), {"prompt_token_ids": prompt}, sampled(i, 2))
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
    assert watched.resumed
    # A row keeps its text while it is in the batch. One that was preempted is begun anew if it had
    # just ended, since some requests ignore ends, or if too many others wait, too.
    begun_anew = {request for request, rows in watched.rows.items() if len(rows) > 1}
    assert begun_anew < watched.resumed
    assert any(len(slots) > 1 for slots in watched.slots.values())
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
    expected = answered(engine(drafts=False), prompts, 1)
    llm = engine()
    watched = Watched(llm)
    assert answered(llm, prompts, 1) == expected
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
    made = llm.generate(prompts, sampling, use_tqdm=False)
    assert all(len(each.outputs) == 3 for each in made)
    assert metric(llm, "spec_decode_num_accepted_tokens") > 0
    assert runner_of(llm).drafter._faults == 0


def test_damaged_index_stops_vllm_with_a_clear_error(engine: Engine, folder: Path) -> None:
    data = (folder / "index.tasc").read_bytes()
    (folder / "index.tasc").write_bytes(data[:-100] + bytes(100))
    with pytest.raises(RuntimeError, match="is damaged"):
        engine()
