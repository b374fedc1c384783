"""A running engine gets other adapters; each answer is ended by those that it was begun by.

Workers and replicas live in this process and need Redis only.
"""

import asyncio
import gc
import shutil
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from serving import Task, running_replica

import tiny
from lora_folders import WEIGHTS, cut, make_adapter, merged_says
from support import DEADLINE_S, eventually
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.protocol import Answer, Call, PulseRequest, Refusal
from tasc_runtime.sampling_options import SamplingOptions
from tasc_serve.replica import record_watcher
from tasc_serve.replica.replica import TaskReplica
from tasc_store import TaskRecord, TaskStore

pytestmark = pytest.mark.redis
ENGINE = {"rows": 4, "max_model_len": 128, "device": "cpu", "cost_aware": False}
MOST = 40  # tokens of an answer
PROMPTS = tuple(f"{a} {b}" for a in tiny.SENTENCES[:3] for b in tiny.SENTENCES[:2])


@pytest.fixture(scope="module")
def folders(made: Task, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = Path(made.record.model)
    return [make_adapter(base, tmp_path_factory.mktemp("lora"), seed) for seed in range(3)]


@pytest.fixture
def record(client: redis.Redis, made: Task, folders: list[Path]) -> TaskRecord:
    """Registered under a name of this test's own, with the first adapter."""
    name = f"changing-{uuid.uuid4().hex}"
    given = replace(made.record, name=name, corpus=None, adapter=str(folders[0]), max_tokens=MOST)
    TaskStore(client).put(given)
    return given


def several(record: TaskRecord, folders: list[Path]) -> TaskRecord:
    return replace(record, adapter=None, adapters=tuple(zip("xy", map(str, folders), strict=False)))


def call(prompt: str, **values: Any) -> Call:
    return Call(uuid.uuid4().hex, prompt, templated=True, **values)


@pytest.fixture
def says(made: Task) -> Callable[[str, Path | None], tuple[int, ...]]:
    def answer(prompt: str, adapter: Path | None) -> tuple[int, ...]:
        ids = made.prompt(prompt, chat=True)
        return merged_says(Path(made.record.model), adapter, ids, MOST)

    return answer


class TestWorker:
    """Steps are made by hand, so that answers of several versions surely share them."""

    @pytest.fixture
    def worker(self, client: redis.Redis, record: TaskRecord, tmp_path: Path) -> EngineBuilder:
        return EngineBuilder(client, record.name, EngineSettings(**ENGINE), cache_dir=tmp_path)

    def begin(self, worker: EngineBuilder, adapter: str | None = None) -> dict[str, str]:
        """Submit two prompts, drafted and not; returns them by request."""
        calls = [
            call(prompt, draft=i % 2 == 0, options=SamplingOptions(adapter=adapter))
            for i, prompt in enumerate(PROMPTS[:2])
        ]
        for each in calls:
            worker.engine.submit(worker.request(each))
        return {each.id: each.prompt for each in calls}

    def finish(self, worker: EngineBuilder) -> dict[str, tuple[int, ...]]:
        found = {}
        while worker.engine.running or worker.engine.waiting:
            for delta in worker.engine.step():
                if delta.result:
                    found[delta.id] = delta.result.tokens
            worker.engine.check_integrity()
        return found

    def test_answers_of_three_versions_share_steps_and_are_those_of_their_own_adapters(
        self, worker: EngineBuilder, record: TaskRecord, folders: list[Path], says: Any
    ) -> None:
        begun = [(self.begin(worker), folders[0])]
        worker.engine.step()
        worker.engine.step()
        second = replace(record, adapter=str(folders[1]))
        worker.take(second, 2, worker.target_for(second))
        begun.append((self.begin(worker), folders[1]))
        worker.engine.step()
        third = several(record, folders[1:])
        worker.take(third, 3, worker.target_for(third))
        begun += [(self.begin(worker, "y"), folders[2]), (self.begin(worker), folders[1])]
        assert worker.engine.running == 4, "of two versions, and others wait"
        found = self.finish(worker)
        expected = {id: says(p, folder) for ids, folder in begun for id, p in ids.items()}
        assert found == expected
        assert len({says(PROMPTS[0], folder) for folder in folders}) == 3, "adapters differ"
        assert worker.engine._prefixes._kept, "beginnings were kept, and used by their own only"

    def test_what_nobody_uses_is_freed_and_not_before(
        self, worker: EngineBuilder, record: TaskRecord, folders: list[Path], says: Any
    ) -> None:
        first = weakref.ref(worker.engine._target)
        begun = self.begin(worker)
        worker.engine.step()
        other = replace(record, adapter=str(folders[1]))
        worker.take(other, 2, worker.target_for(other))
        assert not worker.let_go(0), "rows are answered by it"
        with pytest.raises(ValueError, match="version 1 of .* is not served"):
            worker.request(call(PROMPTS[0], record_version=1))
        assert self.finish(worker) == {id: says(p, folders[0]) for id, p in begun.items()}
        assert worker.let_go(0)
        gc.collect()
        assert first() is None
        assert not worker.let_go(1), "the newest stays"
        again = self.begin(worker)
        assert self.finish(worker) == {id: says(p, folders[1]) for id, p in again.items()}

    def test_a_version_with_adapters_that_are_there_loads_nothing(
        self, worker: EngineBuilder, record: TaskRecord, folders: list[Path]
    ) -> None:
        other = replace(record, adapter=str(folders[1]))
        worker.take(other, 2, worker.target_for(other))
        assert worker.target_for(replace(record, max_tokens=3)) is None
        worker.take(record, 3)
        assert (worker.target_number, worker.engine.targets) == (0, (0, 1))


class TestReplica:
    @pytest.fixture
    def start(self, redis_url: str, record: TaskRecord, tmp_path: Path) -> Iterator[Any]:
        with ExitStack() as stack:

            def start(**limits: float) -> TaskReplica:
                replica = running_replica(redis_url, record.name, tmp_path, limits=limits)
                return stack.enter_context(replica)

            yield start

    def test_under_load_every_answer_is_that_of_the_version_that_it_names(
        self, start: Any, client: redis.Redis, record: TaskRecord, folders: list[Path], says: Any
    ) -> None:
        replica, store, names = start(), TaskStore(client), {1: folders[0]}
        seen: list[tuple[int, str, tuple[int, ...]]] = []

        async def ask(number: int) -> None:
            while len({version for version, _, _ in seen}) < 3:
                prompt = PROMPTS[number]
                async for piece in replica.stream(call(prompt, draft=number % 2 == 0)):
                    assert not isinstance(piece, Refusal), piece
                    if piece.result:
                        seen.append((piece.record_version, prompt, piece.result.tokens))

        async def change() -> None:
            for folder in folders[1:]:
                version = store.put(replace(record, adapter=str(folder)))
                names[version] = folder
                while version not in {version for version, _, _ in seen}:
                    await asyncio.sleep(0.01)

        async def all_() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(change(), *map(ask, range(len(PROMPTS))))

        asyncio.run(all_())
        assert {version for version, _, _ in seen} == {1, 2, 3}
        assert {t for v, p, t in seen if v == 1 and p == PROMPTS[0]} == {says(PROMPTS[0], names[1])}
        for version, prompt, tokens in seen:
            assert tokens == says(prompt, names[version])

    def test_others_answers_are_ended_by_the_older_version_while_one_may_live(
        self, start: Any, client: redis.Redis, record: TaskRecord, folders: list[Path], says: Any
    ) -> None:
        replica = start(request_timeout_s=3.0)
        TaskStore(client).put(several(record, folders[1:]))
        eventually(lambda: self.versions(replica) == (2, (1,)))
        whole = says(PROMPTS[0], folders[0])
        ended = asyncio.run(
            replica.complete(call(PROMPTS[0], record_version=1, committed_ids=whole[:5]))
        )
        assert isinstance(ended, Answer), ended
        assert ended.result.tokens == whole
        newest = asyncio.run(
            replica.complete(call(PROMPTS[0], options=SamplingOptions(adapter="y")))
        )
        assert isinstance(newest, Answer), newest
        assert newest.result.tokens == says(PROMPTS[0], folders[2])
        eventually(lambda: self.versions(replica) == (2, ()))
        refused = asyncio.run(replica.complete(call(PROMPTS[0], record_version=1)))
        assert isinstance(refused, Refusal), refused
        assert refused.kind == "changed"

    @pytest.mark.parametrize("named", [False, True], ids=["adapter", "adapters"])
    @pytest.mark.parametrize("breaks", [shutil.rmtree, cut, lambda f: (f / WEIGHTS).unlink()],
                             ids=["missing", "another shape", "no safetensors"])  # fmt: skip
    def test_a_broken_adapter_leaves_the_old_version_until_it_is_put_right(
        self, start: Any, client: redis.Redis, record: TaskRecord, folders: list[Path], says: Any,
        breaks: Callable[[Path], Any], named: bool, tmp_path: Path, caplog: Any, monkeypatch: Any,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(record_watcher, "AGAIN_S", 0.1)
        replica = start()
        place = tmp_path / "next"
        shutil.copytree(folders[1], place)
        breaks(place)
        other = several(record, [place]) if named else replace(record, adapter=str(place))
        TaskStore(client).put(other)
        eventually(lambda: "version 1 stays in use" in caplog.text)
        (said,) = [r.getMessage() for r in caplog.records if "stays in use" in r.getMessage()]
        assert f"adapter {place}: " in said
        assert said.endswith(f"or go back with `tasc task use {record.name} 1`")
        assert self.versions(replica) == (1, ())
        found = asyncio.run(replica.complete(call(PROMPTS[0])))
        assert found.result.tokens == says(PROMPTS[0], folders[0])
        shutil.copytree(folders[1], place, dirs_exist_ok=True)
        eventually(lambda: self.versions(replica)[0] == 2)
        found = asyncio.run(replica.complete(call(PROMPTS[0])))
        assert found.result.tokens == says(PROMPTS[0], folders[1])

    def versions(self, replica: TaskReplica) -> tuple[int, tuple[int, ...]]:
        status = asyncio.run(replica.pulse(PulseRequest("anybody"))).status
        return status.record_version, status.older_record_versions
