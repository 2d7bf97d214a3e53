"""Rewrite an answer so that what looks the same becomes the same characters: one alphabet, one spacing, no
decoration.

Unicode becomes LaTeX or ASCII (`４２` -> `42`, `√2` -> `\\sqrt{2}`, `10⁸` -> `10^{8}`, `½` -> `\\frac{1}{2}`), spacing,
delimiters, colours and maths fonts go, text commands become `\\text`, and digit groups that are marked as groups are
joined (`1{,}000`, `1\\,000`). Letters keep their case and nothing that carries a value is dropped. The one ambiguity
is left to the caller: `1,200` may be one number or two, so `readings` gives both.
"""

import re
import unicodedata

SYMBOLS = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "‒": "-", "﹣": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ",
    "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "∖": r"\setminus ", "°": r"^\circ ", "º": r"^\circ ",
    "˚": r"^\circ ", "′": "'", "″": "''", "’": "'", "‘": "'", "“": '"', "”": '"', "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "∠": r"\angle ", "…": r"\ldots ", "⟨": r"\langle ", "⟩": r"\rangle ", "∣": "|", "，": ",",
    "、": ",", "。": ".", "：": ":", "∑": r"\sum ", "∫": r"\int ", "∏": r"\prod ", "ϕ": r"\phi ", "ϵ": r"\epsilon ",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "℃": r"^\circ C", "℉": r"^\circ F",
    "Ø": r"\emptyset ", "⌀": r"\emptyset ", "€": r"\euro ", "£": r"\pounds ",
    "¥": r"\yen ", "￥": r"\yen ", "✓": "", "■": "", "□": "",
}  # fmt: skip
GREEK = [
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu",
    "xi", "omicron", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega", "Gamma", "Delta", "Theta",
    "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega",
]  # fmt: skip
for _name in GREEK:
    _size = "SMALL" if _name[0].islower() else "CAPITAL"
    _letter = unicodedata.lookup(f"GREEK {_size} LETTER {_name.upper().replace('LAMBDA', 'LAMDA')}")
    SYMBOLS.setdefault(_letter, rf"\{_name} ")
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni", strict=True))
LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-", strict=True))

