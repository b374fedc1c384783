"""A replica renders conversations by the task's chat template, and answers others meanwhile."""

import asyncio
import uuid
from contextlib import ExitStack
from dataclasses import replace

import msgspec
import pytest
from serving import running_replica
from transformers import AutoTokenizer

import tiny
from chat_families import make_chat_tokenizer
from support import completed, eventually
from tasc_protocol import Output, Request
from tasc_runtime.models import chat_template
from tasc_runtime.protocol import Refusal
from tasc_serve.wire import Message, Submit
from tasc_store import CollectedRows, TaskRecord, TaskStore
from tasc_text import Conversation, TaskTokenizer
from tasc_text import Message as Turn

pytestmark = [pytest.mark.redis, pytest.mark.anyio]
TALK = (Turn("user", "wake me up"), Turn("assistant", "alarm"), Turn("user", "play some jazz"))
# The content of the last message decides the end of the template.
AWKWARD = """\
{% if messages[-1].content == 'refuse' %}{{ raise_exception('not this one') }}{% endif %}\
{% if messages[-1].content == 'endless' %}{% for i in range(99999) %}{% for j in range(99999) %}\
{% endfor %}{% endfor %}{% endif %}"""


class Chats:
    """A model with a template like Qwen's, and tasks with this model."""

    def __init__(self, folder):
        self.folder = make_chat_tokenizer(folder, "qwen")
        self.model = tiny.make_model(folder, seed=1)
        self.theirs = AutoTokenizer.from_pretrained(folder)
        self.tokenizer = TaskTokenizer.from_folder(folder)

    def says(self, *turns):
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        ids = self.theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        return self.tokenizer.decode(tiny.plain(self.model, ids, 16))

    def record(self, **fields):
        return TaskRecord(
            name=f"chat-{uuid.uuid4().hex}", model=str(self.folder), dtype="float64", max_tokens=16,
            fingerprint=self.tokenizer.fingerprint, **{"template": "{input}", **fields},
        )  # fmt: skip


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return Chats(tmp_path_factory.mktemp("chats") / "model")


@pytest.fixture
def start(redis_url, client, tmp_path):
    """Start a replica of a record."""
    with ExitStack() as running:

        def start(record, **own):
            TaskStore(client).put(record)
            replica = running_replica(redis_url, record.name, tmp_path, length=256, own=own)
            return running.enter_context(replica)

        yield start


def sent(prompt, **fields):
    """Returns a call as decoded from a connection."""
    call = Request(uuid.uuid4().hex, prompt, templated=True, **fields)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(Submit(1, call)), type=Message)
    assert sent.request == call
    return sent.request


async def ask(replica, *calls):
    return await asyncio.gather(*(completed(replica, call) for call in calls))


def texts(answers):
    assert all(isinstance(answer, Output) for answer in answers), answers
    return [answer.result.text for answer in answers]


async def test_slow_template_delays_no_other_request_and_its_refusal_names_the_messages_field(
    chats, start
):
    own = chat_template(chats.folder).source
    replica = start(chats.record(chat=chat_template(chats.folder, AWKWARD + own)))
    slow = asyncio.create_task(completed(replica, sent("endless")))
    await asyncio.sleep(0)
    ids = tuple(chats.tokenizer.encode_prompt("play some jazz"))
    assert isinstance(await completed(replica, Request("ids", ids, templated=False)), Output)
    assert not slow.done()
    refused = [await slow, await completed(replica, sent("refuse"))]
    for refusal in refused:
        assert isinstance(refusal, Refusal)
        assert (refusal.kind, refusal.param) == ("invalid", "messages")
    assert "not this one" in refused[1].message
    assert texts(await ask(replica, sent("wake me up"))) == [chats.says(Turn("user", "wake me up"))]


@pytest.mark.parametrize("chat", [False, True])
async def test_answers_are_collected_only_for_requests_with_one_input(chats, start, client, chat):
    """A format string takes the last user message; a chat template takes all messages."""
    record = chats.record(choices=("alarm", "music"))
    if chat:
        record = replace(record, chat=chat_template(chats.folder))
    replica = start(record, collect={"sample_rate": 1.0, "flush_interval_s": 0.05})
    found = texts(await ask(replica, sent("wake me up"), sent(Conversation(TALK))))
    rows = [("wake me up", found[0]), ("play some jazz", found[1])][: 1 if chat else 2]
    collected = CollectedRows(client, record.name)
    eventually(lambda: len(collected.read().rows) == len(rows))
    assert sorted((row.input, row.output) for row in collected.read().rows) == sorted(rows)
