"""Counters and histograms of one rank, as plain values by name and labels."""

from deepinfer_core.metrics.families import Counter, Family, FamilyKind, Histogram, HistogramValues
from deepinfer_core.metrics.rank import Metrics

__all__ = ["Counter", "Family", "FamilyKind", "Histogram", "HistogramValues", "Metrics"]
