"""Continuous batching: what runs in the next step, and what its result means. Integers only."""

from deepinfer_core.scheduler.budget import SchedulerLimits
from deepinfer_core.scheduler.counts import SchedulerCounts
from deepinfer_core.scheduler.release import Scrub
from deepinfer_core.scheduler.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerCounts", "SchedulerLimits", "Scrub"]
