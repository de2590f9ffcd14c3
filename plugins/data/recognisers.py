"""Finds personal data and secrets in a text: e-mail addresses, phone numbers, IBANs, cards, keys.

phonenumbers (Google's libphonenumber) finds phone numbers, python-stdnum checks IBANs (ISO 13616)
and cards (ISO/IEC 7812); the patterns here only find where those may begin and end.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence

# Countries whose numbers are known without a country code. Each takes a pass over a text, and masks
# some more numbers that are none.
REGIONS: tuple[str, ...] = ("US", "GB", "DE", "FR", "IN", "BR")

_GAP = "[ \u00a0\u2009\u202f.\u2010-\u2013-]"
# Patterns of texts that may contain a kind; Arrow searches all rows for them.
SUSPECT = {
    "secret": r"KEY-----|\b(?:sk|rk|hf|gh[pousr]|github_pat|xox|AKIA|ASIA|AIza|eyJ|glpat)",
    "email": "@",
    "iban": rf"[A-Za-z]{{2}}[0-9]{{2}}(?:{_GAP}?[A-Za-z0-9]){{11}}",
    "card": "[0-9](?:[ \u00a0\u202f-]?[0-9]){12}",
    "phone": rf"[0-9](?:(?:{_GAP}|[/()]){{0,3}}[0-9]){{6}}",
}

Span = tuple[int, int]
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|[nrt])")

# Keys and e-mail addresses -------------------------------------------------------------------

_SECRET = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:hf_[A-Za-z0-9]{20,}|sk-(?:proj-|ant-)?[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}"
    r"|github_pat_\w{22,}|[sr]k_live_[A-Za-z0-9]{16,}"
    r"|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{35}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})"
)
# An accent may be a character of its own, which is no letter for \w.
_LETTER = r"[\w\u0300-\u036f]"
_LOCAL = re.compile(rf"\w(?:{_LETTER}|[.%+'-])*\Z")
_DOMAIN = re.compile(
    rf"(?:{_LETTER}(?:{_LETTER}|-){{0,62}}\.){{1,10}}(?:xn--[a-z0-9-]{{2,59}}|[^\W\d_]{{2,63}})(?!\w)"
)


def _secrets(text: str, regions: Sequence[str]) -> Iterator[Span]:
    for match in _SECRET.finditer(text):
        yield match.span()


def _emails(text: str, regions: Sequence[str]) -> Iterator[Span]:
    # From each @ to both sides: a search from the left would look at every word of the text.
    at = text.find("@")
    while at >= 0:
        begin = max(at - 64, 0)
        local, domain = _LOCAL.search(text[begin:at]), _DOMAIN.match(text, at + 1)
        # git@host names a repository, not a person's address.
        if local and domain and local.group() != "git":
            yield begin + local.start(), domain.end()
        at = text.find("@", at + 1)


# IBANs and cards -----------------------------------------------------------------------------

# In a lookahead, so that a word of the same form before an IBAN does not swallow its beginning.
_IBAN = re.compile(
    rf"(?<![A-Za-z0-9])(?=([A-Za-z]{{2}}[0-9]{{2}}(?:{_GAP}?[A-Za-z0-9]){{11,30}}(?![A-Za-z0-9])))"
)
_WORD = re.compile(r"[A-Za-z0-9]+")
_CARD = re.compile(r"(?<![\w.])(?=([0-9](?:[ \u00a0\u202f-]?[0-9]){12,}(?![\w-]|\.[0-9])))")
# In one piece, or printed in groups of four, or of 4, 6 and 5.
_PRINTED = re.compile(r"\d+|\d{4}(?:\D\d{1,6})+")
# Visa, Mastercard, American Express, Diners, JCB, and UnionPay, Discover and Maestro.
_ISSUER = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|5[0-8]\d{14,17}|2[2-7]\d{14}|3[47]\d{13}|3[0689]\d{12}"
    r"|3[05689]\d{14,17}|6\d{15,18}"
)


def _ibans(text: str, regions: Sequence[str]) -> Iterator[Span]:
    from stdnum import iban

    for match in _IBAN.finditer(text):
        begin = match.start()
        # Each end of a group is tried: words may follow an IBAN, and its country says its length.
        for word in _WORD.finditer(match.group(1)):
            plain = "".join(_WORD.findall(match.group(1)[: word.end()]))
            if 15 <= len(plain) <= 34 and iban.is_valid(plain, check_country=False):
                yield begin, begin + word.end()
                break


def _cards(text: str, regions: Sequence[str]) -> Iterator[Span]:
    from stdnum import ean, luhn

    for match in _CARD.finditer(text):
        begin = match.start()
        # Each end of a group is tried: a date or a code may follow a card.
        for word in _WORD.finditer(match.group(1)):
            part = match.group(1)[: word.end()]
            digits = "".join(_WORD.findall(part))
            # The number below a bar code has 13 digits as old cards have, and its own check digit.
            if len(digits) == 13 and ean.is_valid(digits):
                continue
            known = _PRINTED.fullmatch(part) and _ISSUER.fullmatch(digits)
            if known and luhn.is_valid(digits):
                yield begin, begin + word.end()
                break


# Phone numbers -------------------------------------------------------------------------------

# The form of a phone number; in one piece it is more often an id, but for 01701234567.
_WRITTEN = re.compile(r"[+(]|00|1[ -]|\d{2,}\D")
# Of a fraction, or of a call in code.
_NO_PHONE = re.compile(r"[\w.]\Z")


def _phones(text: str, regions: Sequence[str]) -> Iterator[Span]:
    from phonenumbers import Leniency, PhoneNumberMatcher, PhoneNumberType, number_type

    for region in regions:
        for match in PhoneNumberMatcher(text, region, leniency=Leniency.STRICT_GROUPING):
            mobile = number_type(match.number) == PhoneNumberType.MOBILE
            written = _WRITTEN.match(match.raw_string)
            if not written and not (mobile and match.raw_string.startswith("0")):
                continue
            if not _NO_PHONE.search(text[: match.start]):
                yield match.start, match.end


# All kinds -----------------------------------------------------------------------------------

# In this order: a card's digits could be read as a phone number.
_FINDERS: dict[str, Callable[[str, Sequence[str]], Iterator[Span]]] = {
    "secret": _secrets,
    "email": _emails,
    "iban": _ibans,
    "card": _cards,
    "phone": _phones,
}


def find(
    text: str, regions: Sequence[str] = REGIONS, kinds: Collection[str] = tuple(_FINDERS)
) -> list[tuple[int, int, str]]:
    """Return begin, end and kind of the findings in a text, in order and without overlaps.

    Args:
        regions: ISO 3166 codes of the countries whose phone numbers count without a country code.
        kinds: those to search for.
    """
    findings: list[tuple[int, int, str]] = []
    for kind, finder in _FINDERS.items():
        for begin, end in finder(text, regions) if kind in kinds else ():
            if all(end <= one or other <= begin for one, other, _ in findings):
                findings.append((begin, end, kind))
    return sorted(findings)


def replaced(
    text: str, findings: Sequence[tuple[int, int, str]], make: Callable[[str, str], str]
) -> str:
    """Return the text with each finding replaced by make(kind, value)."""
    parts, place = [], 0
    for begin, end, kind in findings:
        parts += [text[place:begin], make(kind, text[begin:end])]
        place = end
    return "".join([*parts, text[place:]])


def hidden(text: str) -> str:
    """Return a text that shows only the form of personal data: x for letters, 9 for digits.

    For reports: a reader sees what a pattern matched, but not the data.
    """
    return replaced(text, find(text), lambda kind, value: _form(value))


def hidden_json(text: str) -> str:
    """As hidden, for JSON that may be broken: its escapes are decoded first."""

    def character(match: re.Match[str]) -> str:
        code = int(match.group(1) or "20", 16)
        return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)

    return hidden(_ESCAPE.sub(character, text))


def _form(value: str) -> str:
    letters = re.sub(r"[^\W\d_]", "x", value)
    return re.sub(r"\d", "9", letters)
