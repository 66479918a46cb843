"""Continuous batching: what runs in the next step, and what its result means. Integers only."""

from deepinfer_core.scheduler.budget import SchedulerLimits
from deepinfer_core.scheduler.release import Scrub
from deepinfer_core.scheduler.scheduler import Scheduler, SchedulerCounts

__all__ = ["Scheduler", "SchedulerCounts", "SchedulerLimits", "Scrub"]
