"""What came out otherwise: the claims of both papers that runs here contradict, and how many rows have no verdict."""

import pandas as pd

from helpers.report.pages import table

ORDER = ("holds", "no difference", "inconclusive", "contradicted", "untestable here")


def contradicted(found: pd.DataFrame) -> str:
    """One line a contradicted row of verdicts.csv, in MyST."""
    rows = found[found["verdict"] == "contradicted"]
    if not len(rows):
        return "No row of the verdicts is contradicted.\n"
    lines = [[row.paper, row.claim, row.reported, row.ours, row.seeds] for row in rows.itertuples()]
    return table(["paper", "claim", "reported", "ours", "seeds"], lines)


def counts(found: pd.DataFrame) -> str:
    """One line a paper: how many rows have each verdict."""
    lines = [[paper, *(int((own["verdict"] == name).sum()) for name in ORDER)] for paper, own in found.groupby("paper")]
    return table(["paper", *ORDER], lines)
