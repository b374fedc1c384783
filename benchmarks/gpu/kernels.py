"""Compile all Triton kernels of the engine ahead, without a GPU, and tell what each one needs.

    benchmarks/gpu/kernels.py             # print the table and one JSON object
    benchmarks/gpu/kernels.py --write     # write the table to docs/reference/gpu-kernels.md, too

The engine itself launches the kernels: models of common shapes run their steps on the meta device,
where tensors have shapes, data types and addresses but no memory. Triton compiles each launch for
each card, as it would on the card, and nothing is run. So the specialisations are those of the
code that launches the kernels. Needs Triton, without TRITON_INTERPRET.
"""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch
import triton
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import tasc_engine.kernels.gpu
import tasc_engine.model
from benchmarks.common import ROOT, add_json, parser_of, versions
from tasc_draft import Drafts
from tasc_engine import Sampling
from tasc_engine.config import EngineConfig
from tasc_engine.kernels.gpu import sampling
from tasc_engine.kv.cache import RowCache, attention_layers, on_device
from tasc_engine.layout import ForwardBatch, chains, lay_out, plain_batch
from tasc_engine.lora.adapter_files import Adapter
from tasc_engine.lora.adapters import Adapters
from tasc_engine.lora.low_rank import LowRank
from tasc_engine.model.cuda_graphs import Work
from tasc_engine.model.decoder import lean
from tasc_engine.model.target import graphs_of, logits_of_graphs, through_modules
from tasc_engine.sampling import gpu_sampler
from tasc_engine.sampling.sampler import Sampler

PAGE = ROOT / "docs" / "reference" / "gpu-kernels.md"
# By compute capability: a card of that kind, and the shared memory of a block in bytes (NVIDIA,
# CUDA C++ Programming Guide, technical specifications per compute capability).
CARDS = {
    80: ("A100", 163 << 10),
    86: ("RTX 3090", 99 << 10),
    89: ("L4, RTX 4090", 99 << 10),
    90: ("H100, H200", 227 << 10),
    100: ("B200", 227 << 10),
}
META = torch.device("meta")
_DEMO = ROOT / "pipelines" / "tasc_jobs" / "demo" / "tasc-demo-7m"
_LAYERS = {"num_hidden_layers": 2}
_ROWS = (1, 8, 32)
_VOCABULARIES = (151_936, 50_257)  # of Qwen2.5 and GPT-2; only the first is a multiple of 16
_RANKS = (16, 16, 64)  # of adapters
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


def _models() -> dict[str, tuple[Any, Sequence[torch.dtype], Sequence[int]]]:
    """Settings of models (layers are alike, so two are enough), data types, ranks of adapters."""
    half, single = (torch.bfloat16,), (torch.bfloat16, torch.float32)
    every = (torch.bfloat16, torch.float16, torch.float32)
    return {
        "tasc-demo-7m": (AutoConfig.from_pretrained(_DEMO, **_LAYERS), every, _RANKS[:2]),
        "Qwen2.5-0.5B": (
            Qwen2Config(
                hidden_size=896, intermediate_size=4864, num_attention_heads=14,
                num_key_value_heads=2, tie_word_embeddings=True, **_LAYERS,
            ), every, _RANKS,
        ),
        "Qwen3-0.6B": (
            Qwen3Config(
                hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
                num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, **_LAYERS,
            ), single, _RANKS,
        ),
        "Mistral-7B": (
            MistralConfig(
                hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                num_key_value_heads=8, sliding_window=4096, **_LAYERS,
            ), half, _RANKS,
        ),
        "Gemma-2-2B": (
            Gemma2Config(
                hidden_size=2304, intermediate_size=9216, num_attention_heads=8,
                num_key_value_heads=4, head_dim=256, query_pre_attn_scalar=256, **_LAYERS,
            ), half, _RANKS,
        ),
    }  # fmt: skip


