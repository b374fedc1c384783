"""Rounds of rows that no side has answered before: vLLM, other engines, and ours.

A drafter that learns from answers would recite rows that it has answered. So every run of a side
has rows of its own, the same for all sides of a round. Before the first round each side answers as
many other rows, which are not timed: that fills the caches of `suffix` and of our drafter alike.
The models are those of `smollm2`. Rows are the unseen ones of the test split: none has an input of
the train split, and none occurs twice.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import (
    Figure,
    about,
    digits,
    processor,
    read_rows,
    show_figures,
    show_table,
    versions,
)
from benchmarks.engine.equal import TOLERANCE, Equality, compare
from benchmarks.engine.loop import Job
from benchmarks.engine.report import (
    Options,
    cells,
    equality_record,
    setting_record,
    show_equality,
    speeds,
)
from benchmarks.engine.run import margins
from benchmarks.engine.sides import (
    PACKAGES,
    Measured,
    Side,
    SideFailed,
    in_fresh_turn,
    kind_of,
    started,
    started_of,
    variant_of,
    version_of,
)
from benchmarks.engine.smollm2 import LABELLED, index_of, labelled, model_of, train_file
from benchmarks.engine.steps import Ceiling, ceiling
from tasc_runtime.errors import FileError
from tasc_runtime.models import chat_template, trained_prompt
from tasc_runtime.progress import note, show_progress
from tasc_text import TaskTokenizer

MOST = "first tokens alone / vllm"  # drafts cannot gain more
# The weights of peers that are named by them, and of those that have one kind only.
INT8 = {"ours-int8": "int8-dynamic", "openvino-int8": "int8", "ctranslate2-int8": "int8"}
INT8 |= {"onnx-genai": "int8", "llama-cpp": "q8_0"}
KINDS = {"vllm": ("first", "plain"), "ours": ("plain", "drafted"), "openvino": ("plain", "lookup")}
ENGINES = ("ours", "ours-int8")
NEAR = 1e-4  # in float32; vLLM and transformers add in different orders
DRAFT_US = {8: 250.0, 32: 500.0, 64: 800.0}  # required, by rows decoded together


@dataclass(frozen=True)
class Case:
    """Rows, and the model and the index that answer them.

    Attributes:
        rows: The task of the rows and of the index.
        over_plain: The required ratio of our drafts over no drafts, by rows decoded together.
        over_peer: The required ratio of our drafts in vLLM over the better of vLLM's own, at 8
            rows.
        engine_over_peer: That of our engine's drafts over the best setting of all other engines, at
            8 rows.
        engine_over_plain: That of our engine's drafts over no drafts with int8, by rows decoded
            together.
    """

    rows: str
    model: Path
    max_tokens: int
    over_plain: Mapping[int, float]
    over_peer: float | None = None
    engine_over_peer: float | None = None
    engine_over_plain: Mapping[int, float] = field(default_factory=dict)
    labels: bool = False
    temperature: float = 0.0


UNPREDICTED = {1: 0.97, 8: 0.97, 32: 0.97}
CASES = {
    "massive_en": Case(
        "massive_en",
        model_of("massive_en"),
        256,
        {1: 2.3, 8: 2.8, 32: 1.5},
        over_peer=2.0,
        engine_over_peer=3.0,
        engine_over_plain={1: 5.0, 8: 2.5},
    ),
    "pos_ewt": Case(
        "pos_ewt", model_of("pos_ewt"), 256, {8: 1.6}, over_peer=1.4, engine_over_peer=1.6
    ),
    # The base's free text on the inputs: the index has no answers of that kind.
    "unpredicted": Case("massive_en", model_of(LABELLED), 48, UNPREDICTED),
    # The same, sampled: not even earlier text of the answer predicts it.
    "sampled": Case("massive_en", model_of(LABELLED), 48, UNPREDICTED, temperature=1.0),
    "choices": Case(LABELLED, model_of(LABELLED), 32, {1: 0.98, 8: 0.98, 32: 0.98}, labels=True),
}


@dataclass(frozen=True)
class Fresh:
    """All measurements of one case.

    Attributes:
        equal: For each drafted setting of vLLM, the comparison with vLLM without drafts; empty for
            sampled answers.
        left_out: Why each peer that was named was not measured.
        judged: Whether the comparisons have margins; there are none under a guide.
    """

    name: str
    measured: tuple[Measured, ...]
    ceiling: Ceiling
    equal: Mapping[str, Equality]
    judged: bool
    left_out: Mapping[str, str] = field(default_factory=dict)

    def of(self, side: str, batch: int, kind: str = "") -> Measured | None:
        """A side's drafted setting unless another is named; the plain one of ``vllm``."""
        setting = f"{kind or ('plain' if side == 'vllm' else 'drafted')} {batch}"
        found = (m for m in self.measured if (m.side, m.setting) == (side, setting))
        return next(found, None)


