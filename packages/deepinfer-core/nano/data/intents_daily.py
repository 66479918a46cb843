"""Tools of everyday: weather, bookings, mail, calendar."""

from __future__ import annotations

from random import Random

from nano.data import values as v
from nano.data.catalogue import Arguments, Field, Intent, Slot
from nano.data.slots import (
    BOOLEAN,
    CITY,
    DATE,
    ID,
    INTEGER,
    NUMBER,
    STATUS,
    STRINGS,
    TIME,
    coin,
    converted,
    enum,
    fresh,
    one,
    people,
    whole,
)

__all__ = ["DAILY"]


def _amount(random: Random) -> int | float:
    return random.randint(2, 5000) if random.random() < 0.6 else v.cents(random)


def _rate(random: Random, arguments: Arguments) -> int:
    limit = arguments.get("max_price", 300)
    assert isinstance(limit, int)
    return random.randint(30, limit)


DAILY: tuple[Intent, ...] = (
    Intent(
        ("get_weather", "weather_lookup", "current_weather", "weather"),
        ("Current weather of a city", "Get the weather", "Weather right now"),
        (
            CITY,
            Slot(
                ("unit", "units", "scale"),
                one("celsius", "fahrenheit"),
                enum("celsius", "fahrenheit"),
                said=(" in {}", " (in {})"),
            ),
        ),
        "the weather in {city}",
        (
            "What is the weather in {city}{more}?",
            "How is the weather in {city}{more}?",
            "What's the weather like in {city}{more}?",
            "Tell me the weather in {city}{more}.",
            "Weather in {city}{more}, please.",
            "Could you check the weather in {city}{more}?",
            "I need the current weather of {city}{more}.",
        ),
        (
            Field(("temperature", "temp", "degrees"), fresh(whole(-15, 39))),
            Field(
                ("sky", "conditions", "summary"),
                fresh(one("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear")),
            ),
        ),
        "It is {temperature} degrees and {sky} in {city}.",
        vary="city",
        several=(
            "What is the weather in {items}{more}?",
            "Compare the weather in {items}{more}.",
            "Weather in {items}{more}, please.",
        ),
        again=("And in {city}?", "What about {city}?", "And {city}?", "Same for {city}, please."),
        lookup=True,
    ),
    Intent(
        ("get_time", "local_time", "time_in_city", "clock"),
        ("Local time of a city", "Tell the time in a city"),
        (CITY,),
        "the time in {city}",
        (
            "What time is it in {city}?",
            "Tell me the time in {city}.",
            "What is the local time in {city}?",
            "How late is it in {city} now?",
            "Current time in {city}, please.",
        ),
        (Field(("time", "local_time", "now"), fresh(v.clock_time)),),
        "It is {time} in {city}.",
        vary="city",
        several=("What time is it in {items}?", "Tell me the time in {items}."),
        again=("And in {city}?", "What about {city}?", "Same for {city}, please."),
        lookup=True,
    ),
    Intent(
        ("convert_currency", "exchange", "currency_convert", "convert_money"),
        ("Convert an amount of money", "Exchange rates: convert money"),
        (
            Slot(("amount", "value", "sum"), _amount, NUMBER, about="Amount to convert"),
            Slot(("source", "from", "from_currency"), v.currency, about="Currency code"),
            Slot(("target", "to", "to_currency"), v.currency, about="Currency code"),
        ),
        "to convert {amount} {source} to {target}",
        (
            "How much is {amount} {source} in {target}?",
            "Convert {amount} {source} to {target}.",
            "What are {amount} {source} in {target}?",
            "Please change {amount} {source} into {target}.",
            "I have {amount} {source}. How many {target} is that?",
        ),
        (Field(("converted", "result", "total"), converted),),
        "{amount} {source} are {converted} {target}.",
        vary="target",
        several=(
            "How much is {amount} {source} in {items}?",
            "Convert {amount} {source} to {items}.",
        ),
        again=("And in {target}?", "And how much is that in {target}?", "What about {target}?"),
        lookup=True,
    ),
    Intent(
        ("book_table", "reserve_table", "table_booking", "restaurant_reserve"),
        ("Book a table at a restaurant", "Reserve a table"),
        (
            Slot(
                ("restaurant", "place", "venue"),
                lambda random: random.choice(
                    (f"{v.first_name(random)}'s", f"Cafe {v.invented_name(random)}")
                ),
                about="Name of the restaurant",
            ),
            Slot(("people", "guests", "party_size"), whole(2, 12), INTEGER),
            DATE,
            Slot(("time", "at", "hour"), v.clock_time, about="HH:MM", said=(" at {}",)),
        ),
        "to book a table for {people} at {restaurant} on {date}",
        (
            "Book a table for {people} at {restaurant} on {date}{more}.",
            "Reserve a table at {restaurant} for {people} people on {date}{more}, please.",
            "We are {people} and want to eat at {restaurant} on {date}{more}.",
            "I need a table for {people} on {date}{more}. The restaurant is {restaurant}.",
            "Can you get us a table at {restaurant} on {date}{more}? We are {people}.",
        ),
        (ID,),
        "The table is booked: {id}.",
        vary="restaurant",
        again=("Book the same at {restaurant}, too.", "And the same at {restaurant}."),
    ),
    Intent(
        ("find_hotel", "hotel_search", "search_hotels"),
        ("Find a hotel in a city", "Search for a hotel"),
        (
            CITY,
            Slot(
                ("max_price", "budget", "price_limit"),
                whole(40, 400),
                INTEGER,
                said=(" for at most {} a night", " under {} a night"),
            ),
        ),
        "a hotel in {city}",
        (
            "Find a hotel in {city}{more}.",
            "I need a hotel in {city}{more}.",
            "Which hotel in {city}{more} can you suggest?",
            "Look for a hotel in {city}{more}, please.",
        ),
        (
            Field(("hotel", "name"), lambda random, _: f"Hotel {v.invented_name(random)}"),
            Field(("price", "rate"), _rate),
        ),
        "{hotel} in {city} costs {price} a night.",
        vary="city",
        several=("Find a hotel in {items}{more}.", "I need hotels in {items}{more}."),
        again=("And in {city}?", "What about {city}?", "Also one in {city}, please."),
        lookup=True,
    ),
    Intent(
        ("book_hotel", "reserve_room", "hotel_booking"),
        ("Book a hotel room", "Reserve a hotel room"),
        (
            Slot(("hotel", "hotel_name"), lambda random: f"Hotel {v.invented_name(random)}"),
            Slot(("guest", "guest_name", "name"), v.person),
            Slot(("date", "arrival", "check_in"), v.date, about="YYYY-MM-DD"),
            Slot(("nights", "num_nights"), whole(2, 14), INTEGER),
            Slot(
                ("breakfast", "with_breakfast"),
                coin,
                BOOLEAN,
                said=(" with breakfast",),
                denied=(" without breakfast",),
            ),
        ),
        "to book {hotel} for {guest}",
        (
            "Book {hotel} for {guest} from {date} for {nights} nights{more}.",
            "Reserve a room at {hotel} on {date} for {nights} nights{more}. The guest is {guest}.",
            "{guest} needs a room at {hotel} for {nights} nights from {date}{more}.",
            "Please book {nights} nights at {hotel}{more} for {guest}, starting {date}.",
        ),
        (ID,),
        "The room is booked: {id}.",
        vary="guest",
        again=("The same for {guest}, please.", "And the same for {guest}."),
    ),
    Intent(
        ("search_flights", "find_flight", "flight_search"),
        ("Search for a flight", "Find flights between cities"),
        (
            Slot(("origin", "from", "from_city"), v.city, about="City of departure"),
            Slot(("destination", "to", "to_city"), v.city, about="City of arrival"),
            DATE,
            Slot(
                ("direct", "nonstop", "direct_only"),
                coin,
                BOOLEAN,
                said=(", direct only", ", without stops"),
                denied=(", stops are fine", ", not only direct"),
            ),
        ),
        "a flight from {origin} to {destination} on {date}",
        (
            "Find a flight from {origin} to {destination} on {date}{more}.",
            "I want to fly from {origin} to {destination} on {date}{more}.",
            "Which flight goes to {destination} from {origin} on {date}{more}?",
            "Search flights on {date} from {origin} to {destination}{more}.",
        ),
        (
            Field(("flight", "flight_id", "number"), fresh(v.identifier)),
            Field(("price", "fare"), fresh(whole(60, 900))),
        ),
        "Flight {flight} from {origin} to {destination} costs {price}.",
        vary="date",
        again=("And on {date}?", "What about {date}?", "Look at {date}, too."),
        lookup=True,
    ),
    Intent(
        ("book_flight", "reserve_seat", "flight_booking"),
        ("Book a seat of a flight", "Book a flight"),
        (
            Slot(("flight", "flight_id", "flight_number"), v.identifier),
            Slot(("passenger", "name", "traveller"), v.person),
            Slot(
                ("seat", "seat_type"),
                one("window", "aisle", "middle"),
                enum("window", "aisle", "middle"),
                said=(" on a {} seat", ", {} seat"),
            ),
        ),
        "to book flight {flight} for {passenger}",
        (
            "Book flight {flight} for {passenger}{more}.",
            "Reserve flight {flight} for {passenger}{more}, please.",
            "{passenger} wants to take flight {flight}{more}.",
        ),
        (ID,),
        "The flight is booked: {id}.",
        vary="passenger",
        several=("Book flight {flight} for {items}{more}.",),
        again=("And for {passenger}.", "The same for {passenger}, please."),
    ),
    Intent(
        ("send_email", "email", "mail_send"),
        ("Send an e-mail", "Write an e-mail"),
        (
            Slot(("to", "recipient", "address"), v.email, about="E-mail address"),
            Slot(("subject", "title"), v.title),
            Slot(("body", "text"), v.phrase, long=True, said=(' with the text "{}"',)),
        ),
        "to send an e-mail to {to}",
        (
            'Send an e-mail to {to} with the subject "{subject}"{more}.',
            'Write to {to}{more}. The subject is "{subject}".',
            'E-mail {to}{more}, subject "{subject}".',
            'Please mail "{subject}" as subject to {to}{more}.',
        ),
        (STATUS,),
        "The e-mail is sent.",
        vary="to",
        several=('Send an e-mail to {items} with the subject "{subject}"{more}.',),
        again=("Send it to {to}, too.", "The same to {to}, please."),
    ),
    Intent(
        ("send_message", "message", "text_contact"),
        ("Send a chat message", "Message a contact"),
        (
            Slot(("to", "contact", "name"), v.first_name),
            Slot(("text", "message", "body"), v.phrase, long=True),
        ),
        "to send a message to {to}",
        (
            'Send {to} the message "{text}".',
            'Text {to}: "{text}"',
            'Write "{text}" to {to}.',
            'Let {to} know: "{text}"',
            'Message "{text}" to {to}, please.',
        ),
        (STATUS,),
        "The message is sent to {to}.",
        vary="to",
        several=('Send {items} the message "{text}".', 'Write "{text}" to {items}.'),
        again=("Send it to {to}, too.", "The same to {to}, please."),
    ),
    Intent(
        ("create_event", "add_event", "calendar_add", "schedule"),
        ("Add an event to the calendar", "Create a calendar event"),
        (
            Slot(("title", "name", "subject"), v.title),
            DATE,
            TIME,
            Slot(
                ("attendees", "people", "invite"),
                people,
                STRINGS,
                said=(" with {}", " and invite {}"),
            ),
        ),
        'the event "{title}" on {date}',
        (
            'Put "{title}" into my calendar on {date} at {time}{more}.',
            'Create the event "{title}" on {date} at {time}{more}.',
            'Schedule "{title}" for {date}, {time}{more}.',
            'Add "{title}" at {time} on {date}{more}, please.',
        ),
        (ID,),
        'The event "{title}" is in the calendar: {id}.',
        vary="date",
        again=("The same on {date}, please.", "Add it on {date}, too."),
    ),
    Intent(
        ("cancel_event", "delete_event", "remove_event"),
        ("Cancel a calendar event", "Remove an event"),
        (Slot(("event_id", "event", "id"), v.identifier),),
        "to cancel event {event_id}",
        (
            "Cancel event {event_id}.",
            "Remove event {event_id}, please.",
            "Event {event_id} is off.",
        ),
        (STATUS,),
        "Event {event_id} is cancelled.",
        vary="event_id",
        several=("Cancel the events {items}.",),
        again=("And {event_id}.", "Also {event_id}, please."),
    ),
    Intent(
        ("set_alarm", "alarm", "wake_me"),
        ("Set an alarm", "Set an alarm clock"),
        (TIME, Slot(("label", "note"), v.topic, said=(" for {}", ' labelled "{}"'))),
        "an alarm at {time}",
        (
            "Set an alarm for {time}{more}.",
            "Wake me at {time}{more}.",
            "I need an alarm at {time}{more}.",
            "Alarm at {time}{more}, please.",
        ),
        (STATUS,),
        "The alarm is set for {time}.",
        vary="time",
        several=("Set alarms for {items}{more}.", "I need alarms at {items}{more}."),
        again=("And at {time}.", "Another one at {time}, please."),
    ),
    Intent(
        ("set_timer", "start_timer", "countdown"),
        ("Start a timer", "Start a countdown"),
        (Slot(("minutes", "duration", "mins"), whole(2, 120), INTEGER, about="Minutes"),),
        "a timer of {minutes} minutes",
        (
            "Set a timer for {minutes} minutes.",
            "Start a timer of {minutes} minutes.",
            "Count down {minutes} minutes.",
            "Remind me in {minutes} minutes.",
        ),
        (STATUS,),
        "The timer runs for {minutes} minutes.",
        vary="minutes",
        several=("Set timers for {items} minutes.",),
        again=("And one for {minutes} minutes.", "Another one of {minutes} minutes, please."),
    ),
)