@dataclass
class Launched:
    """A specialisation of a kernel, and what it needs on each card.

    Attributes:
        kernel, module: The kernel's name and where it is.
        specialisation: See `specialisation`.
        dtype: The data type of the first run that launches it.
        runs: The names of the runs that launch it.
        warps: Number of warps of a program.
        registers, stack, shared: By compute capability: registers of a thread, bytes of its stack,
            which has what does not fit the registers, and bytes of shared memory of a program.
    """

    kernel: str
    module: str
    specialisation: str
    dtype: str
    warps: int
    runs: list[str] = field(default_factory=list)
    registers: dict[int, int] = field(default_factory=dict)
    stack: dict[int, int] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)


class Card:
    """Triton's driver of a card that is not there."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


class _Once:
    """Runs a graph's work once, where `CudaGraphs` would capture it."""

    def record(self, run: Work) -> Work:
        run()
        return run

    def wait(self) -> None:
        """Nothing runs."""


@dataclass(frozen=True)
class Run:
    """A function that launches kernels on meta tensors, and the data type of most of them."""

    dtype: str
    launch: Callable[[], None]


@torch.inference_mode()
def steps(config: Any, dtype: torch.dtype, rows: int, ranks: Sequence[int]) -> None:
    """Launches the kernels of a model's steps: prompts, drafts, and graphs of all buckets.

    Args:
        ranks: The rank of each adapter, which changes all linear layers.
    """
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    settings = EngineConfig(rows=rows)
    longest, chunk = settings.max_model_len, settings.prefill_chunk
    cache = RowCache(attention_layers(model), rows * longest, None, longest)
    adapters = Adapters(model, [_adapter(model, rank) for rank in ranks])
    decoder = lean(model, longest, adapters)
    forward = decoder or through_modules(model, cache, adapters)

    def step(batch: ForwardBatch) -> None:
        layout = lay_out(batch)
        device = on_device(layout, META)
        cache.begin(layout, device)
        forward(device.ids, device.logits_indices, cache)

    for many in range(1, rows + 1):
        step(plain_batch([longest * row for row in range(many)], 0, np.zeros(chunk, np.int32)))
    if decoder is not None:
        logits = logits_of_graphs(decoder, settings)
        graphs = graphs_of(decoder, settings, cache, logits, _Once())
        graphs.warm_up(adapters=bool(ranks))
        return
    for drafted, number in product((0, 8, settings.max_draft_tokens), {0, len(ranks)}):
        batch = plain_batch([longest * row for row in range(rows)], chunk, np.zeros(1, np.int32))
        drafts = chains(np.zeros((rows, drafted), np.int32))
        step(replace(batch, drafts=drafts, adapters=np.full(rows, number, np.int32)))


@torch.inference_mode()
def rules(dtype: torch.dtype, vocab_size: int) -> None:
    """Launches the kernels that choose and score tokens by sampling rules."""
    rows, sampler = np.arange(8, dtype=np.int32), Sampler(8, 64, vocab_size)
    for row in rows.tolist():
        sampler.start(row, rows, Sampling(temperature=1, repetition_penalty=2))
    logits = torch.empty((8, vocab_size), dtype=dtype, device=META)
    inputs = gpu_sampler.inputs_of(rows, Drafts.empty(8), None, sampler.rules, vocab_size)
    moved, tokens = gpu_sampler.on_device(inputs, META), torch.empty(8, dtype=torch.int64)
    sampling.choose(logits, moved, tokens.to(META))
    sampling.score(logits, moved, 5)


def _adapter(model: Any, rank: int) -> Adapter:
    def low_rank(layer: torch.nn.Linear) -> LowRank:
        shapes = (rank, layer.in_features), (layer.out_features, rank)
        down, up = (torch.empty(shape, device=META) for shape in shapes)
        return LowRank(down, up, 1.0)

    named = model.named_modules()
    linears = {name: layer for name, layer in named if name.endswith("_proj")}
    return Adapter(f"rank {rank}", {name: low_rank(layer) for name, layer in linears.items()})