def fresh(options: Options) -> dict[str, Any]:
    """Measure all cases; tables are printed on the way."""
    every, found = list[Figure](), list[Fresh]()
    for name in options.tasks:
        with TemporaryDirectory(prefix="engine-bench-") as folder:
            found.append(one_case(name, options, Path(folder)))
        show(found[-1])
        every += figures(found[-1], options.sequences)
    show_figures(every)
    return record(options, found, every)


def one_case(name: str, options: Options, folder: Path) -> Fresh:
    case = CASES[name]
    job, blocks = job_of(case, options), blocks_of(options.rows, options.repeats, options.sequences)
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=dtype)
    top = ceiling(model, dtype, options.threads)
    del model
    with ExitStack() as stack:
        note(f"{name}: loading {', '.join(options.peers)}")
        begin = {peer: partial(start, peer, job, options, folder, stack) for peer in options.peers}
        sides, left_out = started_of(begin)
        for side in sides:
            side.run(side.settings[-1], range(options.rows))
        with show_progress(
            name, sum(len(s.settings) for s in sides) * options.repeats, "runs"
        ) as bar:
            measured = in_fresh_turn(sides, blocks, bar.advance)
    found = Fresh(name, tuple(measured), top, {}, not case.labels, left_out)
    return found if case.temperature else replace(found, equal=equality(found, job, blocks, folder))


def start(peer: str, job: Job, options: Options, folder: Path, stack: ExitStack) -> Side:
    """Start a side.

    Raises:
        SideFailed: It is not installed or does not load, or lacks guides or sampling, which only
            that of vLLM has.
    """
    engine, variant = kind_of(peer), variant_of(peer)
    if engine != "vllm" and (job.labels or job.temperature):
        raise SideFailed(f"{peer} has neither guides nor sampling")
    kinds = ("drafted",) if engine == "vllm" and variant else KINDS.get(engine, ("plain",))
    settings = [f"{kind} {batch}" for batch in options.sequences for kind in kinds]
    own = replace(job, drafts=variant) if engine == "vllm" else job
    if peer in INT8:
        own = replace(own, quantization=INT8[peer])
    return started(peer, own, settings, folder, stack)


def blocks_of(rows: int, repeats: int, sequences: Sequence[int]) -> dict[int, list[range]]:
    """The rows of each repeat, by rows decoded together; rows before them are for warming up."""
    begins = count(rows, rows)
    return {
        batch: [range(begin, begin + rows) for begin in islice(begins, repeats)]
        for batch in sequences
    }


