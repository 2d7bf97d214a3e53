"""The papers' figures as rows: under our names, marked, without a run, and only beside rows of their study."""

import pandas as pd

from helpers.report import reported, table


def frame(study):
    ours = {
        "study": study,
        "run_id": "eval-1",
        "model": "Qwen3-0.6B",
        "recipe": "base",
        "source": "run",
        "bits": 16,
        "n": 9,
        "k": 1,
    }
    empty = table.rows([])
    return pd.DataFrame([ours]).reindex(columns=table.COLUMNS).astype(empty.dtypes)


def test_rows_of_the_papers_stand_beside_ours():
    found = reported.beside(frame("qwen3"))
    theirs = found[found["source"] == "paper"]
    assert list(found.columns) == table.COLUMNS
    assert len(theirs) == len(found) - 1 == 4 * 8 + 17
    assert theirs["run_id"].isna().all()
    assert theirs["n"].isna().all()
    assert set(theirs["command"]) == {reported.PAPER_1, reported.PAPER_2}
    assert set(theirs[theirs["command"] == reported.PAPER_1]["metric"]) == {"macro reward"}
    best = theirs[(theirs["model"] == "Qwen3-8B") & (theirs["recipe"] == "base > grpo")]
    assert list(best["value"]) == [0.594]
    gain = theirs[(theirs["benchmark"] == "math500") & (theirs["model"] == "Qwen3-0.6B") & (theirs["bits"] == 3)]
    assert round(gain["value"].max() - gain["value"].min(), 4) == 0.4453
    assert "0.594" in found.to_csv(index=False)


def test_other_tables_stay_as_they_are():
    assert len(reported.beside(frame("micro"))) == 1
