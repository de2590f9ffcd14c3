"""Personal data in the forms in which people write it, and numbers that are none."""

import random
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

FORMAT = "text"
# Rows with secrets are dropped otherwise.
STEP = {"personal_data": {"secret": "mask"}}
_BEFORE = ("we wrote yesterday", "my details are", "as agreed", "bitte nutzen Sie", "so it is")
_AFTER = ("thanks and bye", "for all questions", "since last week", "oder wie immer", "he said")
_NAMES = ("anna.schmidt", "jo-h", "m_garcia", "o.brien+news", "li", "Petra.Klein", "x1")
_WORDS = tuple(
    [
        "the",
        "parcel",
        "was",
        "sent",
        "on",
        "monday",
        "and",
        "it",
        "arrives",
        "within",
        "two",
        "days",
        "if",
        "nobody",
        "is",
        "at",
        "home",
    ]
)


def _digits(chance: random.Random, count: int) -> str:
    return "".join(chance.choices("0123456789", k=count))


def _letters(chance: random.Random, count: int) -> str:
    return "".join(chance.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=count))


def _iban(chance: random.Random, only: str = "") -> str:
    """An IBAN of the structure of its country, with its check digits."""
    n, a = (lambda count: _digits(chance, count)), (lambda count: _letters(chance, count))
    structures = {
        "AT": n(16),
        "DE": n(18),
        "FR": n(10) + a(2) + n(9) + n(2),
        "GB": a(4) + n(14),
        "ES": n(20),
        "IT": a(1) + n(10) + n(12),
        "NL": a(4) + n(10),
        "CH": n(5) + n(12),
        "PL": n(24),
    }
    country = only or chance.choice(list(structures))
    rest = structures[country]
    number = int("".join(str(int(each, 36)) for each in f"{rest}{country}00"))
    return f"{country}{98 - number % 97:02d}{rest}"


def _card(chance: random.Random) -> str:
    start, length = chance.choice(
        [("4", 16), ("51", 16), ("55", 16), ("37", 15), ("6011", 16), ("36", 14), ("3530", 16)]
    )
    body = start + _digits(chance, length - len(start) - 1)
    whole = 0
    for place, each in enumerate(reversed(body)):
        whole += sum(divmod(int(each) * 2, 10)) if place % 2 == 0 else int(each)
    return f"{body}{-whole % 10}"


def _grouped(text: str, gap: str, sizes: tuple[int, ...] = (4,)) -> str:
    parts, place = [], 0
    while place < len(text):
        size = sizes[min(len(parts), len(sizes) - 1)]
        parts.append(text[place : place + size])
        place += size
    return gap.join(parts)


def _printed_card(chance: random.Random, gap: str) -> str:
    card = _card(chance)
    return _grouped(card, gap, (4, 6, 5) if len(card) < 16 else (4,))


def _german(chance: random.Random, gap: str, area: str = "") -> str:
    area = area or chance.choice(["89", "30", "40", "69", "221", "711", "351", "7071", "4102"])
    return f"{area}{gap}{chance.randrange(2, 10)}{_digits(chance, chance.choice([5, 6]))}"


def _american(chance: random.Random, gap: str) -> str:
    area = chance.choice(["212", "415", "312", "206", "617", "305", "713", "202"])
    return f"{area}{gap}{chance.randrange(2, 10)}{_digits(chance, 2)}{gap}{_digits(chance, 4)}"


def _pairs(chance: random.Random, gap: str) -> str:
    return gap.join(_digits(chance, 2) for _ in range(4))


def _mail(chance: random.Random, domain: str) -> str:
    return f"{chance.choice(_NAMES)}@{domain}"


