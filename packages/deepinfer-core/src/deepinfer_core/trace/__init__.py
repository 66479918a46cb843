"""A run's timeline: a file that Perfetto opens, and a drawing.

    write_trace("trace.json", llm.engine.records)     open it at ui.perfetto.dev
    draw("trace.svg", llm.engine.records)             or .png, with matplotlib

Both can be called at any time; the records are those of the last steps.
"""

from deepinfer_core.trace.perfetto import write_trace
from deepinfer_core.trace.picture import check_picture, draw

__all__ = ["check_picture", "draw", "write_trace"]
