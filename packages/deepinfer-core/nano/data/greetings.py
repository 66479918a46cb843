"""Greetings in four languages, answered in the same one."""

from __future__ import annotations

from random import Random

from nano.data.example import Draw, Example
from nano.data.question import ask

__all__ = ["TASKS"]

# Language -> answer -> what it answers. No text stands below two answers.
_GREETINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "English": {
        "Hello! How can I help you?": ("Hello", "Hi", "Hey", "Good day", "Hello there", "Hi there"),
        "Good morning! How can I help you?": ("Good morning",),
        "Good evening! How can I help you?": ("Good evening",),
        "I am fine, thank you. How can I help you?": (
            "How are you?",
            "Hello, how are you?",
            "How are you doing?",
            "Hi, how are you today?",
        ),
        "You are welcome!": ("Thanks", "Thank you", "Thanks a lot", "Thank you very much"),
        "Goodbye!": ("Goodbye", "Bye", "See you", "Bye bye", "See you later"),
    },
    "German": {
        "Hallo! Wie kann ich helfen?": ("Hallo", "Guten Tag", "Servus", "Grüß Gott", "Moin"),
        "Guten Morgen! Wie kann ich helfen?": ("Guten Morgen",),
        "Guten Abend! Wie kann ich helfen?": ("Guten Abend",),
        "Mir geht es gut, danke. Wie kann ich helfen?": (
            "Wie geht es dir?",
            "Wie geht's?",
            "Hallo, wie geht es dir?",
            "Wie geht es Ihnen?",
        ),
        "Gern geschehen!": ("Danke", "Vielen Dank", "Danke schön", "Herzlichen Dank"),
        "Auf Wiedersehen!": ("Auf Wiedersehen", "Tschüss", "Bis bald", "Bis später"),
    },
    "French": {
        "Bonjour ! Comment puis-je vous aider ?": ("Bonjour", "Salut", "Coucou", "Bonjour à vous"),
        "Bonsoir ! Comment puis-je vous aider ?": ("Bonsoir",),
        "Je vais bien, merci. Comment puis-je vous aider ?": (
            "Comment allez-vous ?",
            "Ça va ?",
            "Bonjour, comment ça va ?",
            "Comment vas-tu ?",
        ),
        "De rien !": ("Merci", "Merci beaucoup", "Merci bien", "Un grand merci"),
        "Au revoir !": ("Au revoir", "À bientôt", "À plus tard", "Adieu"),
    },
    "Spanish": {
        "¡Hola! ¿En qué puedo ayudarle?": ("Hola", "Hola, amigo", "Muy buenas", "Saludos"),
        "¡Buenos días! ¿En qué puedo ayudarle?": ("Buenos días",),
        "¡Buenas tardes! ¿En qué puedo ayudarle?": ("Buenas tardes",),
        "Estoy bien, gracias. ¿En qué puedo ayudarle?": (
            "¿Cómo estás?",
            "¿Qué tal?",
            "Hola, ¿cómo está usted?",
            "¿Cómo te va?",
        ),
        "¡De nada!": ("Gracias", "Muchas gracias", "Mil gracias", "Muchísimas gracias"),
        "¡Adiós!": ("Adiós", "Hasta luego", "Hasta pronto", "Chao"),
    },
}
_ENDINGS = ("", "", "!", ".", " :)", ", deepinfer-nano!", ", deepinfer-nano.")


def _greetings(random: Random) -> Example:
    language = random.choice(tuple(_GREETINGS))
    answer, texts = random.choice(tuple(_GREETINGS[language].items()))
    text = random.choice(texts)
    if text[-1] != "?":
        text += random.choice(_ENDINGS)
    if random.random() < 0.15:
        text = text.lower()
    return ask(random, "greetings", text, text, answer, hint=f"A greeting in {language}.")


TASKS: dict[str, tuple[Draw, float]] = {"greetings": (_greetings, 0.02)}
