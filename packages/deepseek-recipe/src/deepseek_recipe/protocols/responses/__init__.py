"""The Responses protocol."""
