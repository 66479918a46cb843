"""Normalisation and rotary embedding."""