Maker = Callable[[random.Random], Any]
# Kind -> form -> value; a pair is the value and what follows it at once.
FORMS: dict[str, dict[str, Maker]] = {
    "email": {
        "plain": lambda c: _mail(c, c.choice(["example.org", "mail.example.co.uk", "x-y.de"])),
        "umlaut domain": lambda c: _mail(c, c.choice(["müller.de", "büro-köln.example.at"])),
        "umlaut as two characters": lambda c: unicodedata.normalize("NFD", _mail(c, "müller.de")),
        "other scripts": lambda c: _mail(c, c.choice(["почта.рф", "例え.jp", "bücher.みんな"])),
        "punycode": lambda c: _mail(c, c.choice(["xn--mller-kva.de", "mail.xn--p1ai"])),
        "umlaut name": lambda c: f"jürgen.groß@{c.choice(['example.org', 'müller.de'])}",
    },
    "iban": {
        "in fours": lambda c: _grouped(_iban(c), " "),
        "compact": _iban,
        "before capitals": lambda c: (_grouped(_iban(c), " "), f" BIC {_letters(c, 8)}"),
        "compact before capitals": lambda c: (_iban(c), f" BIC {_letters(c, 8)}"),
        "before a name": lambda c: (_grouped(_iban(c), " "), " MAX MUSTERMANN GMBH 2026"),
        "lower case": lambda c: _iban(c).lower(),
        "lower case in fours": lambda c: _grouped(_iban(c).lower(), " "),
        "no-break spaces": lambda c: _grouped(_iban(c), "\u00a0"),
        "hyphens": lambda c: _grouped(_iban(c), "-"),
    },
    "card": {
        "compact": _card,
        "in groups": lambda c: _printed_card(c, " "),
        "hyphens": lambda c: _printed_card(c, "-"),
        "before its date": lambda c: (_printed_card(c, " "), f" {c.randrange(1, 13):02d}/27"),
        "before its code": lambda c: (_printed_card(c, " "), f" {_digits(c, 3)}"),
    },
    "phone": {
        "089/123456": lambda c: f"089/{c.randrange(2, 10)}{_digits(c, 5)}",
        "area code and slash": lambda c: f"0{_german(c, '/')}",
        "area code and space": lambda c: f"0{_german(c, ' ')}",
        "(089) 123456": lambda c: f"(0{_german(c, ') ')}",
        "0049 89 123456": lambda c: f"0049 {_german(c, ' ')}",
        "004989123456": lambda c: f"0049{_german(c, '')}",
        "+49 89 123456": lambda c: f"+49 {_german(c, ' ')}",
        "+49 (0)89 123456": lambda c: f"+49 (0){_german(c, ' ')}",
        "German mobile": lambda c: f"017{c.choice('01569')}{c.choice(' /-')}{_digits(c, 7)}",
        "German mobile, compact": lambda c: f"017{c.choice('01569')}{_digits(c, 7)}",
        "212 555 0187": lambda c: _american(c, " "),
        "212-555-0187": lambda c: _american(c, "-"),
        "212.555.0187": lambda c: _american(c, "."),
        "(212) 555-0187": lambda c: "({}) {}-{}".format(*_american(c, " ").split()),
        "+1 212 555 0187": lambda c: f"+1 {_american(c, ' ')}",
        "1-212-555-0187": lambda c: f"1-{_american(c, '-')}",
        "011 49 89 123456": lambda c: f"011 49 {_german(c, ' ')}",
        "London": lambda c: f"020 {c.choice('378')}{_digits(c, 3)} {_digits(c, 4)}",
        "British mobile": lambda c: (
            f"07{c.choice('45789')}{_digits(c, 2)} {c.choice('3456789')}{_digits(c, 5)}"
        ),
        "French": lambda c: f"0{c.choice('12345')} {c.choice('2345678')}{_pairs(c, ' ')[1:]}",
        "French mobile, dots": lambda c: f"06.{c.choice('12345678')}{_pairs(c, '.')[1:]}",
        "Swiss": lambda c: (
            f"044 {c.choice('23456789')}{_digits(c, 2)} {_digits(c, 2)} {_digits(c, 2)}"
        ),
        "Indian, +91": lambda c: f"+91 9{_digits(c, 4)} {_digits(c, 5)}",
        "Brazilian": lambda c: f"(11) 9{c.choice('6789')}{_digits(c, 3)}-{_digits(c, 4)}",
        "Spanish, after tel.": lambda c: (
            f"tel. 91{c.choice('2345678')} {_digits(c, 2)} {_digits(c, 2)} {_digits(c, 2)}"
        ),
        "compact, after call": lambda c: f"call {_american(c, '')}",
        "local, after call": lambda c: f"call {c.randrange(200, 999)}-{_digits(c, 4)}",
    },
    "secret": {
        "hf_": lambda c: f"hf_{_letters(c, 34)}",
        "sk-": lambda c: f"sk-proj-{_letters(c, 30)}",
        "ghp_": lambda c: f"ghp_{_letters(c, 36)}",
        "AKIA": lambda c: f"AKIA{_letters(c, 16)}",
    },
}


