"""Checks that a draft is valid, and that it is the best one for given probabilities."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draft_reference import Chances, Path

from tasc_draft import SOURCES, Drafts

SLACK = 1e-5  # float32 of a product of a few chances

Rule = Callable[[Path], Chances]


@dataclass(frozen=True)
class Node:
    """The end of a path of one row's draft."""

    logp: float
    source: str


Tree = dict[Path, Node]


@dataclass(frozen=True)
class Limits:
    """The limits of a draft of one row."""

    max_tokens: int
    vocab_size: int
    sep: int
    eos_ids: Sequence[int]
    min_prob: float = 0.0
    branching: bool = True


def tree(drafts: Drafts, place: int = 0) -> Tree:
    """Returns one row's draft by path, in order, after checking that it is a tree."""
    begin, end = drafts.offsets[place : place + 2]
    paths: list[Path] = []
    nodes: Tree = {}
    for at in range(begin, end):
        parent = int(drafts.parents[at])
        assert -1 <= parent < len(paths), "a parent follows its child"
        above = paths[parent] if parent >= 0 else ()
        path = (*above, int(drafts.tokens[at]))
        assert drafts.depths[at] == len(path)
        assert path not in nodes, f"{path} is drafted twice"
        logp = float(drafts.logp[at])
        assert -math.inf < logp <= (nodes[above].logp if above else 0.0) + SLACK
        paths.append(path)
        nodes[path] = Node(logp, SOURCES[drafts.source[at]])
    return nodes


def trees(drafts: Drafts) -> list[Tree]:
    return [tree(drafts, place) for place in range(len(drafts.offsets) - 1)]


def assert_valid(drafts: Drafts, rows: Sequence[Limits], budget: int | None = None) -> None:
    """Asserts that each draft is a tree or chain within its limits, and all are in the budget."""
    assert len(drafts.offsets) == len(rows) + 1
    assert drafts.offsets[0] == 0
    total = int(drafts.offsets[-1])
    arrays = (drafts.tokens, drafts.parents, drafts.depths, drafts.logp, drafts.source)
    assert all(len(array) == total for array in arrays)
    assert budget is None or total <= budget
    for place, limits in enumerate(rows):
        nodes = tree(drafts, place)
        assert len(nodes) <= max(limits.max_tokens, 0)
        for path, node in nodes.items():
            assert 0 <= path[-1] < limits.vocab_size
            assert path[-1] != limits.sep
            assert not {*path[:-1]} & {*limits.eos_ids}, "a token is drafted after the end"
            assert math.exp(node.logp) >= limits.min_prob - SLACK
        if not limits.branching:
            assert [len(path) for path in nodes] == list(range(1, len(nodes) + 1))


def assert_best(
    nodes: Tree, rule: Rule, limits: Limits, slack: float = SLACK, depth: int | None = None
) -> None:
    """Asserts that drafted paths have the rule's chances, and no more likely path is left out.

    If paths tie within the slack, either may be drafted.

    Args:
        depth: Longer paths may be left out, and sources are not checked. None: all are checked.
    """
    drafted: dict[Path, float] = {(): 1.0}
    for path, node in nodes.items():
        by_corpus, by_prompt = rule(path[:-1])[path[-1]]
        drafted[path] = drafted[path[:-1]] * (by_corpus + by_prompt)
        assert math.isclose(math.exp(node.logp), drafted[path], rel_tol=slack), (path, node)
        tie = depth is not None or math.isclose(by_corpus, by_prompt, rel_tol=slack)
        assert tie or node.source == ("prompt" if by_prompt > by_corpus else "corpus"), path
    del drafted[()]
    for path, chance in left_out(nodes, drafted, rule, limits).items():
        rivals = [p for p in drafted if limits.branching or p[:-1] == path[:-1]]
        full = len(nodes) == limits.max_tokens or (rivals and not limits.branching)
        bound = min((drafted[p] for p in rivals), default=math.inf) if full else limits.min_prob
        far = depth is not None and len(path) > depth
        assert far or chance <= bound * (1 + slack), (path, chance, nodes)


def left_out(
    nodes: Tree, drafted: dict[Path, float], rule: Rule, limits: Limits
) -> dict[Path, float]:
    """Returns the chance of each undrafted path that is one token longer than a drafted one."""
    open_ends = [path for path in ((), *nodes) if not {*path[-1:]} & {*limits.eos_ids}]
    return {
        (*path, token): drafted.get(path, 1.0) * sum(parts)
        for path in open_ends
        for token, parts in rule(path).items()
        if token < limits.vocab_size and token != limits.sep
        if (*path, token) not in nodes and sum(parts) > 0
    }


def assert_same_up_to_ties(one: Tree, other: Tree) -> None:
    """Asserts equal drafts, except that any of the least likely paths with a tie may be drafted."""
    ranked = [sorted(node.logp for node in nodes.values()) for nodes in (one, other)]
    assert ranked[0] == ranked[1]
    for path in {*one} ^ {*other}:
        node = one.get(path) or other[path]
        assert node.logp == ranked[0][0], path
    for path in {*one} & {*other}:
        assert one[path] == other[path]
