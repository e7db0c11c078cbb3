"""The report of an evaluation: figures, curves, tables and pictures on one page.

Takes plain values; writes ``report.html``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.pages.charts import Chart
from app.pages.html import Card, Table, rendered
from app.settings.data_file import write_text


@dataclass(frozen=True, eq=False)
class EvaluationPage:
    """Content of the page.

    Attributes:
        name: of the predictions.
        what: a few words about them.
        cards: the figures that count.
        charts: curves.
        tables: by heading.
        pictures: PNG by caption: true areas on the left, predicted ones on the right.
        tiles: PNG by caption: tiles that the model is most and least certain of.
        notes: lines about what is scored and what takes no part.
    """

    name: str
    what: Sequence[str]
    cards: Sequence[Card]
    charts: Sequence[Chart]
    tables: Mapping[str, Table]
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    tiles: Mapping[str, bytes] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def write(self, path: Path) -> Path:
        """Write the page and give its path."""
        return write_text(
            path,
            rendered(
                "evaluation.html.j2",
                name=self.name,
                what=self.what,
                cards=self.cards,
                charts=self.charts,
                tables=dict(self.tables),
                pictures=_as_text(self.pictures),
                tiles=_as_text(self.tiles),
                notes=self.notes,
            ),
        )


def _as_text(pictures: Mapping[str, bytes]) -> list[tuple[str, str]]:
    return [(name, base64.b64encode(png).decode()) for name, png in pictures.items()]