def _isbn(chance: random.Random, length: int) -> str:
    if length == 13:
        body = f"978{_digits(chance, 9)}"
        whole = sum(int(each) * (1, 3)[place % 2] for place, each in enumerate(body))
        return f"{body}{-whole % 10}"
    body = f"{chance.choice('013')}{_digits(chance, 8)}"
    whole = sum(int(each) * (10 - place) for place, each in enumerate(body))
    return f"{body}{'0123456789X'[-whole % 11]}"


def _ean(chance: random.Random) -> str:
    body = f"4{_digits(chance, 11)}"
    whole = sum(int(each) * (1, 3)[place % 2] for place, each in enumerate(body))
    return f"{body}{-whole % 10}"


def _wrong(value: str) -> str:
    return f"{value[:-1]}{(int(value[-1]) + 1) % 10}"


def _hexes(chance: random.Random, count: int) -> str:
    return "".join(chance.choices("0123456789abcdef", k=count))


# Numbers that are no personal data.
ORDINARY: dict[str, Maker] = {
    "order id": lambda c: f"order {_digits(c, c.randrange(6, 15))}",
    "bare id": lambda c: f"parcel {c.randrange(1, 10)}{_digits(c, c.randrange(6, 13))}",
    "id with zeros": lambda c: f"ticket 00{_digits(c, c.randrange(6, 11))}",
    "bare id with zeros": lambda c: f"parcel 00{_digits(c, c.randrange(6, 11))}",
    "id with dashes": lambda c: f"{_digits(c, 3)}-{_digits(c, 7)}-{_digits(c, 7)}",
    "id with letters": lambda c: f"{_letters(c, 2)}-{c.randrange(2020, 2027)}-{_digits(c, 6)}",
    "date": lambda c: c.choice(
        ["2026-{:02d}-{:02d}", "{1:02d}.{0:02d}.2026", "{0:02d}/{1:02d}/2026"]
    ).format(c.randrange(1, 13), c.randrange(1, 29)),
    "dates": lambda c: f"01.02.2026 - 0{c.randrange(1, 10)}.03.2026",
    "time": lambda c: (
        f"2026-11-{c.randrange(10, 29)}T{c.randrange(10, 24)}:30:{_digits(c, 2)}.{_digits(c, 6)}Z"
    ),
    "seconds": lambda c: f"at 17{_digits(c, 8)} or 17{_digits(c, 11)}",
    "price": lambda c: c.choice(["{}.{},00 €", "${},{}.00", "{} {} EUR"]).format(
        c.randrange(1, 900), _digits(c, 3)
    ),
    "thousands": lambda c: f"{c.randrange(1, 900)} {_digits(c, 3)} {_digits(c, 3)} people",
    "long thousands": lambda c: (
        f"{c.randrange(1, 9)},{_digits(c, 3)},{_digits(c, 3)},{_digits(c, 3)}"
    ),
    "version": lambda c: ".".join(str(c.randrange(0, 40)) for _ in range(4)),
    "kernel": lambda c: f"6.{c.randrange(20)}.0-{_digits(c, 3)}.{_digits(c, 3)}.1.el9",
    "address of a host": lambda c: ".".join(str(c.randrange(1, 255)) for _ in range(4)),
    "ISBN-13": lambda c: f"ISBN {_grouped(_isbn(c, 13), c.choice(['-', '']), (3, 1, 4, 4, 1))}",
    "bare ISBN-13": lambda c: _grouped(_isbn(c, 13), c.choice(["-", ""]), (3, 1, 4, 4, 1)),
    "ISBN-10": lambda c: f"ISBN {_grouped(_isbn(c, 10), c.choice(['-', '']), (1, 3, 5, 1))}",
    "bare ISBN-10": lambda c: _grouped(_isbn(c, 10), c.choice(["-", ""]), (1, 3, 5, 1)),
    "EAN": _ean,
    "hash": lambda c: _hexes(c, c.choice([7, 12, 40, 64])),
    "UUID": lambda c: "-".join(_hexes(c, size) for size in (8, 4, 4, 4, 12)),
    "code": lambda c: (
        f"x[{c.randrange(99)}] = 0x{_hexes(c, 8)} + {_digits(c, 9)}; // {_digits(c, 2)}"
    ),
    "call in code": lambda c: f"range({c.randrange(1, 9)}{_digits(c, 8)}, {_digits(c, 10)})",
    "array in code": lambda c: f"[{', '.join(_digits(c, 4) for _ in range(8))}]",
    "package": lambda c: f"npm i @types/node@{c.randrange(30)}.{c.randrange(20)}.{c.randrange(20)}",
    "repository": lambda c: f"git clone git@github.com:org{c.randrange(99)}/code.git",
    "decorator": lambda c: f"@app.route('/v{c.randrange(9)}') and @user{c.randrange(999)}",
    "coordinates": lambda c: f"48.{_digits(c, 6)}, 11.{_digits(c, 6)}",
    "fraction": lambda c: f"0.{_digits(c, 12)}",
    "sum": lambda c: f"{_digits(c, 4)} + {_digits(c, 5)} = {_digits(c, 6)}",
    "row of numbers": lambda c: " ".join(str(c.randrange(1, 100)) for _ in range(9)),
    "row of years": lambda c: " ".join(str(c.randrange(1900, 2030)) for _ in range(5)),
    "size": lambda c: f"{_digits(c, 3)} x {_digits(c, 3)} x {_digits(c, 4)}",
    "pages": lambda c: f"pp. {c.randrange(100, 500)}-{c.randrange(500, 999)}",
    "part number": lambda c: f"part 1{_digits(c, 2)}-{_digits(c, 3)}-{_digits(c, 4)}",
    "IBAN, wrong check digits": lambda c: _grouped(_wrong(_iban(c, "DE")), " "),
    "card, wrong check digit": lambda c: _grouped(_wrong(_card(c)), " "),
}


