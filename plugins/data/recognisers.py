"""Finds personal data and secrets in a text: e-mail addresses, phone numbers, IBANs, cards, keys.

phonenumbers (Google's libphonenumber) decides on phone numbers, python-stdnum on the check digits
and the structure of IBANs (ISO 13616) and cards (ISO/IEC 7812). The patterns here only find where
a number may begin and end.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

# Countries whose numbers are known without a country code: those with most speakers of the
# languages that instruction data is written in.
REGIONS: tuple[str, ...] = ("US", "GB", "DE", "AT", "CH", "FR", "NL", "BE", "IT", "ES", "PT")
REGIONS += ("PL", "SE", "IE", "IN", "BR", "AU", "JP")

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
# The form of an account, whose groups are no numbers of their own if its check digits are wrong.
_ACCOUNT = re.compile(
    r"(?<![A-Za-z0-9])[A-Za-z]{2}[0-9]{2}(?:[ \u00a0-][0-9]{4}){3,7}(?:[ \u00a0-][0-9]{1,3})?(?!\w)"
)
_CARD = re.compile(
    r"[0-9](?<![\w.].)(?<![A-Za-z][-_/].)[0-9]*(?:[ \u00a0\u202f-][0-9]+)*(?![-_]?\w|\.[0-9])"
)
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
        if len(match.group()) < 13 or _ACCOUNT.search(text, max(match.start() - 5, 0), match.end()):
            continue
        groups = list(re.finditer("[0-9]+", match.group()))
        for first, last in _windows([len(each.group()) for each in groups], 13, 19):
            part = groups[first : last + 1]
            # Printed in groups of four, or of 4, 6 and 5; other groups are numbers side by side.
            if len(part) > 1 and not all(len(each.group()) <= 6 for each in part):
                continue
            if len(part) > 1 and len(part[0].group()) != 4:
                continue
            digits = "".join(each.group() for each in part)
            # The number below a bar code has 13 digits as old cards have, and its own check digit.
            if len(digits) == 13 and ean.is_valid(digits):
                continue
            if _ISSUER.fullmatch(digits) and luhn.is_valid(digits):
                yield match.start() + part[0].start(), match.start() + part[-1].end()
                break


def _windows(sizes: Sequence[int], least: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last of neighbouring groups that have least to most digits together."""
    for first in range(len(sizes)):
        total = 0
        for last in range(first, len(sizes)):
            total += sizes[last]
            if total > most:
                break
            if total >= least:
                yield first, last


# Phone numbers -------------------------------------------------------------------------------

_SPACE = (" ", "\u00a0")
_BETWEEN = r"[ \u00a0\u2009\u202f.\u2010-\u2013/()-]"
# A look behind comes after the first character, because Python finds that one much faster.
_RUN = re.compile(
    r"[0-9+(](?<!\w.)(?<![0-9][.,:/-].)(?<![A-Za-z-][-/].)[+(]{0,2}"
    rf"(?:{_BETWEEN}{{0,3}}[0-9]){{6,24}}(?![-/=_]?\w)"
)
_GROUP = re.compile("[0-9]+")
# The form of a phone number without such a word before it.
_LIKELY = re.compile(
    rf"[+(]|(?<!\d)0\d|(?<!\d)[2-9]\d\d{_BETWEEN}{{1,3}}\d{{3}}{_BETWEEN}{{1,3}}\d{{4}}(?!\d)"
)
_DATE = re.compile(
    r"(?<!\d)(?<!\d[./-])(?:\d{4}([./-])[01]?\d\1[0-3]?\d"
    r"|[0-3]?\d([./-])[0-3]?\d\2(?:\d{4}|\d\d))(?![./-]?\d)"
)
_ZIP_CODE = re.compile(r"(?<=\b[A-Z]{2}\s)\d{5}-\d{4}(?!\d)")
_IP = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
# The text before a number is better evidence than its digits: English, German, French, Spanish.
_CALLED = re.compile(
    r"(?:\b(?:tele?(?:phone|fono?|fon|fax)?|phone|ph|fax|call|dial|ring|sms|whats ?app|cell"
    r"(?:ular)?|mobile?|m[oó]vil|handy|hotline|ruf(?:nummer)?|anruf\w*|erreich\w+|portable"
    r"|t[eé]l(?:[eé]phone)?|tfno?|appele[zr]|text (?:me|us))\b|[☎📞📱])"
    r"(?:[\s.:#=(-]*\b(?:phone|number|nummer|num[eé]ro|no|nr|num|is|me|us|at|on|under|unter|ist|am"
    r"|au|al|es))*[\s.:#=]*\Z",
    re.IGNORECASE,
)
_NO_PHONE = re.compile(
    r"\b(?:isbn(?:-1[03])?|issn|ean|gtin|upc|sku|id|order|invoice|ref(?:erence)?|ticket|serial|case"
    r"|part|item|tracking|account|konto|kunden|auftrags?|bestell(?:ung)?|rechnung|artikel|commande"
    r"|facture|pedido|version|build)[\s.:#-]*(?:no|nr|number|nummer|num|id)?[\s.:#=-]*\Z",
    re.IGNORECASE,
)


