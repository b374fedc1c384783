"""Classify: each answer is one of a few labels, with its probability."""

from math import exp

from tasc_jobs.demo.tasks import ADAPTERS, MODEL
from tasc_serve import LLM

LABELS = ["intent: alarm_set", "intent: play_music", "intent: weather_query"]

llm = LLM(MODEL, adapter=ADAPTERS / "massive_en", template="intent and slots: {input}\n")
inputs = ["wake me up at nine am on friday", "play some jazz", "will it rain tomorrow"]
for answer in llm.generate(inputs, guided_choice=LABELS, logprobs=0):
    probability = exp(sum(token.logprob for token in answer.logprobs))
    print(f"{inputs[answer.index]}: {answer.text} ({probability:.0%})")