def rows(each: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a record, what stands before its value, the value, its kind (or "") and its form."""
    chance = random.Random(seed)
    forms = [(kind, form, make) for kind, found in FORMS.items() for form, make in found.items()]
    for kind, form, make in [*forms, *(("", form, make) for form, make in ORDINARY.items())]:
        for _ in range(each):
            made = make(chance)
            value, after = made if isinstance(made, tuple) else (made, "")
            before = f"{chance.choice(_BEFORE)} "
            for called in ("call ", "tel. "):
                if kind and value.startswith(called):
                    before, value = before + called, value.removeprefix(called)
            after += chance.choice([".", ",", ""]) + f" {chance.choice(_AFTER)}"
            record = {"text": before + value + after}
            row = {"record": record, "before": before, "value": value}
            yield {**row, "kind": kind, "form": form}


def judged(rows: list[dict[str, Any]], left: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Recall by kind and form, precision by kind, and which ordinary numbers were masked."""
    there: dict[str, Counter] = defaultdict(Counter)
    found: dict[str, Counter] = defaultdict(Counter)
    wrong, right, ordinary = Counter(), Counter(), Counter()
    for number, row in enumerate(rows):
        kind, form, text = row["kind"], row["form"], left[number]["text"]
        tags = Counter({name: text.count(f"[{name.upper()}]") for name in FORMS})
        if kind:
            hit = text.startswith(f"{row['before']}[{kind.upper()}]") and row["value"] not in text
            there[kind][form] += 1
            found[kind][form] += hit
            right[kind] += hit
            tags[kind] -= hit
        elif any(tags.values()):
            ordinary[form] += 1
        wrong += tags
    of_kinds = {}
    for kind, forms in there.items():
        hits, whole = sum(found[kind].values()), sum(forms.values())
        missed = {form: forms[form] - found[kind][form] for form in forms}
        of_kinds[kind] = {
            "recall": round(hits / whole, 4),
            "precision": round(right[kind] / max(right[kind] + wrong[kind], 1), 4),
            "planted": whole,
            "missed": {form: count for form, count in missed.items() if count},
        }
    count = sum(not row["kind"] for row in rows)
    share = round(sum(ordinary.values()) / max(count, 1), 4)
    return {"kinds": of_kinds, "ordinary": count, "masked": dict(ordinary), "masked_share": share}


def many(count: int, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Texts of 60 words; a twentieth with personal data, three tenths with another number."""
    chance = random.Random(1)
    planted = [row["record"]["text"] for row in rows if row["kind"]]
    ordinary = [row["record"]["text"] for row in rows if not row["kind"]]
    for _ in range(count):
        lot, words = chance.random(), " ".join(chance.choices(_WORDS, k=60))
        more = (
            chance.choice(planted) if lot < 0.05 else chance.choice(ordinary) if lot < 0.35 else ""
        )
        yield {"text": f"{words} {more}"}
