"""The parts of a Grafana dashboard, in our words, and what each becomes by Grafana's own library.

It knows no metric and no file.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as grafana
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat, QueryEditorMode

Kind: TypeAlias = Literal["timeseries", "stat", "buckets", "cells"]
_Builder: TypeAlias = timeseries.Panel | stat.Panel | heatmap.Panel

_SOURCE: Final = grafana.DataSourceRef("prometheus", "${datasource}")
_ALL: Final = grafana.VariableOption(True, ["All"], ["$__all"])
# A ratio of two rates is NaN where nothing happened, which is not an error.
_NO_TRAFFIC: Final[list[grafana.ValueMapping]] = [
    grafana.SpecialValueMap(
        grafana.DashboardSpecialValueMapOptions(
            match, grafana.ValueMappingResult(text="No traffic", index=i)
        )
    )
    for i, match in enumerate((grafana.SpecialValueMatch.NA_N, grafana.SpecialValueMatch.NULL))
]


@dataclass(frozen=True)
class Target:
    """One query. ``legend`` is a Grafana legend format."""

    expr: str
    legend: str = "__auto"

    def built(self, ref: str, *, buckets: bool) -> prometheus.Dataquery:
        # As a heat map Grafana takes each bucket's count less that of the one below.
        shape = PromQueryFormat.HEATMAP if buckets else PromQueryFormat.TIME_SERIES
        query = prometheus.Dataquery().expr(self.expr).legend_format(self.legend).format(shape)
        query.range().editor_mode(QueryEditorMode.CODE).ref_id(ref)
        return query.datasource(_SOURCE)


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        unit: A Grafana unit: ``s``, ``percentunit``, ``reqps``, ``short``, ``bytes`` ...
        about: What the numbers mean, with their denominator.
        wrong: What to do when they look wrong.
        kind: ``buckets`` is a heat map of a histogram's buckets, ``cells`` one with a row for each
            series.
        width: Of 24 columns; the panels of a row fill it.
        most: Upper end of the axis; None follows the data.
        stacked: Whether a ``timeseries`` draws its series on top of each other.
    """

    title: str
    unit: str
    about: str
    wrong: str
    targets: tuple[Target, ...]
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    most: float | None = None
    stacked: bool = False

    def built(self, number: int) -> _Builder:
        panel = self._drawn().id(number).title(self.title)
        panel.description(f"{self.about}\n\n**Looks wrong?** {self.wrong}")
        panel.span(self.width).height(self.height).datasource(_SOURCE)
        panel.unit(self.unit).min(0).no_value("No traffic").mappings(_NO_TRAFFIC)
        if self.most is not None:
            panel.max(self.most)
        for i, target in enumerate(self.targets):
            panel.with_target(target.built(chr(ord("A") + i), buckets=self.kind == "buckets"))
        return panel

    def _drawn(self) -> _Builder:
        if self.kind == "stat":
            reduced = common.ReduceDataOptions().calcs(["lastNotNull"])
            return stat.Panel().reduce_options(reduced)
        if self.kind in ("buckets", "cells"):
            return self._heatmap()
        legend = common.VizLegendOptions().show_legend(True)
        legend.display_mode(looks.LegendDisplayMode.LIST).placement(looks.LegendPlacement.BOTTOM)
        several = common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI)
        drawn = timeseries.Panel().legend(legend).tooltip(several.sort(looks.SortOrder.DESCENDING))
        if self.stacked:
            drawn.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL))
        return drawn.fill_opacity(40 if self.stacked else 10).line_width(1)

    def _heatmap(self) -> heatmap.Panel:
        colour = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME)
        colour.scheme("Blues").steps(64).min(0)
        panel = heatmap.Panel().calculate(False).cell_gap(1)
        if self.kind == "buckets":
            rows = heatmap.RowsHeatmapOptions().layout(looks.HeatmapCellLayout.LE)
            return (
                panel.rows_frame(rows).color(colour).y_axis(heatmap.YAxisConfig().unit(self.unit))
            )
        if self.most is not None:
            colour.max(self.most)
        return panel.color(colour).cell_values(heatmap.CellValues().unit(self.unit))


@dataclass(frozen=True)
class Variable:
    """A filter above the dashboard: the values that ``label`` has in the series ``metric``."""

    label: str
    metric: str

    def built(self) -> build.QueryVariable:
        variable = build.QueryVariable(self.label).datasource(_SOURCE).current(_ALL)
        variable.query(f"label_values({self.metric}, {self.label})")
        variable.refresh(grafana.VariableRefresh.ON_TIME_RANGE_CHANGED)
        variable.sort(grafana.VariableSort.ALPHABETICAL_ASC)
        return variable.multi(True).include_all(True).all_value(".*")


@dataclass(frozen=True)
class Section:
    """A titled part of a dashboard; its panels fill rows of 24 columns in their order."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """A dashboard."""

    uid: str
    title: str
    about: str
    sections: tuple[Section, ...]
    variables: tuple[Variable, ...]

    def built(self) -> grafana.Dashboard:
        board = build.Dashboard(self.title).uid(self.uid).description(self.about)
        board.tags(["tasc-serve"]).tooltip(grafana.DashboardCursorSync.CROSSHAIR)
        board.refresh("10s").time("now-30m", "now").version(1)
        board.with_variable(build.DatasourceVariable("datasource").type("prometheus"))
        for variable in self.variables:
            board.with_variable(variable.built())
        number = 0
        for section in self.sections:
            number += 1
            board.with_row(build.Row(section.title).id(number))
            for panel in section.panels:
                number += 1
                board.with_panel(panel.built(number))
        return board.build()
