"""How every figure of the book looks: one palette that colour-blind readers can tell apart, light and dark, SVG with real text."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib as mpl


@dataclass(frozen=True)
class Theme:
    """Colours of one mode; `bits` maps a bit-width to its colour (Okabe and Ito's set, lightened for dark pages)."""

    ink: str
    faint: str
    bits: dict[int, str]


LIGHT = Theme("#222222", "#8a8a8a", {16: "#222222", 8: "#0072B2", 4: "#009E73", 3: "#CC7A00", 2: "#C03A2B"})
DARK = Theme("#e6e6e6", "#8f8f8f", {16: "#e6e6e6", 8: "#56B4E9", 4: "#2FC79B", 3: "#F0B840", 2: "#FF8A75"})
MARKERS = {
    "base": "o", "grpo": "s", "dr_grpo": "D", "rtn": "^", "rtn-clip": "<", "gptq": "v", "awq": "P", "autoawq": "p", "bnb": "X",
    "qaft": "d", "qat_kd": "*", "qat_sft": "H", "qlora": "h", "lora": "8", "ptq_rollout": ">",
}  # fmt: skip
OTHER_MARKER = "."


@contextmanager
def themed(theme: Theme = LIGHT) -> Iterator[Theme]:
    """Draw inside this with the theme's colours on a transparent ground."""
    with mpl.rc_context(
        {
            "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "figure.dpi": 110,
            "font.size": 10, "axes.titlesize": 10.5, "axes.titlelocation": "left", "axes.spines.top": False,
            "axes.spines.right": False, "axes.edgecolor": theme.faint, "axes.labelcolor": theme.ink, "text.color": theme.ink,
            "xtick.color": theme.ink, "ytick.color": theme.ink, "axes.grid": True, "grid.color": theme.faint, "grid.alpha": 0.22,
            "grid.linewidth": 0.6, "legend.frameon": False, "svg.fonttype": "none", "svg.hashsalt": "lowbit",
        }
    ):  # fmt: skip
        yield theme
