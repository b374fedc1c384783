"""`tasc train-drafter` refuses what only the other kind of drafter has."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tasc_engine.neural.card import Kind
from tasc_jobs.cli import app
from tasc_jobs.drafter.settings import DrafterSettings, of_kind
from tasc_jobs.errors import UsageError

OWN: dict[Kind, dict[str, float]] = {
    "eagle": {"token_weight": DrafterSettings.token_weight, "noise": 0.0, "own_share": 0.25},
    "independent": {"prompt_weight": DrafterSettings.prompt_weight, "layers": 2, "hidden": 16},
}
OTHER: dict[Kind, Kind] = {"eagle": "independent", "independent": "eagle"}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(OTHER[kind], *each) for kind, own in OWN.items() for each in own.items()],
)
def test_a_setting_of_the_other_kind_is_refused_by_option_and_kind(
    tmp_path: Path, kind: Kind, name: str, value: float
) -> None:
    output, option = tmp_path / "out", "--" + name.replace("_", "-")
    given = ["train-drafter", "t", "--kind", kind, "--output", str(output), option, str(value)]
    refused = CliRunner().invoke(app, given).exception
    assert isinstance(refused, UsageError)
    assert str(refused) == (
        f"{option} is {value}, and only --kind {OTHER[kind]} has it; this is --kind {kind}, leave "
        "it out"
    )
    assert not output.exists()


@pytest.mark.parametrize("kind", OWN)
def test_a_kind_takes_its_own_settings_and_else_their_defaults(kind: Kind) -> None:
    own = OWN[kind]
    assert of_kind(kind, **own, **dict.fromkeys(OWN[OTHER[kind]])) == own
    assert of_kind(kind, **dict.fromkeys(own)) == {}
    assert DrafterSettings(kind, **of_kind(kind, **own)) != DrafterSettings(kind)
