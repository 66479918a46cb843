"""Moves experts between ranks while steps run. The only part of the package that imports torch."""

from deepinfer_eplb.migrate.agreement import Vote, vote_over
from deepinfer_eplb.migrate.expert_maps import ExpertMaps
from deepinfer_eplb.migrate.migrator import Migrator

__all__ = ["ExpertMaps", "Migrator", "Vote", "vote_over"]
