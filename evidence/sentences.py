"""Sentences about data, each with the condition that makes it true; `python -m evidence.sentences` lists all.

A sentence of a page with a number or a direction ("gains", "fewer") is followed by a comment, which a test evaluates:

    The place gains 22.4 points.<!-- holds: lape_place "beside, std 1 - once, std 1" @ zoom 40 low > 0 mean -->

A clause is a contrast of contrasts.csv, in either sign, or the score of a choice, with `[variant]` and `@ condition`,
and then statistics, each alone or compared: mean, low, high, answer, seeds, margin, rank (of a score, 1 the highest).
Others are `task "NAME" larger = 0` (answers in a table of docs/which.md), `built STUDY "CHOICE" FACT = 0.02` (of built
models; without a choice, of all), `debias "camvid, mean" match labels` (before and after, of docs/data/pretrained.json)
and `LEVEL = 0.05`. A clause that begins with a quote has the data of the one before.
In a sentence

- each number is a value of a clause, rounded to the digits printed, with its sign if one is printed;
- each word of a direction has a clause of its direction; after a negation, one of another.

`<!-- says: definition -->` is for a sentence that says nothing about data.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from evidence.built import differences as other_facts
from evidence.built import read_built
from evidence.choices import ranked
from evidence.contrasts import Registry, differences, parse
from graticule.lab.studies.results import TRAINED
from graticule.lab.studies.significance import LEVEL

#: The pages; of README.md captions and conditions, of the page of costs what is before its first heading of a table.
PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("which", "why_lape", "results", "extrapolation")),
    *(f"docs/results/{name}.md" for name in ("lape_place", "gym", "costs")),
)
#: Words of a direction: above zero, below zero, and others.
DIRECTIONS = {
    "up": "larger|largest|better|best|higher|highest|more|most|gain|gains|gained|beats?|helps?|keeps?|improves?|faster",
    "down": "smaller|smallest|worse|worst|lower|lowest|less|least|fewer|fewest|loses?|harms?|reduces?|slower|costs",
    "other": "within the margin|no difference|equally|as much|as good|nothing|half|twice|matters?|differs?|beyond zero",
}
#: Text that is a name, or compares no scores.
NAMES = re.compile(
    r"CIFAR-10|top-1|\b[123]-D\b|\bat (?:most|least)\b|\d{4}-\d\d-\d\d|[Ww]hy LaPE helps|"
    r"\b(?:larger|smaller|more|fewer|less|most) (?:images?|canvas|tables?|tokens|cells|layers?|seeds|objects|models)\b"
)
_NEGATION = re.compile(r"\b(?:not|no|none|neither|nor|never|without)\b[^,;:]*$", re.IGNORECASE)
_WORDS = ("three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NUMBERS = dict(zip(_WORDS, range(3, 13), strict=True))
OPERATORS = {"<": operator.lt, ">": operator.gt, "=": operator.eq}
STATISTICS = "mean|low|high|answer|seeds|margin|rank|larger|smaller"
_STATISTIC = rf" ({STATISTICS})(?: ([<>=]) (.+?))?(?= (?:{STATISTICS})\b|$)"
_CLAUSE = re.compile(
    r'(?:(\w+) )?"([^"]+)"(?: \[([^\]]+)\])?(?: @ (.+?))?'
    rf"((?: (?:{STATISTICS})(?: [<>=] (?:(?! (?:{STATISTICS})\b).)+)?)+)"
)
#: Comments; code and emphasized terms; targets of links and other marks.
_MARKS = re.compile(r"(<!--.*?-->)|(`[^`]*`|(?<!\*)\*[^*]+\*(?!\*))|\]\([^)]*\)|[!\[\]*]")


@dataclass(frozen=True)
class Sentence:
    """A sentence: its page, its text without code and comments, and its comments."""

    page: str
    text: str
    comments: tuple[str, ...]

    @property
    def numbers(self) -> list[str]:
        """Its numbers, as printed; words as digits."""
        claim = NAMES.sub("", self.text)
        words = [str(NUMBERS[word]) for word in re.findall(r"\w+", claim.lower()) if word in NUMBERS]
        return words + re.findall(r"(?<![\w.,/-])[+-]?\d[\d,]*(?:\.\d+)?(?![\w-])", claim)

    @property
    def directions(self) -> list[tuple[str, str, bool]]:
        """Its words of a direction, their directions, and whether a negation is before each."""
        claim, found = NAMES.sub("", self.text), []
        for direction, words in DIRECTIONS.items():
            for match in re.finditer(rf"\b(?:{words})\b", claim, re.IGNORECASE):
                found.append((match[0].lower(), direction, bool(_NEGATION.search(claim[: match.start()]))))
        return found

    def problems(self, registry: Registry) -> list[str]:
        """Describe what is missing or false."""
        if "says: definition" in self.comments or self.text.endswith("?"):
            return []
        if not self.comments:
            return ["has no condition"] if self.numbers or self.directions else []
        values: list[Any] = []
        met, problems, data = set(), [], ""
        for clause in map(str.strip, "; ".join(self.comments).replace("holds:", "").split(";")):
            data = clause.split(' "')[0] if ' "' in clause and clause[0] != '"' else data
            try:
                for value, direction, text in evaluate(clause, data, registry):
                    values.append(value)
                    met.add(direction)
                    problems += [f"is false: {text}, got {value}"] if direction == "false" else []
            except (ValueError, LookupError, TypeError, OSError) as error:
                problems.append(f"cannot be evaluated: {clause!r} ({error})")
        problems += [f"has the number {number} of no clause" for number in self.numbers if not printed(number, values)]
        for word, direction, negated in self.directions:
            right = met - {direction, "false"} if negated else met & {direction}
            if word in ("no difference", "within the margin"):
                right = {value for value in values if word in str(value)}
            if not (values if direction == "other" and not word.startswith(("no ", "with")) else right):
                problems.append(f"has the word {'not ... ' * negated}{word!r} of no clause")
        return problems


def printed(number: str, values: list[Any]) -> bool:
    """Return whether a printed number is a value, or a number in its text, at the digits printed."""
    plain = number.replace(",", "")
    decimals = len(plain.partition(".")[2])
    for value in values:
        known = [float(text) for text in re.findall(r"-?\d+(?:\.\d+)?", value)] if isinstance(value, str) else [value]
        for exact in (*known, *(100 * x for x in known if 0 < x < 1)):
            signed = f"{round(exact, decimals) + 0.0:+.{decimals}f}"
            if plain in (signed, signed[1:]):
                return True
    return False


def evaluate(clause: str, data: str, registry: Registry) -> Iterator[tuple[Any, str, str]]:
    """Yield value, direction ('false' if it does not hold) and text of every statistic of a clause."""
    if match := re.fullmatch(r'built (\w+)(?: "([^"]+)")? (\w+) = (.+)', clause):
        built = read_built(registry.folder, match[1])
        models = [facts for (choice, _), facts in built.items() if match[2] in (None, choice)]
        wanted: Any = float(match[4]) if match[3] == "std" else match[4]
        other = [facts for facts in models if other_facts(facts, {match[3]: wanted})]
        yield (other or models)[0][match[3]], "false" if other else "other", clause
    elif match := re.fullmatch(r'debias "([^"]+)" ([a-z ]+)', clause):
        measured = json.loads((registry.folder / "pretrained.json").read_text())["debias"][match[1]]
        yield from ((part["value"], "other", clause) for name in match[2].split() for part in measured[name])
    elif match := re.fullmatch(r"LEVEL = (\S+)", clause):
        yield LEVEL, "other" if float(match[1]) == LEVEL else "false", clause
    elif match := _CLAUSE.fullmatch(clause):
        known = statistics(match[1] or data, match[2], match[3] or "", match[4] or TRAINED, registry)
        for name, sign, wanted in re.findall(_STATISTIC, match[5]):
            value = known[name]
            holds = wanted in value if name == "answer" else not sign or OPERATORS[sign](value, float(wanted))
            up = wanted == "larger" or (name, sign, wanted) == ("rank", "=", "1")
            up |= name in ("mean", "low") and sign == ">" and float(wanted) >= 0
            down = wanted == "smaller" or (name in ("mean", "high") and sign == "<" and float(wanted) <= 0)
            direction = "up" if up else "down" if down else "other"
            yield value, direction if holds else "false", f"{clause}, {name} {sign} {wanted}"
    else:
        raise ValueError("it must have one of the forms that evidence/sentences.py names")


def statistics(data: str, text: str, variant: str, at: str, registry: Registry) -> dict[str, Any]:
    """Return the statistics of a contrast, of the score of a choice, or of a task."""
    if data == "task":
        answers = [contrast.answer for *_, contrast in ranked(registry, text)]
        return {name: sum(answer.startswith(name) for answer in answers) for name in ("larger", "smaller")}
    terms, scores = parse(text, variant, at), registry.scores(data)
    if len(terms) == 1:
        means = {name: fmean(by.values()) for (name, *place), by in scores.items() if place == [variant, at]}
        rank = 1 + sum(mean > means[text] for mean in means.values())
        return {"mean": means[text], "rank": rank, "seeds": len(differences(terms, scores))}
    contrast = registry.find(data, terms)
    known = {"answer": contrast.answer, "seeds": len(contrast.values), "margin": contrast.margin}
    return known | ({"mean": test.difference, "low": test.low, "high": test.high} if (test := contrast.test) else {})


def sentences(page: str, text: str) -> Iterator[Sentence]:
    """Yield the sentences of a page, and its table cells that have a condition; generated parts and code have none."""
    if page.endswith("costs.md"):
        text = text[: text.index("\n## ")]
    text = re.sub(r"<!-- ([^>]+?): begin.*?<!-- \1: end -->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^(```|:::).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    cells = re.findall(r"(?<=\| )[^|\n]*<!-- holds[^|\n]*", text)
    text = re.sub(r"^(?:\||#| {4}).*$", "", text, flags=re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n(?=- )", text)
    if page == "README.md":
        captions = [number for number, block in enumerate(blocks) if "![" in block]
        captions = {number + more for number in captions for more in (0, 1)}
        blocks = [block for number, block in enumerate(blocks) if number in captions or "<!-- holds" in block]
    for block in (*blocks, *cells):
        flat = _MARKS.sub(lambda mark: mark[1] or (mark[2] and "`") or "", " ".join(block.split()))
        for part in re.sub(r"([.?])((?:<!--.*?-->)*) (?=[A-Z`†])", "\\1\\2\n", flat).split("\n"):
            if shown := re.sub(r"<!--.*?-->", "", part).strip():
                yield Sentence(page, shown, tuple(re.findall(r"<!-- *(.*?) *-->", part)))


def read_pages(top: Path) -> list[Sentence]:
    """Return the sentences of all pages."""
    return [sentence for page in PAGES for sentence in sentences(page, (top / page).read_text(encoding="utf-8"))]


if __name__ == "__main__":
    registry = Registry(Path("docs/data"))
    for sentence in read_pages(Path()):
        lines = [*sentence.comments, *(f"!! {text}" for text in sentence.problems(registry))]
        if lines:
            print(f"{sentence.page}: {sentence.text}", *lines, sep="\n  ")
