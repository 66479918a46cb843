"""Values that questions are about: from pools, and random ones that can only be copied."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

__all__ = [
    "cents",
    "city",
    "clock_time",
    "company",
    "currency",
    "date",
    "decimal",
    "distinct",
    "email",
    "file_path",
    "first_name",
    "identifier",
    "invented_name",
    "made_product",
    "person",
    "phone",
    "phrase",
    "product",
    "room",
    "song",
    "street",
    "tags",
    "title",
    "topic",
    "url",
    "word",
]


def _pool(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


_FIRST = _pool(
    "Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karin Leo Maria Nils Olga Paul Rosa "
    "Sam Tara Uwe Vera Will Xenia Yusuf Zoe Amir Bella Chen Diego Elif Farid Gita Hana Ivan Jun "
    "Kofi Lina Mehmet Nora Omar Priya Quinn Rafael Sofia Tomás Ugo Valeria Wei Yara Zofia José "
    "Anaïs Björn Dmitri Esther Freya George Hiro Ines Jakob"
)
_LAST = _pool(
    "Berg Costa Dahl Evans Fischer Garcia Haas Ito Jensen Kim Lopez Meyer Novak Okafor Patel "
    "Quist Rossi Sato Turner Ueda Vogel Weber Xu Yilmaz Zhang Abbott Brandt Castro Duarte Ekman "
    "Ferrari Gruber Holm Ivanov Jansen Keller Larsen Müller Nguyen Olsen Perez Reyes Silva "
    "Thorne Urban Vance Wolf York Ziegler Moreau Lindqvist Kowalski Adler Bianchi"
)
_CITIES = _pool(
    "Oslo|Lima|Paris|Berlin|Madrid|Rome|Vienna|Prague|Dublin|Lisbon|Athens|Cairo|Nairobi|Lagos|"
    "Accra|Tunis|Dakar|Tokyo|Osaka|Seoul|Beijing|Shanghai|Taipei|Hanoi|Bangkok|Manila|Jakarta|"
    "Mumbai|Delhi|Karachi|Tehran|Baghdad|Ankara|Istanbul|Sofia|Bucharest|Budapest|Warsaw|Kraków|"
    "Riga|Tallinn|Vilnius|Helsinki|Stockholm|Malmö|Copenhagen|Hamburg|Munich|Zürich|Geneva|Milan|"
    "Turin|Naples|Seville|Porto|Lyon|Nice|Brussels|Ghent|Utrecht|London|Leeds|Glasgow|Boston|"
    "Chicago|Denver|Austin|Seattle|Toronto|Montreal|Havana|Bogotá|Quito|La Paz|Santiago|"
    "São Paulo|Buenos Aires|Montevideo|Sydney|Perth|Auckland|New York|Cape Town|Mexico City",
    "|",
)
_SYLLABLES = _pool(
    "ba be bi bo da de do fa fe fi ga go ka ke ki ko la le li lo lu ma me mi mo na ne ni no pa "
    "pe po ra re ri ro sa se si so ta te ti to va ve vi vo za zo bra dru fen gar hul jin kel lom "
    "mar nor pel quo ras sil tor bul ver wen yor zem"
)
_ENDS = ("", "", "n", "r", "s", "l", "k", "t", "m", "x", "d", "nt", "sk", "rn")
_THINGS = _pool(
    "lamp desk chair kettle backpack notebook mug camera tent bicycle helmet blanket mirror "
    "keyboard speaker monitor printer router charger cable drill hammer ladder bucket pillow "
    "jacket scarf umbrella wallet watch guitar drum puzzle candle vase shelf basket thermos"
)
_QUALITIES = _pool(
    "red blue green black white grey small large light heavy wooden steel cotton leather round "
    "foldable cordless compact silver yellow"
)
_ROOMS = _pool(
    "kitchen|bedroom|bathroom|living room|office|hall|garage|attic|cellar|nursery|library|studio|"
    "dining room|workshop|guest room|balcony",
    "|",
)
_TOPICS = _pool(
    "budget review roadmap launch hiring training planning security release migration inventory "
    "travel survey contract invoice delivery audit backup dashboard payroll schedule checkout "
    "search login billing upload report newsletter workshop interview"
)
_VERBS = _pool("fails stops hangs crashes flickers loops lags breaks")
_WHEN = _pool(
    "after login|on start|at night|on mobile|after the update|on Mondays|in the test|at midnight|"
    "on the second try|after a restart",
    "|",
)
_CURRENCIES = _pool(
    "EUR USD GBP JPY CHF SEK NOK DKK PLN CZK HUF TRY INR CNY KRW BRL MXN CAD AUD NZD ZAR SGD"
)
_COMPANY_ENDS = ("Ltd", "GmbH", "Inc", "AB", "Foods", "Tools", "Systems", "Labs", "Books", "Works")
_DOMAINS = ("example.com", "example.org", "example.net", "mail.test", "post.test")
_FOLDERS = _pool("docs data logs src notes backup images reports tmp config home archive")
_EXTENSIONS = _pool("txt md csv json log pdf py yaml png")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PREFIXES = _pool("ORD INV TK REF A B K X PX QA ID CR ZN")


def word(random: Random) -> str:
    """An invented lower-case word."""
    middle = "".join(random.choices(_SYLLABLES, k=random.randint(2, 3)))
    return middle + random.choice(_ENDS)


def invented_name(random: Random) -> str:
    """An invented word with a capital."""
    return word(random).capitalize()


def first_name(random: Random) -> str:
    """A first name; one of four is invented."""
    return random.choice(_FIRST) if random.random() < 0.75 else invented_name(random)


def person(random: Random) -> str:
    """A first and a last name."""
    last = random.choice(_LAST) if random.random() < 0.65 else invented_name(random)
    return f"{first_name(random)} {last}"


def city(random: Random) -> str:
    """A city; one of three is invented."""
    return random.choice(_CITIES) if random.random() < 0.67 else invented_name(random)


def company(random: Random) -> str:
    """A company of an invented name."""
    return f"{invented_name(random)} {random.choice(_COMPANY_ENDS)}"


def street(random: Random) -> str:
    """A street and a house number."""
    kind = random.choice(("Street", "Road", "Lane", "Avenue", "Square"))
    return f"{random.randint(1, 199)} {invented_name(random)} {kind}"


def room(random: Random) -> str:
    """A room of a house."""
    return random.choice(_ROOMS)


def product(random: Random) -> str:
    """A thing to buy, e.g. `red lamp`; some of an invented make."""
    thing = random.choice(_THINGS)
    if random.random() < 0.3:
        return f"{invented_name(random)} {thing}"
    return f"{random.choice(_QUALITIES)} {thing}"


def made_product(random: Random) -> str:
    """A thing to buy of an invented make, e.g. `Bedor lamp`."""
    return f"{invented_name(random)} {random.choice(_THINGS)}"


def song(random: Random) -> str:
    """A title of one to three words."""
    words = [random.choice((random.choice(_QUALITIES), random.choice(_THINGS), word(random)))]
    words += [random.choice(_THINGS) for _ in range(random.randint(0, 2))]
    return " ".join(each.capitalize() for each in words)


def topic(random: Random) -> str:
    """What work is about: one word."""
    return random.choice(_TOPICS) if random.random() < 0.8 else word(random)


def title(random: Random) -> str:
    """A title of two or three words, e.g. `Budget review`."""
    text = f"{topic(random)} {random.choice(_TOPICS)}"
    if random.random() < 0.3:
        text += f" {random.randint(2, 99)}"
    return text.capitalize()


def phrase(random: Random) -> str:
    """A short message without a full stop."""
    kind = random.randrange(6)
    if kind == 0:
        return f"The {topic(random)} {random.choice(_VERBS)} {random.choice(_WHEN)}"
    if kind == 1:
        return f"See you at {clock_time(random)} in {city(random)}"
    if kind == 2:
        return f"Please bring the {product(random)}"
    if kind == 3:
        return f"The {topic(random)} is ready"
    if kind == 4:
        return f"Ask {first_name(random)} about the {topic(random)}"
    return f"The code is {identifier(random)}"


def identifier(random: Random) -> str:
    """A random identifier with at least one letter, in one of six shapes."""
    kind = random.randrange(6)
    number = random.randrange(10 ** random.randint(2, 5))
    if kind == 0:
        return f"{random.choice(_PREFIXES)}-{number}"
    if kind == 1:
        return f"{random.choice(_LETTERS)}{number}"
    if kind == 2:
        letters = "".join(random.choices(_LETTERS, k=2)).upper()
        return f"{letters}{number}{random.choice(_LETTERS).upper()}"
    if kind == 3:
        return f"{random.choice(_LETTERS)}_{number}"
    if kind == 4:
        digits = random.choices("0123456789abcdef", k=random.randint(4, 6))
        return random.choice("abcdef") + "".join(digits)
    return f"{word(random)}-{random.randrange(100)}"


def date(random: Random) -> str:
    """A day as YYYY-MM-DD."""
    return f"{random.randint(2020, 2034)}-{random.randint(1, 12):02}-{random.randint(1, 28):02}"


def clock_time(random: Random) -> str:
    """A time as HH:MM."""
    minute = random.choice((0, 15, 30, 45, random.randrange(60)))
    return f"{random.randrange(24):02}:{minute:02}"


def email(random: Random) -> str:
    """An address at a domain that is kept for examples."""
    name = random.choice(_FIRST).lower() if random.random() < 0.5 else word(random)
    name = name if name.isascii() else word(random)
    if random.random() < 0.5:
        name += random.choice((".", "_", "")) + random.choice(
            (word(random), str(random.randrange(99)))
        )
    domain = random.choice(_DOMAINS) if random.random() < 0.6 else f"{word(random)}.test"
    return f"{name}@{domain}"


def phone(random: Random) -> str:
    """A number with a country code."""
    return f"+{random.randint(20, 98)} 555 {random.randrange(10000):04}"


def cents(random: Random, limit: int = 500) -> float:
    """An amount below `limit` whose last digit of two after the point is not 0."""
    return random.randrange(1, limit) + (random.randrange(10) * 10 + random.randint(1, 9)) / 100


def decimal(random: Random, low: int, high: int, parts: int = 10) -> int | float:
    """A number of these bounds in steps of 1 / `parts`; a whole one is an integer."""
    value = random.randint(low * parts, high * parts)
    return value // parts if value % parts == 0 else value / parts


def currency(random: Random) -> str:
    """A currency's code."""
    return random.choice(_CURRENCIES)


def file_path(random: Random) -> str:
    """A path of a file."""
    folder = random.choice(_FOLDERS)
    if random.random() < 0.4:
        folder += f"/{word(random)}"
    name = random.choice((word(random), topic(random), f"{topic(random)}_{random.randrange(100)}"))
    return f"{random.choice(('', '/'))}{folder}/{name}.{random.choice(_EXTENSIONS)}"


def url(random: Random) -> str:
    """An address of a page."""
    return f"https://{random.choice(_DOMAINS)}/{word(random)}/{random.randrange(1000)}"


def tags(random: Random) -> list[str]:
    """One to three different single words."""
    return distinct(random, topic, random.randint(1, 3))


def distinct(random: Random, make: Callable[[Random], str], count: int) -> list[str]:
    """`count` different values of one kind."""
    found: list[str] = []
    while len(found) < count:
        value = make(random)
        if value not in found:
            found.append(value)
    return found
