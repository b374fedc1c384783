"""What must always hold of an engine, for tests. It changes nothing."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasc_engine.engine import Engine


def check_engine(engine: "Engine") -> None:
    """Raise AssertionError unless each row is free or held by one request that fits it."""
    active, longest = engine._active, engine.config.max_model_len
    rows = sorted([*engine._free, *active])
    assert rows == list(range(engine.config.rows)), f"rows {rows} are not each owned once"
    assert all(s.row == row for row, s in active.items())
    assert all(s.cached <= longest for s in active.values())
    assert all(s.entered <= s.cached and s.behind > 0 for s in active.values())
    assert {s.request.target for s in engine._held()} <= set(engine.targets)
    held = [range(s.first, s.first + s.needs) for s in active.values()]
    moved = engine._verifier.moves.ravel().tolist()
    assert all(any(p in own for own in held) for p in moved), f"{moved} move, {held} are held"
    engine._places.check_integrity()
    engine._prefixes.check_integrity()
