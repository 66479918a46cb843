"""Tools of a home: music, light, heating; and calculation and translation."""

from __future__ import annotations

from random import Random

from nano.data import values as v
from nano.data.catalogue import Field, Intent, Slot
from nano.data.slots import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    ON_OFF,
    ROOM,
    STATUS,
    calculated,
    coin,
    expression,
    one,
    whole,
)

__all__ = ["HOME"]

_LANGUAGES = ("German", "French", "Spanish", "Italian", "Dutch", "Polish", "Turkish", "Swedish")


def _degrees(random: Random) -> int | float:
    return v.decimal(random, 10, 25, 2)


HOME: tuple[Intent, ...] = (
    Intent(
        ("play_song", "play_music", "music_play"),
        ("Play a song", "Play music"),
        (
            Slot(("song", "title", "track"), v.song),
            Slot(("artist", "singer", "band"), v.person, said=(" by {}", " from {}")),
        ),
        'to hear "{song}"',
        (
            'Play "{song}"{more}.',
            'I want to hear "{song}"{more}.',
            'Put on "{song}"{more}, please.',
            'Can you play "{song}"{more}?',
        ),
        (STATUS,),
        'Now playing "{song}".',
        vary="song",
        again=('And then "{song}".', 'After that "{song}", please.'),
    ),
    Intent(
        ("set_volume", "volume", "change_volume"),
        ("Set the volume", "Set the loudness in percent"),
        (
            Slot(("level", "volume", "percent"), whole(0, 100), INTEGER),
            Slot(("room", "area", "zone"), v.room, said=(" in the {}",)),
        ),
        "the volume at {level}",
        (
            "Set the volume{more} to {level}.",
            "Volume{more} to {level}, please.",
            "Change the volume{more} to {level} percent.",
            "Put the volume{more} at {level}.",
        ),
        (STATUS,),
        "The volume is at {level}.",
        vary="level",
        again=("No, {level}.", "Make that {level}."),
    ),
    Intent(
        ("switch_light", "light", "set_light", "lamp_control"),
        ("Turn a light on or off", "Switch the light of a room"),
        (ROOM, Slot(("on", "state", "power"), coin, BOOLEAN, words=ON_OFF)),
        "the light in the {room} {on}",
        (
            "Turn the light in the {room} {on}.",
            "Switch {on} the light in the {room}.",
            "Light {on} in the {room}, please.",
            "Please turn {on} the {room} light.",
        ),
        (STATUS,),
        "The light in the {room} is {on}.",
        vary="room",
        several=("Turn the light {on} in these rooms: {items}.", "Light {on} in {items}, please."),
        again=("And in the {room}.", "The same in the {room}, please."),
    ),
    Intent(
        ("set_temperature", "thermostat", "heat_room"),
        ("Set the temperature of a room", "Set the heating"),
        (
            ROOM,
            Slot(("degrees", "temperature", "value"), _degrees, NUMBER),
        ),
        "{degrees} degrees in the {room}",
        (
            "Set the {room} to {degrees} degrees.",
            "Heat the {room} to {degrees} degrees.",
            "I want {degrees} degrees in the {room}.",
            "Make it {degrees} degrees in the {room}, please.",
        ),
        (STATUS,),
        "The {room} is set to {degrees} degrees.",
        vary="room",
        again=("And the {room}.", "The same in the {room}, please."),
    ),
    Intent(
        ("calculate", "calculator", "evaluate", "compute"),
        ("Calculate an expression", "Evaluate arithmetic"),
        (Slot(("expression", "formula", "input"), expression),),
        "the value of {expression}",
        (
            "What is {expression}?",
            "Calculate {expression}.",
            "Compute {expression} with the tool.",
            "How much is {expression}?",
        ),
        (Field(("result", "value"), calculated),),
        "{expression} is {result}.",
        vary="expression",
        several=("Calculate {items}.",),
        again=("And {expression}?", "What about {expression}?"),
        lookup=True,
        live=False,
    ),
    Intent(
        ("translate", "translate_text", "translator"),
        ("Translate a text", "Translate to a language"),
        (
            Slot(("text", "input", "phrase"), v.phrase, long=True),
            Slot(("language", "to", "target_language"), one(*_LANGUAGES)),
        ),
        "a translation to {language}",
        (
            'Translate "{text}" to {language}.',
            'How do you say "{text}" in {language}?',
            'What is "{text}" in {language}?',
            'Put "{text}" into {language}, please.',
        ),
        (Field(("translation", "result"), lambda r, _: f"{v.word(r)} {v.word(r)} {v.word(r)}"),),
        'In {language} it is "{translation}".',
        vary="language",
        several=('Translate "{text}" to {items}.',),
        again=("And in {language}?", "Now to {language}, please."),
        lookup=True,
        live=False,
    ),
)