def runs() -> Mapping[str, Run]:
    """The runs by name. Together they must launch all kernels; see `never_launched`."""
    found = dict[str, Run]()
    for name, (config, dtypes, ranks) in _models().items():
        for dtype in dtypes:
            kind = str(dtype).removeprefix("torch.")
            for rows in _ROWS:
                launch = partial(steps, config, dtype, rows, ranks)
                found[f"{name}, {kind}, {rows} rows"] = Run(kind, launch)
    for vocab_size, dtype in product(_VOCABULARIES, (torch.bfloat16, torch.float16, torch.float32)):
        kind = str(dtype).removeprefix("torch.")
        launch = partial(rules, dtype, vocab_size)
        found[f"sampling from {vocab_size} tokens, {kind}"] = Run(kind, launch)
    return found


def compiled(cards: Iterable[int] = CARDS) -> list[Launched]:
    """Compiles all launches of `runs` for cards, given by their compute capability.

    Raises:
        RuntimeError: A run launches another specialisation for one card than for another.
    """
    cards, found = tuple(cards), dict[str, Launched]()
    for card in cards:
        for name, run in runs().items():
            with _compiling(card, name, run, found):
                run.launch()
    if partly := [each.kernel for each in found.values() if len(each.registers) < len(cards)]:
        raise RuntimeError(f"{', '.join(partly)} has specialisations that only some cards launch")
    return sorted(found.values(), key=lambda each: (each.kernel, each.dtype))


@contextmanager
def _compiling(card: int, name: str, run: Run, found: dict[str, Launched]) -> Iterator[None]:
    """While active, a launch compiles a kernel for a card and notes what it needs."""
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **settings)
        data, source = kernel.metadata, kernel.src
        key = specialisation(
            data.name, source.signature, source.constants, source.attrs, data.num_warps,
            data.num_stages,
        )  # fmt: skip
        module = self.fn.__module__
        own = found.setdefault(key, Launched(data.name, module, key, run.dtype, data.num_warps))
        if name not in own.runs:
            own.runs.append(name)
        if card not in own.registers:
            own.registers[card], own.stack[card] = _usage(kernel.asm["cubin"])
            own.shared[card] = data.shared

    driver.set_active(Card(card))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = launch


def specialisation(
    kernel: str, signature: Any, constants: Any, attributes: Any, warps: int, stages: int
) -> str:
    """Describes the code that Triton compiles for a launch of a kernel.

    Args:
        signature: The type of each argument.
        constants: The values of arguments that are constant, by their place.
        attributes: What is known of other arguments, such as divisibility, by their place.
    """
    given = dict(signature), sorted(constants.items()), sorted(attributes.items())
    return f"{kernel} {given} with {warps} warps and {stages} stages"


def specialisations(card: int) -> set[str]:
    """The specialisations of all launches of `runs` for a card; compiles none of them."""
    driver.set_active(Card(card))
    with noted() as found:
        for run in runs().values():
            run.launch()
    return found


@contextmanager
def noted() -> Iterator[set[str]]:
    """While active, a launch compiles and runs nothing; yields the specialisations of launches."""
    found, runtime = set[str](), triton.knobs.runtime

    def note(*, fn: Any, compile: Any, **_: Any) -> bool:
        given = compile["signature"], compile["constants"], compile["configs"][0]
        found.add(specialisation(fn.name, *given, compile["num_warps"], compile["num_stages"]))
        return True

    before, runtime.jit_cache_hook = runtime.jit_cache_hook, note
    try:
        yield found
    finally:
        runtime.jit_cache_hook = before


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = _USAGE.findall(told)
    if len(used) != 1:
        raise RuntimeError(f"{command} tells of {len(used)} kernels instead of one: {told}")
    return int(used[0][0]), int(used[0][1])


