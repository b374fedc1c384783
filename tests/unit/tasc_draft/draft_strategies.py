"""Random corpora, rows and settings, small enough that matches, ties and misses all happen."""

from hypothesis import strategies as st

from tasc_draft import DraftSettings

token = st.integers(0, 4)
documents = st.lists(st.lists(token, max_size=8), max_size=8)
prompts = st.lists(st.integers(0, 4), max_size=14)
# 5 and 6 are ids of the target beyond the tokenizer's; 5 is also the index's document mark.
answers = st.lists(st.integers(0, 6) | st.integers(1, 3), max_size=12)
rows = st.tuples(prompts, answers, st.integers(0, 12))

drafting = st.builds(
    DraftSettings,
    n_max=st.integers(2, 8),
    corpus_weight=st.sampled_from([0.0, 1.0, 0.75, 0.5]) | st.floats(0, 1),
    num_speculative_tokens=st.integers(0, 10),
    min_prob=st.sampled_from([0.0, 0.02, 0.3, 1.0]) | st.floats(0, 1),
)
