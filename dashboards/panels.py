"""The parts of a Grafana dashboard, and the JSON each becomes. It knows no metric and no file."""

from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
Kind = Literal["timeseries", "stat", "heatmap"]

_SCHEMA = 39  # Grafana 11
_COLUMNS = 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# A ratio of two rates is NaN where nothing happened, which is not an error.
_NO_TRAFFIC = [
    {"type": "special", "options": {"match": match, "result": {"text": "No traffic", "index": i}}}
    for i, match in enumerate(("nan", "null"))
]


@dataclass(frozen=True)
class Target:
    """One query. ``legend`` is a Grafana legend format."""

    expr: str
    legend: str = ""

    def to_json(self, ref: str, *, heatmap: bool) -> Json:
        return {
            "refId": ref,
            "datasource": _DATASOURCE,
            "editorMode": "code",
            "expr": self.expr,
            "legendFormat": "{{le}}" if heatmap else self.legend or "__auto",
            "format": "heatmap" if heatmap else "time_series",
            "range": True,
        }


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        unit: A Grafana unit: ``s``, ``percentunit``, ``reqps``, ``short``, ``bytes`` ...
        about: What the numbers mean, with their denominator.
        width: Of 24 columns.
        most: Upper end of the axis; None follows the data.
    """

    title: str
    unit: str
    about: str
    targets: tuple[Target, ...]
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    most: float | None = None

    def to_json(self, number: int, x: int, y: int) -> Json:
        heatmap = self.kind == "heatmap"
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.about,
            "datasource": _DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": [
                target.to_json(chr(ord("A") + i), heatmap=heatmap)
                for i, target in enumerate(self.targets)
            ],
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": self._heatmap() if heatmap else self._options(),
        }

    def _defaults(self) -> Json:
        most = {} if self.most is None else {"max": self.most}
        return {"unit": self.unit, "min": 0, **most, "noValue": "No traffic", **self._drawn()}

    def _drawn(self) -> Json:
        mappings: Json = {"mappings": _NO_TRAFFIC}
        if self.kind == "timeseries":
            return mappings | {"custom": {"drawStyle": "line", "fillOpacity": 10, "lineWidth": 1}}
        return mappings

    def _options(self) -> Json:
        if self.kind == "stat":
            reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area"}
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }

    def _heatmap(self) -> Json:
        return {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Blues", "steps": 64},
            "yAxis": {"unit": self.unit, "axisPlacement": "left"},
            "rowsFrame": {"layout": "le"},
            "tooltip": {"mode": "single", "yHistogram": True},
        }


@dataclass(frozen=True)
class Variable:
    """A filter above the dashboard: the values that ``label`` has in the series ``metric``."""

    label: str
    metric: str

    def to_json(self) -> Json:
        query = f"label_values({self.metric}, {self.label})"
        return {
            "name": self.label,
            "type": "query",
            "datasource": _DATASOURCE,
            "definition": query,
            "query": {"query": query, "refId": "StandardVariableQuery"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "sort": 1,
        }


@dataclass(frozen=True)
class Dashboard:
    """A dashboard: panels fill rows of 24 columns from left to right, in their order."""

    uid: str
    title: str
    about: str
    panels: tuple[Panel, ...]
    variables: tuple[Variable, ...]

    def to_json(self) -> Json:
        source = {"name": "datasource", "type": "datasource", "query": "prometheus", "refresh": 1}
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.about,
            "tags": ["tasc-serve"],
            "schemaVersion": _SCHEMA,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "templating": {"list": [source, *(v.to_json() for v in self.variables)]},
            "annotations": {"list": []},
            "panels": self._placed(),
        }

    def _placed(self) -> list[Json]:
        placed: list[Json] = []
        x = y = tallest = 0
        for number, panel in enumerate(self.panels, start=1):
            if x + panel.width > _COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            placed.append(panel.to_json(number, x, y))
            x, tallest = x + panel.width, max(tallest, panel.height)
        return placed
