"""Conversation to prompt pieces, pieces to token ids."""