def _phones(text: str, regions: Sequence[str]) -> Iterator[Span]:
    for match in _RUN.finditer(text):
        begin = match.start()
        before = text[max(begin - 28, 0) : begin]
        called = bool(_CALLED.search(before))
        if not called and not _LIKELY.search(match.group()):
            continue
        if called or not _NO_PHONE.search(before) or "+" in match.group()[:2]:
            groups = list(_GROUP.finditer(text, begin, match.end()))
            for part in _undated(text, groups):
                yield from _phones_of(text, part, called and part[0].start() <= begin + 2, regions)


def _undated(text: str, groups: Sequence[re.Match[str]]) -> Iterator[list[re.Match[str]]]:
    """Yield the groups of digits between dates, addresses of hosts and accounts."""
    begin, end = groups[0].start(), groups[-1].end()
    others = [pattern.finditer(text, begin, end) for pattern in (_DATE, _IP, _ZIP_CODE)]
    others.append(_ACCOUNT.finditer(text, max(begin - 5, 0), end))
    taken = [match.span() for each in others for match in each]
    part: list[re.Match[str]] = []
    for group in groups:
        if not any(one <= group.start() < other for one, other in taken):
            part.append(group)
        elif part:
            yield part
            part = []
    if part:
        yield part


def _phones_of(
    text: str, groups: Sequence[re.Match[str]], called: bool, regions: Sequence[str]
) -> Iterator[Span]:
    first = skipped = 0
    while first < len(groups):
        begin = groups[first].start()
        marked = begin > 0 and text[begin - 1] in "+("
        last = None
        # One other number may stand before, such as a postcode, unless all gaps are the same.
        near = skipped == 1 and text[begin - 1] in _SPACE
        near = near and (
            text[groups[first].end() :][:1] not in _SPACE or _is_american(groups[first:])
        )
        if marked or near or not skipped:
            last = _phone_from(text, groups[first:], skipped == 0, called and first == 0, regions)
        if last is None:
            first, skipped = first + 1, skipped + 1
            continue
        end = groups[first + last].end()
        while begin and (
            text[begin - 1] == "+" or (text[begin - 1] == "(" and ")" in text[begin:end])
        ):
            begin -= 1
        yield begin, end
        first, skipped = first + last + 1, 0


def _phone_from(
    text: str, groups: Sequence[re.Match[str]], leads: bool, called: bool, regions: Sequence[str]
) -> int | None:
    """Return the index of the last group of a phone number that begins with the first group.

    leads: no other digits stand before it. called: a word says that a phone number follows.
    """
    import phonenumbers

    begin = groups[0].start()
    lead = text[max(begin - 2, 0) : begin]
    plus = "+" if lead.endswith(("+", "+(")) else ""
    parts = {
        last: plus + text[begin : groups[last].end()]
        for first, last in _windows([len(group.group()) for group in groups], 7, 17)
        # 055-0517158-5129451 does not end in its middle.
        if first == 0 and (plus or not re.match(r"[-./]\d", text[groups[last].end() :][:2]))
    }
    valid, possible = phonenumbers.is_valid_number, phonenumbers.is_possible_number
    one = groups[0].group()
    area = lead.endswith("(") and text[groups[0].end() :][:1] == ")"
    if not parts:
        return None
    if plus:
        made = _longest(parts, [None], valid)
        return _longest(parts, [None], possible) if made is None else made
    if re.match("00(?!0)", one) or (one == "011" and len(groups) > 1):
        home = ["US"] if one == "011" else ["DE"]
        made = _longest(parts, home, valid)
        # Zeros before an id, or within one, read like a country's code; an id has no gaps.
        unsure = made is None and leads and len(groups) > 2
        return _longest(parts, home, possible) if unsure else made
    if called:
        made = _longest(parts, regions, valid)
        return _longest(parts, regions, possible) if made is None else made
    american = next((each for each in regions if each in ("US", "CA")), None)
    if american and _is_american(groups):
        last = 3 if one == "1" else 2
        sure = area or not re.search(r"\d[ \u00a0]\d", parts.get(last, ""))
        only = {last: parts[last]} if last in parts else {}
        return _longest(only, [american], possible if sure else valid)
    if area:
        return _longest(parts, regions, valid)
    if re.match("0[1-9]", one):
        # Without gaps an id looks the same, so that only mobile numbers count.
        return _longest(parts, regions, valid if len(one) < 7 else _is_mobile)
    return None


def _longest(
    parts: Mapping[int, str], regions: Sequence[str | None], check: Callable[[Any], bool]
) -> int | None:
    """Return the key of the last part that meets a check as a number of one of the regions."""
    import phonenumbers

    for last in sorted(parts, reverse=True):
        for region in regions:
            try:
                if check(phonenumbers.parse(parts[last], region)):
                    return last
            except phonenumbers.NumberParseException:
                continue
    return None


def _is_american(groups: Sequence[re.Match[str]]) -> bool:
    """Whether groups begin as those of 212 555 0187 or 1-212-555-0187."""
    if groups[0].group() == "1":
        groups = groups[1:]
    three = [group.group() for group in groups[:3]]
    return [len(each) for each in three] == [3, 3, 4] and three[0][0] > "1"


def _is_mobile(number: Any) -> bool:
    import phonenumbers

    kinds = (phonenumbers.PhoneNumberType.MOBILE, phonenumbers.PhoneNumberType.FIXED_LINE_OR_MOBILE)
    long = number.national_number >= 10**8
    return (
        long and phonenumbers.is_valid_number(number) and phonenumbers.number_type(number) in kinds
    )


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