def job_of(case: Case, options: Options) -> Job:
    """The unseen rows of a case that all blocks need.

    Raises:
        FileError: There are fewer rows, or the models have not been made.
    """
    if not (case.model.is_dir() and index_of(case.rows).is_dir()):
        raise FileError(f"{case.model} or {index_of(case.rows)} is missing; `make bench-model`")
    assert options.data is not None, "the command line names it"
    train = read_rows(train_file(case.rows, options.data))
    test = read_rows(train_file(case.rows, options.data).with_name("test.jsonl.gz"))
    seen = {row["input"] for row in train}
    unseen = list(dict.fromkeys(row["input"] for row in test if row["input"] not in seen))
    need = options.rows * (1 + options.repeats * len(options.sequences))
    if need > len(unseen):
        raise FileError(
            f"{case.rows} has {len(unseen)} unseen rows, {need} are needed; lower --rows, "
            "--repeats or the number of --sequences"
        )
    tokenizer = TaskTokenizer.from_folder(case.model)
    template = trained_prompt(case.model) or chat_template(case.model)
    return Job(
        folder=str(case.model),
        task=case.rows,
        prompts=[list(map(int, p)) for p in template.encode_rows(tokenizer, unseen[:need])],
        max_tokens=case.max_tokens,
        eos=list(tokenizer.eos_ids),
        threads=options.threads,
        dtype=options.dtype,
        batch=max(options.sequences),
        index=str(index_of(case.rows)),
        labels=sorted({labelled(row["output"]) for row in train}) if case.labels else [],
        temperature=case.temperature,
        quantization=options.quantization or "",
    )


def equality(
    found: Fresh, job: Job, blocks: Mapping[int, Sequence[range]], folder: Path
) -> dict[str, Equality]:
    """Compare the drafted answers of vLLM with its plain ones, over all rounds."""
    limit = NEAR if job.dtype == "float32" else TOLERANCE
    judge = (
        partial(margins, job, folder) if found.judged else lambda prefixes: [0.0] * len(prefixes)
    )
    compared = {}
    for batch, own in blocks.items():
        plain = found.of("vllm", batch)
        prompts = [job.prompts[row] for row in chain(*own)]
        for one in found.measured:
            if plain is None or one is plain or not one.side.startswith("vllm-"):
                continue
            if one.setting == f"drafted {batch}":
                pair = answers(one), answers(plain)
                compared[one.name] = compare(*pair, prompts, judge, limit)
    return compared


def answers(measured: Measured) -> list[list[int]]:
    return [answer for ran in measured.runs for answer in ran.answers]


# Figures and tables


def figures(found: Fresh, sequences: Sequence[int]) -> list[Figure]:
    """Ratios of our engine, and of our drafts in vLLM; none where a side is missing."""
    case, made = CASES[found.name], list[Figure]()
    for batch in sequences:
        made += of_engine(found, case, batch)
        ours, plain = found.of("vllm-tasc", batch), found.of("vllm", batch)
        if ours is None:
            continue
        if plain is not None:
            made.append(ratio(found, "vllm", ours, plain, case.over_plain.get(batch)))
        if plain is not None and (first := found.of("vllm", batch, "first")):
            most = [a.seconds / b.seconds for a, b in zip(plain.runs, first.runs, strict=True)]
            made.append(Figure.of_runs(f"{found.name}: {MOST}, b={batch}", most, "x"))
        own = (found.of(f"vllm-{kind}", batch) for kind in ("ngram", "suffix"))
        peers = [peer for peer in own if peer is not None]
        if peers:
            best = max(peers, key=lambda peer: median(speeds(peer)))
            bar = case.over_peer if batch == 8 else None
            made.append(ratio(found, best.side, ours, best, bar))
        micros = [1e6 * (ran.draft or 0.0) / ran.steps for ran in ours.runs]
        name = f"{found.name}: drafting a step, b={batch}"
        made.append(Figure.of_runs(name, micros, "us", DRAFT_US.get(batch), upwards=False))
    return made


