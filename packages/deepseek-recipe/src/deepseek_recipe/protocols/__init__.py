"""The three API dialects: request bodies to conversations, reply events to response bodies."""
