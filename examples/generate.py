"""Answer several inputs, and show what drafting gained."""

from tasc_jobs.demo.tasks import ADAPTERS, MODEL, data_file
from tasc_serve import LLM

llm = LLM(
    MODEL,
    adapter=ADAPTERS / "massive_en",
    corpus=data_file("massive_en", "train"),
    template="intent and slots: {input}\n",
)
for answer in llm.generate(["wake me up at nine am on friday", "play some jazz"], max_tokens=64):
    print(answer.text)
print(llm.summary())
