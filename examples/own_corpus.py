"""Draft from rows of the task: the same answers in fewer forward passes, and a folder to serve."""

from tasc_jobs.demo.tasks import ADAPTERS, MODEL, data_file, read_split
from tasc_serve import LLM

TEMPLATE = "intent and slots: {input}\n"

llm = LLM(
    MODEL,
    adapter=ADAPTERS / "massive_en",
    template=TEMPLATE,
    corpus=data_file("massive_en", "train"),  # a .jsonl.gz file of inputs and outputs
)
inputs = [row["input"] for row in read_split("massive_en", "test")[:20]]
plain = llm.generate(inputs, draft=False)
drafted = llm.generate(inputs)
print("same answers:", [a.text for a in plain] == [a.text for a in drafted])
print("forward passes:", sum(a.steps for a in plain), "plain,", sum(a.steps for a in drafted))
llm.save("ticket-task")  # then: tasc task create tickets --from ticket-task