def of_engine(found: Fresh, case: Case, batch: int) -> list[Figure]:
    """Ratios of our engine over itself without drafts, and over the best setting of the others."""
    at_once = [one for one in found.measured if one.setting.endswith(f" {batch}")]
    peers = [
        one
        for one in at_once
        if one.side not in (*ENGINES, "vllm-tasc") and not one.setting.startswith("first")
    ]
    plain_peers, made = [one for one in peers if one.setting.startswith("plain")], list[Figure]()
    for name in ENGINES:
        drafted, plain = (found.of(name, batch, kind) for kind in ("drafted", "plain"))
        if drafted is None or plain is None:
            continue
        bar = case.engine_over_plain.get(batch) if name == "ours-int8" else None
        made.append(ratio(found, f"{name} plain", drafted, plain, bar))
        if plain_peers:
            best = max(plain_peers, key=lambda peer: median(speeds(peer)))
            made.append(ratio(found, best.name, plain, best, 1.05))
        if peers:
            best = max(peers, key=lambda peer: median(speeds(peer)))
            bar = case.engine_over_peer if batch == 8 else None
            made.append(ratio(found, best.name, drafted, best, bar))
    return made


def ratio(found: Fresh, over: str, ours: Measured, other: Measured, bar: float | None) -> Figure:
    kind, batch = ours.setting.split()
    name = ours.side if ours.side == "vllm-tasc" else f"{ours.side} {kind}"
    ratios = [a / b for a, b in zip(speeds(ours), speeds(other), strict=True)]
    return Figure.of_runs(f"{found.name}: {name} / {over}, b={batch}", ratios, "x", bar)


def show(found: Fresh) -> None:
    """All settings of a case, the ceiling of plain steps, and the comparisons of answers."""
    headings = ("", "tokens/s", "least", "greatest", "step ms", "tokens/step", "drafted/step",
                "us/step to draft", "p50 ms", "p99 ms", "peak MB")  # fmt: skip
    rows: list[list[str] | None] = []
    for one in found.measured:
        speed, least, greatest, step, efficiency, *_, p50, p99, _first, memory = cells(one)
        drafting = [1e6 * ran.draft / ran.steps for ran in one.runs if ran.draft is not None]
        first = one.runs[0]
        verified = first.drafted / first.row_steps if first.row_steps else None
        shown = (speed, least, greatest, step, efficiency, verified)
        late = (median(drafting) if drafting else None, p50, p99, memory)
        rows.append([one.name, *map(digits, shown), *map(digits, late)])
    rows.append(None)
    for batch in sorted({int(one.setting.split()[1]) for one in found.measured}):
        top = replace(found.ceiling, batch=batch)
        name, least_ms = f"ceiling, plain b={batch}", digits(1000 * top.step_seconds)
        rows.append([name, digits(top.tokens_per_second), "", "", least_ms])
    show_table(f"{found.name}, {processor()}: {len(found.measured[0].runs)} runs", headings, rows)
    for reason in found.left_out.values():
        print(reason)
    for name, equal in found.equal.items():
        if found.judged:
            show_equality(f"{name} against vllm", equal)
        else:
            print(f"{name} against vllm: {equal.identical:.4f} of {equal.rows} rows equal")


def record(options: Options, found: Sequence[Fresh], every: Sequence[Figure]) -> dict[str, Any]:
    """The object of the last line."""
    return {
        "benchmark": "engine",
        "model": "SmolLM2-135M-Instruct",
        "rows": options.rows,
        "repeats": options.repeats,
        "sequences": list(options.sequences),
        "figures": [figure.record for figure in every],
        "tasks": {
            one.name: {
                "settings": {m.name: setting_record(m) for m in one.measured},
                "ceiling": asdict(one.ceiling),
                "equal": {name: equality_record(equal) for name, equal in one.equal.items()},
                "left_out": dict(one.left_out),
            }
            for one in found
        },
        "versions": versions("torch", "transformers", "numpy", "numba")
        | {kind: version_of(kind) for kind in PACKAGES},
        "threads": options.threads,
        "dtype": options.dtype,
        "quantization": options.quantization,
        **about(),
    }
