"""Policies: how one layer is planned, over all ranks or node by node."""
