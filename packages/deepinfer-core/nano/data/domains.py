"""What texts tell and JSON is to be extracted from: orders, events, persons and the like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from deepseek_recipe.conversation import JsonValue
from nano.data import values as v

__all__ = ["DOMAINS", "Domain", "Entry"]

Kind = Literal["string", "integer", "number", "boolean", "array"]


@dataclass(frozen=True)
class Entry:
    """One thing that a text can tell.

    Attributes:
        keys: names that JSON can have for it; the first one is its name in templates.
        label: what a form calls it.
        says: sentences with `{}` in the place of the value.
        denies: of a boolean: sentences for false.
        choices: of an enumeration: all values.
    """

    keys: tuple[str, ...]
    label: str
    kind: Kind
    make: Callable[[Random], JsonValue]
    says: tuple[str, ...]
    denies: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Domain:
    """A kind of text.

    Attributes:
        noun: what the text is about.
        leads: sentences that tell several entries at once.
        chatter: sentences that tell nothing that is asked for.
    """

    noun: str
    entries: tuple[Entry, ...]
    leads: tuple[str, ...]
    chatter: tuple[str, ...] = ()


def _text(make: Callable[[Random], str], label: str, keys: str, *says: str) -> Entry:
    return Entry(tuple(keys.split()), label, "string", make, says)


def _count(low: int, high: int, label: str, keys: str, *says: str) -> Entry:
    return Entry(tuple(keys.split()), label, "integer", lambda r: r.randint(low, high), says)


def _number(make: Callable[[Random], float], label: str, keys: str, *says: str) -> Entry:
    return Entry(tuple(keys.split()), label, "number", make, says)


def _flag(label: str, keys: str, says: tuple[str, ...], denies: tuple[str, ...]) -> Entry:
    names = tuple(keys.split())
    return Entry(names, label, "boolean", lambda r: r.random() < 0.5, says, denies)


def _list(make: Callable[[Random], list[str]], label: str, keys: str, *says: str) -> Entry:
    return Entry(tuple(keys.split()), label, "array", make, says)


def _choice(choices: str, label: str, keys: str, *says: str) -> Entry:
    each = tuple(choices.split())
    return Entry(tuple(keys.split()), label, "string", lambda r: r.choice(each), says, (), each)


def _some(make: Callable[[Random], str]) -> Callable[[Random], list[str]]:
    return lambda random: v.distinct(random, make, random.choice((1, 2, 2, 3)))


def _weight(random: Random) -> float:
    return v.decimal(random, 1, 40)


_FOODS = ("rice", "beans", "eggs", "salt", "milk", "corn", "peas", "leek", "mint", "figs", "oats")

DOMAINS: tuple[Domain, ...] = (
    Domain(
        "person",
        (
            _text(v.person, "Name", "name full_name", "This is {}.", "{} is the name."),
            _count(18, 95, "Age", "age age_years", "{} years old.", "Just turned {}."),
            _text(v.city, "City", "city town location", "Lives in {}.", "Home is {}."),
            _text(v.email, "E-mail", "email mail", "Write to {}.", "Mail goes to {}."),
            _text(v.phone, "Phone", "phone telephone", "Call {}.", "Reachable at {}."),
            _choice(
                "baker nurse teacher pilot lawyer plumber farmer painter clerk chemist",
                "Job",
                "job profession occupation",
                "Works as a {}.",
                "By profession a {}.",
            ),
            _list(
                _some(lambda r: r.choice(("German", "French", "Polish", "Dutch", "Hindi", "Thai"))),
                "Languages",
                "languages spoken_languages",
                "Speaks {}.",
                "Languages spoken: {}.",
            ),
        ),
        (
            "{name} ({age}) lives in {city}.",
            "{name} from {city} is {age} years old and works as a {job}.",
            "{name} is a {job} in {city}, reachable at {email}.",
        ),
        ("Nice to meet you.", "More on request.", "Thanks for the form."),
    ),
    Domain(
        "order",
        (
            _text(v.identifier, "Order", "order_id order_number order", "Order {} came in."),
            _text(v.person, "Customer", "customer customer_name buyer", "{} ordered it."),
            _text(v.product, "Article", "product article item", "It is a {}.", "The goods: {}."),
            _count(2, 60, "Quantity", "quantity count pieces", "{} pieces.", "We send {} of them."),
            _number(v.cents, "Total", "total total_price sum", "The total comes to {} EUR."),
            _text(v.date, "Ordered on", "date order_date ordered_on", "It was ordered on {}."),
            _flag(
                "Paid",
                "paid is_paid",
                ("It is paid.", "The money has arrived."),
                ("It is not paid yet.", "The money has not arrived."),
            ),
        ),
        (
            "{customer} ordered {quantity} x {product} on {date}.",
            "Order {order_id} by {customer}: {quantity} x {product} for {total} EUR.",
            "On {date} we got order {order_id} over {total} EUR from {customer}.",
        ),
        ("Please handle it soon.", "The desk was busy.", "Regards from the shop."),
    ),
    Domain(
        "event",
        (
            _text(v.title, "Event", "title event event_name", 'We hold the "{}".', "Title: {}."),
            _text(v.date, "Date", "date day", "It is on {}.", "Keep {} free."),
            _text(v.clock_time, "Start", "start start_time time", "We start at {}.", "From {} on."),
            _text(v.city, "City", "city place location", "It takes place in {}.", "We meet in {}."),
            _list(_some(v.first_name), "Guests", "attendees guests participants", "{} will come."),
            _count(5, 400, "Seats", "seats capacity num_seats", "There are {} seats."),
            _flag(
                "Online",
                "online is_online virtual",
                ("You can join online.", "There is a video link."),
                ("You cannot join online.", "There is no video link."),
            ),
        ),
        (
            'The "{title}" is on {date} at {start} in {city}.',
            '{attendees} meet in {city} on {date} for the "{title}".',
            "On {date}, {start}: {title}, {seats} seats.",
        ),
        ("Bring good mood.", "Coffee is ready.", "Spread the word."),
    ),
    Domain(
        "product",
        (
            _text(v.made_product, "Product", "product product_name name", "We sell a {}."),
            _number(v.cents, "Price", "price cost", "It costs {} EUR.", "Yours for {} EUR."),
            _choice(
                "red blue green black white", "Colour", "color colour", "It comes in {}.", "All {}."
            ),
            _number(_weight, "Weight", "weight weight_kg", "It weighs {} kg."),
            _text(v.company, "Maker", "maker brand manufacturer", "It is made by {}."),
            _flag(
                "In stock",
                "in_stock available",
                ("It is in stock.", "We have it here."),
                ("It is not in stock.", "It is sold out."),
            ),
            _text(v.identifier, "Code", "sku code article_number", "The code is {}."),
        ),
        (
            "The {product} by {maker} costs {price} EUR and weighs {weight} kg.",
            "{maker} offers a {product} (code {sku}) for {price} EUR.",
        ),
        ("A good buy.", "See our shop.", "Many like it."),
    ),
    Domain(
        "invoice",
        (
            _text(v.identifier, "Invoice", "invoice_id invoice_number invoice", "Invoice {}."),
            _text(v.company, "Seller", "seller vendor supplier", "{} sent it."),
            _number(lambda r: v.cents(r, 9000), "Amount", "amount total", "The amount is {}."),
            _choice("EUR USD GBP CHF SEK", "Currency", "currency", "All sums in {}.", "Pay in {}."),
            _text(v.date, "Due", "due_date due pay_by", "It is due on {}.", "Pay by {}."),
            _flag(
                "Reminder",
                "reminder is_reminder",
                ("This is a reminder.",),
                ("This is not a reminder.",),
            ),
        ),
        (
            "Invoice {invoice_id} of {seller} over {amount} {currency} is due on {due_date}.",
            "{seller} wants {amount} {currency} by {due_date}.",
        ),
        ("Thank you for your trust.", "Please keep this letter.", "Questions are welcome."),
    ),
    Domain(
        "booking",
        (
            _text(v.person, "Guest", "guest guest_name", "The guest is {}.", "{} will stay."),
            _text(
                lambda r: f"Hotel {v.invented_name(r)}", "Hotel", "hotel hotel_name", "We chose {}."
            ),
            _text(v.date, "Arrival", "arrival check_in from_date", "Arrival is on {}."),
            _count(2, 21, "Nights", "nights num_nights", "They stay {} nights.", "{} nights."),
            _count(
                1, 900, "Room", "room room_number", "The room is number {}.", "Room {} is ready."
            ),
            _flag(
                "Breakfast",
                "breakfast with_breakfast",
                ("Breakfast is included.", "With breakfast."),
                ("Breakfast is not included.", "Without breakfast."),
            ),
            _number(v.cents, "Rate", "rate price_per_night", "A night costs {} EUR."),
        ),
        (
            "{guest} booked {hotel} from {arrival} for {nights} nights.",
            "{hotel} expects {guest} on {arrival} in room {room}.",
            "Room {room} at {hotel}: {guest}, {nights} nights, {rate} EUR each.",
        ),
        ("Late arrival is fine.", "The view is nice.", "We look forward to it."),
    ),
    Domain(
        "bug report",
        (
            _text(v.phrase, "Summary", "summary title problem", 'In short: "{}".', 'It says "{}".'),
            _choice(
                "low medium high", "Severity", "severity priority", "I call it {}.", "It is {}."
            ),
            _text(
                lambda r: f"{r.randint(0, 9)}.{r.randint(0, 20)}.{r.randint(0, 9)}",
                "Version",
                "version app_version release",
                "Seen in version {}.",
                "I run {}.",
            ),
            _text(v.first_name, "Reporter", "reporter reported_by", "{} reported it."),
            _text(v.file_path, "File", "file path", "The fault is in {}.", "Look at {}."),
            _count(1, 999, "Line", "line line_number", "It is line {}.", "See line {}."),
            _list(v.tags, "Labels", "labels tags", "It touches {}.", "Labels: {}."),
            _flag(
                "Reproducible",
                "reproducible can_reproduce",
                ("I can reproduce it.", "It happens every time."),
                ("I cannot reproduce it.", "It happened only once."),
            ),
        ),
        (
            '{reporter} found a bug in {version}: "{summary}".',
            "{file}, line {line}, crashes in version {version}.",
            "{reporter} says line {line} of {file} is wrong.",
        ),
        ("Please have a look.", "It is annoying.", "Sorry for the trouble."),
    ),
    Domain(
        "measurement",
        (
            _text(v.identifier, "Sensor", "sensor sensor_id device", "Sensor {} spoke up."),
            _number(lambda r: v.decimal(r, 0, 90), "Value", "value reading", "It reads {}."),
            _choice("bar volt watt metre gram", "Unit", "unit", "The unit is {}.", "Given in {}."),
            _text(v.clock_time, "Time", "time measured_at", "Taken at {}.", "It was {}."),
            _text(v.room, "Room", "room place location", "It is in the {}."),
            _flag(
                "Alarm",
                "alarm is_alarm",
                ("There is an alarm.", "The alarm went off."),
                ("There is no alarm.", "The alarm stayed off."),
            ),
        ),
        (
            "At {time} sensor {sensor} in the {room} read {value} {unit}.",
            "Sensor {sensor}: {value} {unit} at {time}.",
        ),
        ("All else is normal.", "The log is full.", "Next check tomorrow."),
    ),
    Domain(
        "parcel",
        (
            _text(v.identifier, "Parcel", "tracking tracking_number parcel", "Parcel {} is out."),
            _text(v.person, "Recipient", "recipient receiver", "It is for {}.", "It goes to {}."),
            _text(v.street, "Street", "street address", "Bring it to {}.", "The door is at {}."),
            _text(v.city, "City", "city town", "The city is {}.", "It must get to {}."),
            _number(_weight, "Weight", "weight weight_kg", "It has {} kg."),
            _flag(
                "Fragile",
                "fragile is_fragile",
                ("It is fragile.", "Careful, glass."),
                ("It is not fragile.", "Nothing can break."),
            ),
            _text(v.date, "Delivery", "delivery_date delivery", "It arrives on {}."),
        ),
        (
            "Parcel {tracking} for {recipient}, {street}, {city}.",
            "{recipient} in {city} gets a parcel of {weight} kg on {delivery_date}.",
        ),
        ("Ring twice.", "The driver knows.", "Leave it with the neighbours if needed."),
    ),
    Domain(
        "recipe",
        (
            _text(
                lambda r: f"{v.invented_name(r)} {r.choice(('soup', 'salad', 'cake', 'stew'))}",
                "Dish",
                "dish name recipe",
                "We cook {}.",
                "Today: {}.",
            ),
            _count(1, 12, "Servings", "servings portions serves", "Enough for {}.", "Serves {}."),
            _count(5, 180, "Minutes", "minutes duration time_minutes", "It takes {} minutes."),
            _list(
                _some(lambda r: r.choice(_FOODS)),
                "Ingredients",
                "ingredients",
                "You need {}.",
                "Take {}.",
            ),
            _flag(
                "Vegan",
                "vegan is_vegan",
                ("It is vegan.", "Vegan."),
                ("It is not vegan.",),
            ),
            _choice("easy medium hard", "Level", "difficulty level", "It is {} to make."),
        ),
        (
            "{dish} for {servings}, ready in {minutes} minutes: {ingredients}.",
            "Mix {ingredients} for {minutes} minutes and you get {dish}.",
        ),
        ("Enjoy.", "Grandma loved it.", "Serve it warm."),
    ),
    Domain(
        "job offer",
        (
            _text(v.company, "Company", "company employer", "{} is hiring.", "You work for {}."),
            _choice(
                "driver cook designer tester manager seller guard",
                "Position",
                "position role",
                "We look for a {}.",
                "Wanted: {}.",
            ),
            _text(v.city, "City", "city location", "The office is in {}.", "Based in {}."),
            _count(1500, 9000, "Salary", "salary monthly_salary pay", "We pay {} a month."),
            _flag(
                "Remote",
                "remote is_remote",
                ("You can work from home.", "Remote work is fine."),
                ("You cannot work from home.", "Remote work is not possible."),
            ),
            _text(v.email, "Contact", "contact contact_email apply_to", "Apply to {}."),
            _text(v.date, "Start", "start_date start", "You start on {}."),
        ),
        (
            "{company} in {city} looks for a {position} from {start_date} on.",
            "A {position} is wanted at {company}, {salary} a month, apply to {contact}.",
        ),
        ("We are a young team.", "Free coffee.", "Do not wait."),
    ),
    Domain(
        "trip",
        (
            _text(v.person, "Traveller", "traveller passenger", "{} travels.", "It is for {}."),
            _text(v.city, "From", "origin from departure_city", "It begins in {}."),
            _text(v.city, "To", "destination to arrival_city", "It ends in {}."),
            _text(v.date, "Date", "date travel_date", "The day is {}.", "It is on {}."),
            _choice("train bus plane ferry", "By", "transport mode", "By {}.", "They take the {}."),
            _text(
                lambda r: f"{r.randint(1, 40)}{r.choice('ABCDEF')}",
                "Seat",
                "seat seat_number",
                "The seat is {}.",
                "Seat {}.",
            ),
            _number(v.cents, "Fare", "fare price", "The fare is {} EUR.", "It costs {} EUR."),
        ),
        (
            "{traveller} goes from {origin} to {destination} by {transport} on {date}.",
            "On {date} {traveller} has seat {seat} to {destination}.",
            "From {origin} to {destination}, {fare} EUR, seat {seat}.",
        ),
        ("Have a good time.", "Bags are packed.", "It may rain."),
    ),
)
