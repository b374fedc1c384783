"""What the parts of the neural benchmark share: a case's drafters and vocabularies, measured.

What was measured with the same settings before is read from its file. It tables nothing.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, cached_property

from neural_kept import kept
from neural_models import Case, Models
from neural_side import LENGTH, ROWS, Measured, Side
from torch import Tensor

from tasc_draft import Proposer
from tasc_engine.neural.card import Kind
from tasc_engine.neural.drafters import Eagle, Independent
from tasc_engine.neural.files import load_drafter
from tasc_engine.neural.ranking import Origin, Ranking
from tasc_engine.neural.recent_policy import RecentVocabulary
from tasc_engine.neural.settings import NeuralSettings
from tasc_engine.neural.vocabulary import FullVocabulary, RankedVocabulary, Vocabulary

MICROSPEC, FR_SPEC = NeuralSettings(5, 10, 60), NeuralSettings(6, 10, 60)
# The paper calls four levels depth 3: its answers have up to 4.8 tokens a step.
VOCABTRIM = NeuralSettings(4, 8, 32)
MOST = 60  # nodes of them


@dataclass(frozen=True)
class Policy:
    """Which tokens are drafted.

    Attributes:
        ranked: The so many most frequent tokens; None: all, or none beside a window.
        recent: A window of each row's candidates (MicroSpec).
    """

    ranked: int | None = None
    origin: Origin = "target"
    recent: bool = False
    context: bool = True
    extension: bool = True
    gathered: bool = True

    @property
    def name(self) -> str:
        parts = ["recent"] if self.recent else []
        parts += [f"ranked {self.ranked} by {self.origin}"] if self.ranked else []
        for is_on, without in (
            (self.extension, "context only"), (self.context, "extension only"),
            (self.gathered, "indexed"),
        ):  # fmt: skip
            parts += [] if is_on else [without]
        return ", ".join(parts) or "full"


FULL, RECENT = Policy(), Policy(recent=True)


class Bench:
    """One case; targets and drafters are loaded when they are needed.

    Args:
        rows: Test rows that are answered.
        nodes: Most draft tokens of a row in a step.
    """

    def __init__(
        self, models: Models, case: Case, rows: int, repeats: int, nodes: int = MOST
    ) -> None:
        self.models, self.case, self.repeats = models, case, repeats
        self.rows, self._nodes, self._drafter = rows, nodes, cache(self._loaded)
        self.ranking = cache(lambda origin: models.ranking(case, origin))

    @cached_property
    def side(self) -> Side:
        test = self.case.of.read(self.models.data, "test")[: self.rows]
        return Side(
            self.models.source(self.case), self.case.of.prompt, [row.input for row in test],
            self.case.of.max_tokens, self._nodes,
        )  # fmt: skip

    @cached_property
    def vocab_size(self) -> int:
        return self.side.target.vocab_size

    def tokens(self, k: int, origin: Origin = "target") -> int:
        """How many of the k most frequent were seen."""
        return len(self.ranking(origin).top(k))

    def sizes(self, *wanted: int) -> list[int]:
        """How many tokens rankings of the wanted sizes have, without those that are the same."""
        return sorted({self.tokens(k) for k in wanted}, reverse=True)

    def neural(self, kind: Kind, policy: Policy, tree: NeuralSettings, repeats: int) -> Measured:
        """A drafter alone, its trees drafted from a policy's tokens."""
        shape = f"{tree.depth}x{tree.width}x{tree.nodes}"
        return self.measured(
            f"{kind}, {policy.name}, {shape}", repeats,
            lambda watch: self.proposer(kind, policy, tree, watch),
        )  # fmt: skip

    def measured(
        self, name: str, repeats: int,
        proposer_of: Callable[[Callable[[Vocabulary], Vocabulary]], Proposer],
    ) -> Measured:  # fmt: skip
        settings = (
            f"{name}; {self.rows} rows, {repeats} repeats, {self._nodes} nodes, b = {ROWS}; learnt "
            f"in {self.models.epochs:g} epochs"
        )
        file = self.models.folder(self.case) / "measured" / f"{name}.json"
        found = kept(file, settings, lambda: asdict(self.side.measure(proposer_of, repeats)))
        return Measured(**found)

    def proposer(
        self, kind: Kind, policy: Policy, tree: NeuralSettings,
        watch: Callable[[Vocabulary], Vocabulary] = lambda vocabulary: vocabulary,
    ) -> Proposer:  # fmt: skip
        drafter, head = self._drafter(kind)
        vocabulary = vocabulary_of(policy, head, self.ranking)
        return self.side.neural(drafter, watch(vocabulary), tree)

    def _loaded(self, kind: Kind) -> tuple[Eagle | Independent, Tensor]:
        side, folder = self.side, self.models.drafter(self.case, kind)
        fingerprint = side.tokenizer.fingerprint
        return load_drafter(folder, side.target, side.source, fingerprint, ROWS, LENGTH)


def vocabulary_of(policy: Policy, head: Tensor, of: Callable[[Origin], Ranking]) -> Vocabulary:
    """A vocabulary that has seen nothing; a ranked one is of what ``of`` says of its origin."""
    base = of(policy.origin).top(policy.ranked) if policy.ranked else None
    if policy.recent:
        return RecentVocabulary(
            head, ROWS, base=base, gathered=policy.gathered, context=policy.context,
            extension=policy.extension,
        )  # fmt: skip
    return FullVocabulary(head) if base is None else RankedVocabulary(head, base)