CURRENCY = {"$": r"\text{ dollars}"} | {sign: rf"\text{{ {sign.rstrip('s')}s}}" for sign in ("euro", "pounds", "yen")}
MAGNITUDE = r"(?:hundred|thousand|[mbtr]+illion)\b"
AMOUNT = (  # a currency sign and its amount, where nothing but words may follow
    r"\\(\$|euro |pounds |yen )\s*(-?(?:\d+(?:(?:,|\{,\})\d{3})*(?:\.\d+)?|\.\d+)(?![.,]?\d)"
    rf"(?:\s{MAGNITUDE})?)(?!\s*\\text\s*\{{\s*{MAGNITUDE})(?=\s*(?:$|[.,;}}]|\\text|and\b|or\b|per\b|[a-z]{{3}}))"
)
REWRITES = [
    (re.compile(pattern), to)
    for pattern, to in (
        (r"\\(?:d|t|c|x)frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\\\\[[^\]]*\]", r"\\\\"),  # the space between rows of a matrix
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*(?:\.(?!\d))?", " "),
        (r",\s*\\!\s*(?=\d{3})|\\text\s*\{\s*,\s*\}(?=\d{3})", "{,}"),
        (r"\\(?:hspace|vspace|hphantom|phantom|vphantom|label|tag)\*?\{[^{}]*\}", " "),
        (r"\\(?:text)?color(?:box)?(?:\[[^\]]*\])?\{[^{}]*\}", " "),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\(?:[,:;> ]|(?:quad|qquad|thinspace|medspace|thickspace|enspace|hfill|displaystyle|textstyle|"
         r"scriptstyle|limits|nolimits)(?![A-Za-z]))", " "),
        (r"~", " "),
        (r"^(-?)\s*\$(?=\s?[\d.][^$]*$)", r"\1\\$"),  # a dollar sign alone before an amount
        (AMOUNT, lambda m: m[2] + CURRENCY[m[1].strip()]),
        (r"(?<=\d)\s*\\(euro|pounds|yen)(?![A-Za-z])", lambda m: CURRENCY[m[1]]),
        (r"(?<!\\)\\(?:[$]|(?:euro|pounds|yen)(?![A-Za-z]))", ""),
        (r"(?<!\\)\\[()\[\]]", " "),
        (r"[$]", " "),
        (r"\\(?:boxed|fbox|framebox|underline|mathbf|boldsymbol|bm|mathit|mathsf|mathtt|mathcal|mathscr|mathfrak|pmb|ensuremath)"
         r"(?![A-Za-z])\s*", ""),
        (r"\\(?:mbox|hbox|textnormal|textrm|textit|textbf|textsf|texttt|textsc|textup|emph|operatorname\*?|mathrm)(?![A-Za-z])\s*",
         r"\\text"),
        (r"\{\s*\\(?:rm|bf|it|sf|tt)(?![A-Za-z])\s*", r"\\text{"),
        (r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d)", ""),
        (r"\{\s*([,:=+\-])\s*\}", r"\1"),
        (r"(?<=\d)(?:st|nd|rd|th)(?![A-Za-z])", ""),
        (r"(?<=\d)\s*\^\s*(?:o(?![A-Za-z])|\{\s*o\s*\})", r"^\\circ "),
        (r"\bper cent\b", "percent"),
        (r"(\^\s*\{?\s*\\circ\s*\}?)\s*(?:C|\\text\s*\{\s*C\s*\})(?![A-Za-z])", r"\1\\text{ celsius}"),
        (r"(\^\s*\{?\s*\\circ\s*\}?)\s*(?:F|\\text\s*\{\s*F\s*\})(?![A-Za-z])", r"\1\\text{ fahrenheit}"),
        (r"\\(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm|it|strut|mathstrut|null|hline|nonumber)"
         r"(?![A-Za-z])", " "),
        (r"\\(?:begin|end)\{(?:aligned|align\*?|equation\*?|gathered|split|math|displaymath|center)\}&?", " "),
        (r"\\(?:R|Reals)(?![A-Za-z])", r"\\mathbb{R}"),
        (r"(?<![A-Za-z\\])(?:np|numpy|math)\.(?=[a-z])", ""),
        (r"(?<=[\w)\]}])\s*\*\*\s*(?=[\w({\-])", "^"),
        (r"\*\*|`", " "),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (r"(?<![\d.,])(\d{1,3})((?:\s\d{3})+)(?![\d.]*\s*/|\d)", lambda m: m[1] + re.sub(r"\s", "", m[2])),
        (r"\s+", " "),
    )
]  # fmt: skip
GROUPED = re.compile(r"(?<![\d.,])(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3})(?!\d|,\d)")  # also 12,34,567


def clean(text: str) -> str:
    """The answer in plain LaTeX; an answer without content gives the empty string."""
    text = re.sub(r"\s+", " ", _ascii(text))
    for pattern, to in REWRITES:
        text = pattern.sub(to, text)
    return trim(text)


def trim(text: str) -> str:
    """Without surrounding spaces, quotes, and the punctuation that ends a sentence."""
    before = None
    while text != before:
        before = text
        text = text.strip().lstrip("=:").rstrip(",;:")
        text = re.sub(r"(?<!\.)\.$", "", text)
        text = re.sub(r"\\\\\s*$", "", text)
        if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            text = text[1:-1]
    return text


def readings(text: str) -> list[str]:
    """A clean answer with its comma groups joined into numbers and, where that differs, as it is: `1,200` -> [`1200`,
    `1,200`].

    Within brackets a comma separates; `(1,200)` is a pair. No list has a member that begins with 0, so `1,000` is one
    number.
    """
    depth, parts, start, certain = 0, [], 0, False
    for match in re.finditer(r"\\[{}]|[()\[\]]|" + GROUPED.pattern, text):
        found = match[0]
        if found in ("(", "[", r"\{"):
            depth += 1
        elif found in (")", "]", r"\}"):
            depth -= 1
        elif depth <= 0:
            certain |= ",0" in found
            parts += [text[start : match.start()], found.replace(",", "")]
            start = match.end()
    joined = "".join(parts) + text[start:]
    return [joined] if joined == text or certain else [joined, text]


def _ascii(text: str) -> str:
    """Characters outside ASCII as their LaTeX; what has none stays."""
    if text.isascii():
        return text
    text = re.sub(f"[{''.join(RAISED)}]+", lambda m: "^{" + "".join(RAISED[c] for c in m[0]) + "}", text)
    text = re.sub(f"[{''.join(LOWERED)}]+", lambda m: "_{" + "".join(LOWERED[c] for c in m[0]) + "}", text)
    text = re.sub(r"([√∛∜])\s*([\d.]+|\([^()]*\)|[^\W\d_])?", _root, text)
    return "".join(map(_character, text))


def _root(match: re.Match) -> str:
    index = {"√": "", "∛": "[3]", "∜": "[4]"}[match[1]]
    return rf"\sqrt{index}" + (f"{{{_ascii(match[2])}}}" if match[2] else " ")


def _character(c: str) -> str:
    if c.isascii():
        return c
    if c in SYMBOLS:
        return SYMBOLS[c]
    if "\uff01" <= c <= "\uff5e":  # full width
        return chr(ord(c) - 0xFEE0)
    category = unicodedata.category(c)
    if category == "Nd":
        return str(unicodedata.digit(c))
    if category == "Zs":
        return " "
    if category == "Cf":  # zero width
        return ""
    if unicodedata.decomposition(c).startswith("<fraction>"):
        above, below = unicodedata.normalize("NFKC", c).split("⁄")
        return rf"\frac{{{above}}}{{{below}}}"
    plain = unicodedata.normalize("NFKC", c)  # mathematical alphabets, ligatures, the ohm sign
    return "".join(map(_character, plain)) if plain != c else c