def never_launched(launched: Iterable[Launched]) -> list[str]:
    """Kernels of the engine that no run launches, without functions that other kernels call."""
    packages = (tasc_engine.kernels.gpu, tasc_engine.model)
    modules = [
        importlib.import_module(info.name)
        for package in packages
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ]
    kernels = {
        (value.fn.__module__, value.fn.__name__): value.fn.__code__
        for module in modules
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.fn.__module__.startswith("tasc_engine")
    }
    called = {name for code in kernels.values() for name in code.co_names}
    known = {(each.module, each.kernel) for each in launched}
    return sorted(
        f"{module}.{name}" for module, name in kernels.keys() - known if name not in called
    )


def table(launched: Sequence[Launched], cards: Iterable[int] = CARDS) -> str:
    """One line for each kernel and data type, with the greatest value of its specialisations."""
    lines = [
        f"| kernel | data type | specialisations | {' | '.join(f'sm_{card}' for card in cards)} |",
        "|---|---|---|" + "---|" * len(tuple(cards)),
    ]
    groups = dict[tuple[str, str], list[Launched]]()
    for each in launched:
        groups.setdefault((each.kernel.strip("_"), each.dtype), []).append(each)
    for (kernel, dtype), own in groups.items():
        cells = [
            f"{max(e.registers[card] for e in own)}, {max(e.stack[card] for e in own)}, "
            f"{max(e.shared[card] for e in own) / 1024:.1f}"
            for card in cards
        ]
        lines.append(f"| `{kernel}` | {dtype} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(launched: Sequence[Launched]) -> str:
    """The page of the documentation."""
    runs_of = {run.partition(",")[0] for each in launched for run in each.runs}
    names, vocabularies = sorted(runs_of & {*_models()}), " and ".join(map(str, _VOCABULARIES))
    limits = ", ".join(f"{n >> 10} KiB on sm_{card} ({name})" for card, (name, n) in CARDS.items())
    rows, ranks = ", ".join(map(str, _ROWS)), ", ".join(map(str, sorted(set(_RANKS))))
    drafts = EngineConfig.max_draft_tokens
    paragraphs = (
        "# Triton kernels",
        "<!-- Written by benchmarks/gpu/kernels.py. Edit the code, then run the command below. -->",
        f"All kernels of the GPU path, compiled ahead by Triton {triton.__version__}. None of "
        f"these figures was measured on a GPU. The launches are those of steps of "
        f"{', '.join(names)}, with {rows} rows, {drafts} draft tokens per row, and LoRA adapters "
        f"of ranks {ranks}, and those of sampling rules for {vocabularies} tokens. "
        "Command: `.venv/bin/python benchmarks/gpu/kernels.py --write`.",
        "Each cell has registers per thread, bytes of stack per thread, and KiB of shared memory "
        "per program: the greatest value of all specialisations. A thread has at most 255 "
        f"registers; values that do not fit are on the stack. A program has at most {limits}.",
        table(launched),
    )
    return "\n\n".join(paragraphs) + "\n"


def main() -> None:
    parser = parser_of(__doc__)
    add_json(parser)
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    wanted.add_argument("--card", type=int, choices=CARDS, help="only this compute capability")
    wanted.add_argument("--list", type=int, choices=CARDS, help="only list its specialisations")
    options = parser.parse_args()
    if options.list is not None:
        print(json.dumps({"specialisations": sorted(specialisations(options.list))}))
        return
    cards = CARDS if options.card is None else (options.card,)
    found = compiled(cards)
    if options.write:
        PAGE.write_text(page(found), "utf-8")
    print(table(found, cards))
    result = {
        **versions("torch", "triton"),
        "shared_limits": {card: CARDS[card][1] for card in cards},
        "never_launched": never_launched(found),
        "kernels": [asdict(each) for each in found],
    }
    text = json.dumps(result)
    if options.json:
        options.json.write_text(f"{text}\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
