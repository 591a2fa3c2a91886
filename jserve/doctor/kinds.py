"""Says what a varying piece of text looks like. Knows spellings only: no tokens, no templates."""

from __future__ import annotations

import re

MAX_VALUE_CHARS = 200  # a longer span is prose, whatever values it holds
_DATE = r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]*\.?"
_WORD_DATE = rf"{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}|\d{{1,2}}\.? {_MONTH},? \d{{4}}"
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AP]M\b)?"
_ZONE = r"(?: ?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2})\b)?"
_UNIX_TIME = r"\b1\d{9}(?:\.?\d{3,9})?\b"  # in seconds or finer, of this century
# In order of preference where two begin at the same character.
_VALUES = {
    "request id (UUID)": r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b",
    "timestamp": rf"(?:{_DATE}|{_WORD_DATE})(?:T|,? (?:at )?){_TIME}{_ZONE}|{_UNIX_TIME}",
    "date": rf"\b(?:{_DATE}|{_WORD_DATE})\b",
    "time of day": rf"\b{_TIME}{_ZONE}",
    "hexadecimal id": r"\b(?:0x)?(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b",
    "id": r"\b(?=[\w-]*\d)(?=[\w-]*[a-z])[\w-]{8,}\b",
}
_VALUE = re.compile(
    "|".join(f"(?P<k{i}>{pattern})" for i, pattern in enumerate(_VALUES.values())), re.IGNORECASE
)
_IDS = re.compile(r"(?:<\d+>|\.| )+")  # what a log of token ids shows without its tokenizer
_NUMBER = re.compile(r"[+-]?\d[\d.,]*")
_NAME = re.compile(r"[^\W\d_a-z][\w'’-]*\.?(?: [^\W\d_a-z][\w'’-]*\.?){0,3}")
_PUNCTUATION = " \t\r\n\"'`.,:;!()[]{}<>#*=|"


def kind_of(before: str, span: str, after: str) -> str:
    """Returns what `span`, in its surroundings, looks like: the kinds of its values, or "number or
    counter", "name", "free text". A value may reach beyond the span: prompts of one hour differ in
    the minutes of their timestamp only."""
    if _IDS.fullmatch(span):
        return "token ids"
    begin, end = len(before), len(before) + len(span)
    stripped = span.strip(_PUNCTUATION)
    first = begin + span.find(stripped)
    text = before + span + after
    kinds: dict[str, bool] = {}  # -> whether the span begins with it
    for match in _VALUE.finditer(text):
        if match.start() < end and match.end() > begin:
            kind = list(_VALUES)[int(str(match.lastgroup)[1:])]
            kinds.setdefault(kind, match.start() <= first)
    if kinds and len(span) <= MAX_VALUE_CHARS:
        return ", ".join(kinds)
    if any(kinds.values()):
        return next(iter(kinds))
    for match in _NUMBER.finditer(text):
        if match.start() <= first and match.end() >= first + len(stripped):
            return "number or counter"
    return "name" if _NAME.fullmatch(stripped) else "free text"
